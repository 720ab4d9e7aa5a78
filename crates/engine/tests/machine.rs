//! The machine's measured limits: they are of this machine. How large they are is not asserted.

use march_engine::{Cpu, Instructions, Level, Machine};

use crate::common::cpu;

#[test]
fn the_peak_is_of_instructions_that_the_processor_has() {
    let machine = Machine::measure(cpu(1).backend::<Cpu>().unwrap(), Some(1 << 20));
    assert!(machine.instructions.present(), "{machine:?}");
    for measured in [machine.peak_gflops, machine.copy_gbs, machine.read_gbs] {
        assert!(measured.is_finite() && measured > 0.0, "{machine:?}");
    }
    // The system's own list of what the processor has, where there is one.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    {
        let flag = match machine.instructions {
            Instructions::Avx512 => "avx512f",
            Instructions::Avx2 => "avx2",
            Instructions::Base => "sse2",
        };
        let list = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        assert!(list.split_whitespace().any(|word| word == flag), "{flag}: {list}");
    }
}

#[test]
fn a_peak_is_measured_exactly_where_the_instructions_are_present() {
    let device = cpu(1);
    let cpu = device.backend::<Cpu>().unwrap();
    assert_eq!(Instructions::Base.present(), Level::portable().is_some());
    for set in Instructions::ALL {
        let peak = set.peak_gflops(cpu);
        assert_eq!(peak.is_some(), set.present(), "{set}");
        assert!(peak.is_none_or(|peak| peak.is_finite() && peak > 0.0), "{set}: {peak:?}");
    }
}

//! The check of a device passes on every device, and every operation has a speed.

use march_gpu::doctor::{Peaks, operations, speeds};

use crate::common;

#[test]
fn every_device_passes() {
    for device in common::devices() {
        let mut seen = 0;
        let lines = operations(&device, &mut |line| {
            seen += 1;
            eprintln!(
                "{:24} {:9.1e} {:9.1e} {} {}",
                line.operation, line.forward_error, line.gradient_error, line.passed, line.note
            );
        })
        .unwrap();
        assert_eq!(seen, lines.len());
        assert!(lines.iter().all(|line| line.passed), "{device:?}: {lines:?}");
    }
}

#[test]
fn speeds_of_every_device() {
    for device in common::devices() {
        let peaks = Peaks::measure(&device).unwrap();
        assert!(peaks.gflops > 0.0 && peaks.copy_gbs > 0.0 && peaks.gbs() >= peaks.add_gbs, "{peaks:?}");
        let list = speeds(&device, &peaks, &mut |speed| eprintln!("{speed:?}")).unwrap();
        for speed in &list {
            assert!(speed.gbs > 0.0 && speed.gbs_share > 0.0 && speed.size > 0, "{speed:?}");
            assert!(
                (speed.gflops - speed.gflops_share * peaks.gflops).abs() <= 1e-9 * peaks.gflops,
                "{speed:?}"
            );
        }
        // Forward, and forward and backward, of all but the optimizer.
        assert_eq!(2 * list.iter().filter(|speed| speed.backward).count() + 1, list.len());
        assert!(list.iter().any(|speed| speed.operation == "linear" && speed.gflops > 0.0));
    }
}

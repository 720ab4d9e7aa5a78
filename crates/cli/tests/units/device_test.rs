//! Tests of `device_test.rs`.

use march_cli::golden::Check;
use march_gpu::doctor::Line;
use march_lm::engine::{CpuOptions, Device, Products};

use march_cli::device_test::*;

fn line(passed: bool) -> Line {
    Line {
        operation: "swiglu".into(),
        forward_error: 0.0,
        gradient_error: 0.0,
        passed,
        note: if passed { String::new() } else { "gates × 60: output 0 is off by 2.0e-3".into() },
    }
}

/// The processor as a device: it passes.
#[test]
fn a_device_that_computes_the_same() {
    let options = CpuOptions { threads: 1, products: Products::BatchInvariant, ..Default::default() };
    let cpu = Device::cpu(options).unwrap();
    let mut shown = [0, 0];
    let test = DeviceTest::run(&cpu, &mut |step| match step {
        TestResult::Operation(_) => shown[0] += 1,
        TestResult::Model(_) => shown[1] += 1,
    })
    .unwrap();
    assert_eq!(test.failures(), [""; 0]);
    assert_eq!(shown, [test.operations.len(), test.models.len()]);
    assert_eq!(shown[1], 6);
    accept("cpu", &test).unwrap();
}

#[test]
fn a_device_that_is_refused() {
    let wrong = Check {
        kind: "losses",
        error: 0.5,
        allowed: 1e-4,
        what: "march: the loss of training step 2".into(),
    };
    let model = |check: &Check| ModelTest { model: "march", checks: Ok(vec![check.clone()]) };
    let message =
        |operations, models| accept("A GPU", &DeviceTest { operations, models }).unwrap_err().to_string();
    let said = message(vec![line(true), line(false)], vec![model(&wrong)]);
    for part in ["A GPU does", "swiglu: gates × 60: output 0", "(and 1 more)", "`march doctor --device gpu`"]
    {
        assert!(said.contains(part), "{said}");
    }
    let said = message(vec![line(true)], vec![model(&wrong)]);
    assert!(said.contains("training step 2 differs by 5.0e-1, and 1e-4 is allowed"), "{said}");
    let lost = march_lm::Error::Request("the device was lost".into());
    let said = message(Vec::new(), vec![ModelTest { model: "march", checks: Err(lost) }]);
    assert!(said.contains("march: the device was lost"), "{said}");
}

#[test]
fn what_is_noted() {
    let folder = tempfile::tempdir().unwrap();
    let passed = |device, program| PassedRecord::within(folder.path().join("new"), device, program);
    let one = passed("A GPU; driver 1", "march 1");
    assert!(!one.is_noted());
    one.note();
    assert!(one.is_noted());
    assert!(!passed("A GPU; driver 2", "march 1").is_noted());
    assert!(!passed("A GPU; driver 1", "march 2").is_noted());
    one.forget();
    assert!(!one.is_noted());
}

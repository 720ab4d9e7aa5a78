//! The check of a device passes on every device, and its report is JSON.

mod common;

use march_gpu::doctor;

#[test]
fn every_device_passes() {
    for device in common::devices() {
        let mut seen = 0;
        let report = doctor::run(&device, &mut |line| {
            seen += 1;
            eprintln!(
                "{:24} {:9.1e} {:9.1e} {} {}",
                line.operation, line.forward_error, line.gradient_error, line.passed, line.note
            );
        })
        .unwrap();
        eprintln!("{:?}", report.peaks);
        assert_eq!(seen, report.lines.len());
        assert!(report.passed, "{device:?}: {:?}", report.lines);
        let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(json["lines"].as_array().unwrap().len(), seen);
        assert_eq!(json["passed"], true);
        assert!(json["peaks"].as_array().unwrap().iter().any(|peak| peak["value"].as_f64().unwrap() > 0.0));
    }
}

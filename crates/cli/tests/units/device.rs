//! Tests of `device.rs`.

use march_cli::device::*;

#[test]
fn names_of_devices() {
    assert_eq!(device_name("cpu"), Ok(DeviceName::Cpu));
    assert_eq!(device_name("gpu"), Ok(DeviceName::Gpu(None)));
    assert_eq!(device_name("gpu:0"), Ok(DeviceName::Gpu(Some(0))));
    assert_eq!(device_name("gpu:12"), Ok(DeviceName::Gpu(Some(12))));
    assert_eq!(
        ["cpu", "gpu", "gpu:3"].map(|name| device_name(name).unwrap().flag()),
        ["", " --device gpu", " --device gpu:3"]
    );
    for wrong in [
        "",
        "GPU",
        "gpu:",
        "gpu:+1",
        "gpu:-1",
        "gpu:a",
        "gpu:1:2",
        "cpu:1",
        "cuda",
        "gpu:99999999999999999999",
    ] {
        assert!(device_name(wrong).unwrap_err().contains("`march doctor`"), "{wrong}");
    }
}

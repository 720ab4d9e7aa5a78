//! The check of a device passes on every device, and every operation has a speed.

use march_gpu::Gpu;
use march_gpu::doctor::{Peaks, operations, speeds};

use crate::common::{devices, tests};

tests![every_device_passes, speeds_of_every_device];

fn every_device_passes() {
    for device in devices() {
        let mut seen = 0;
        let lines = operations(device, &mut |_| seen += 1).unwrap();
        assert_eq!(seen, lines.len());
        assert!(lines.iter().all(|line| line.passed), "{device}: {lines:?}");
    }
}

fn speeds_of_every_device() {
    for device in devices() {
        let peaks = Peaks::measure(device.backend::<Gpu>().unwrap()).unwrap();
        assert!(peaks.gflops > 0.0 && peaks.copy_gbs > 0.0 && peaks.gbs() >= peaks.add_gbs, "{peaks:?}");
        let list = speeds(device, &peaks, &mut |_| {}).unwrap();
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

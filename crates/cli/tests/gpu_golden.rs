//! The golden checkpoints on every GPU of this machine: logits, gradients, training, and decoding token by token.
//!
//! Without a GPU, or a software device, the tests do nothing; with `MARCH_GPU=required` they fail instead.
#![cfg(feature = "gpu")]

#[path = "../../march/tests/common/golden.rs"]
mod checks;
#[path = "../../march/tests/common/mod.rs"]
mod common;

use std::sync::OnceLock;

use checks::{NAMES, decoding, gradients, logits, training};
use march_gpu::Gpu;

/// Every GPU that can be used, without a processor to fall back to: an operation that is missing fails. All tests share
/// them, so that a kernel is compiled once for each.
fn devices() -> &'static [Gpu] {
    static DEVICES: OnceLock<Vec<Gpu>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let all = march_gpu::adapters();
        let usable = all.iter().filter(|adapter| adapter.usable.is_ok());
        let open: Vec<Gpu> = usable.map(|adapter| Gpu::open(Some(adapter.index)).unwrap()).collect();
        let required = std::env::var("MARCH_GPU").is_ok_and(|value| value == "required");
        assert!(!open.is_empty() || !required, "no GPU can be used: {all:?}");
        if open.is_empty() {
            eprintln!("skipped: no GPU or software device was found");
        }
        open
    })
}

#[test]
fn logits_of_devices() {
    for device in devices() {
        logits(device, &NAMES, &[&[7, 64, 1, 33]]);
    }
}

#[test]
fn gradients_of_devices() {
    for device in devices() {
        gradients(device, &NAMES);
    }
}

#[test]
fn training_on_devices() {
    for device in devices() {
        training(device, &NAMES);
    }
}

#[test]
fn decoding_on_devices() {
    for device in devices() {
        decoding(device, &NAMES);
    }
}

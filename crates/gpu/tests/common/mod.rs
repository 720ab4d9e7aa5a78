//! Runs programs of the engine's tests on every GPU of this machine, and compares outputs and gradients with the f64
//! references.
//!
//! Without a GPU, or a software device, the tests do nothing; with `MARCH_GPU=required` they fail instead.
#![allow(dead_code, unused_imports, missing_docs)]

#[path = "../../../engine/tests/common/mod.rs"]
mod engine;

use std::sync::OnceLock;

use march_engine::Reference;
use march_gpu::Gpu;

pub use engine::{
    FORWARD, GRADIENT, Input, Outcome, Program, Random, assert_close, assert_close_above, cotangent, lists,
    outcome,
};

/// Every GPU that can be used. They are opened once: a device compiles a kernel when it first runs it.
pub fn devices() -> Vec<Gpu> {
    static ALL: OnceLock<Vec<Gpu>> = OnceLock::new();
    ALL.get_or_init(open_devices).clone()
}

/// Every GPU that can be used, opened for the caller alone, such as to count dispatches.
pub fn open_devices() -> Vec<Gpu> {
    let all = march_gpu::adapters();
    let usable: Vec<Gpu> =
        all.iter().filter(|a| a.usable.is_ok()).map(|a| Gpu::open(Some(a.index)).unwrap()).collect();
    if usable.is_empty() {
        let required = std::env::var("MARCH_GPU").is_ok_and(|value| value == "required");
        assert!(!required, "no GPU can be used: {all:?}");
        eprintln!("skipped: no GPU or software device was found");
    }
    usable
}

/// gpu = reference: every output and every gradient, on every device; and twice the same bits.
pub fn compare(label: &str, program: &impl Program, inputs: &[Input]) {
    compare_within(label, program, inputs, FORWARD, GRADIENT);
}

/// [`compare`] with tolerances of its own, relative to the largest value of each tensor.
pub fn compare_within(label: &str, program: &impl Program, inputs: &[Input], forward: f64, gradient: f64) {
    let want = outcome(&Reference, program, inputs).unwrap();
    let largest = |values: &[f64]| values.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    let floor = 0.1 * want.gradients.iter().flatten().map(|g| largest(g)).fold(1e-4, f64::max);
    for device in devices() {
        let who = format!("{label} on {device:?}");
        let found = outcome(&device, program, inputs).unwrap_or_else(|error| panic!("{who}: {error}"));
        for (i, (f, w)) in found.outputs.iter().zip(&want.outputs).enumerate() {
            assert_eq!(f.0, w.0, "{who}: shape of output {i}");
            assert_close(&format!("{who}: output {i}"), &f.1, &w.1, forward);
        }
        for (i, input) in inputs.iter().enumerate() {
            match (&found.gradients[i], &want.gradients[i]) {
                (Some(f), Some(w)) => {
                    assert_close_above(&format!("{who}: gradient of {}", input.name), f, w, gradient, floor);
                }
                (None, None) => {}
                (f, w) => {
                    panic!("{who}: gradient of {}: there {}, here {}", input.name, w.is_some(), f.is_some())
                }
            }
        }
        let again = outcome(&device, program, inputs).unwrap();
        for (i, (a, b)) in again.outputs.iter().zip(&found.outputs).enumerate() {
            assert!(a.1 == b.1, "{who}: output {i} is not repeatable");
        }
        assert!(again.gradients == found.gradients, "{who}: gradients are not repeatable");
    }
}

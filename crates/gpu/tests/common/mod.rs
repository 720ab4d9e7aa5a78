//! Runs programs on every GPU of this machine, and compares outputs and gradients with the reference device, with the
//! tools of the engine's tests.
#![allow(dead_code, unused_imports, missing_docs)]

#[path = "../../../engine/tests/common/mod.rs"]
mod engine;

use std::sync::OnceLock;

use march_engine::Device;
use march_gpu::Gpu;

pub use engine::{
    FORWARD, GRADIENT, Input, Outcome, Output, Program, Random, assert_close, cotangent, cpu, infer, lists,
    outcome, tensors,
};

/// A test, with its full name.
#[derive(Clone, Copy)]
pub struct Test {
    pub name: &'static str,
    pub run: fn(),
}

/// The tests of a file: functions of it.
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        pub const TESTS: &[crate::common::Test] = &[
            $(crate::common::Test { name: concat!(module_path!(), "::", stringify!($name)), run: $name }),*
        ];
    };
}
pub(crate) use tests;

/// Every GPU that can be used. They are opened once: a device compiles a kernel when it first runs it.
pub fn devices() -> &'static [Device] {
    static ALL: OnceLock<Vec<Device>> = OnceLock::new();
    ALL.get_or_init(open_devices)
}

/// Every GPU that can be used, opened for the caller alone, such as to count dispatches.
pub fn open_devices() -> Vec<Device> {
    let all = march_gpu::adapters();
    let usable = all.iter().filter(|adapter| adapter.usable.is_ok());
    let open: Vec<Device> = usable.map(|adapter| Gpu::open(Some(adapter.index)).unwrap()).collect();
    assert!(!open.is_empty(), "no GPU can be used: {all:?}");
    open
}

/// Dispatches of a device that nobody else uses, since it was opened.
pub fn dispatches(device: &Device) -> u64 {
    device.backend::<Gpu>().unwrap().dispatches()
}

/// device = reference: every output and every gradient, on every device; and twice the same bits.
pub fn compare(label: &str, program: Program<'_>, inputs: &[Input]) {
    compare_within(label, program, inputs, [FORWARD, GRADIENT]);
}

/// [`compare`] with tolerances of its own, relative to the largest value of each tensor.
pub fn compare_within(label: &str, program: Program<'_>, inputs: &[Input], within: [f64; 2]) {
    engine::compare_on(devices(), label, program, inputs, within);
}

//! The five golden checkpoints, through the CPU and through the equations in f64: logits, routing weights,
//! other policies, gradients, and six steps of AdamW.

#[path = "../../cli/src/golden/mod.rs"]
#[allow(dead_code)]
mod checks;

use checks::{Check, Example};
use march_lm::engine::{CpuOptions, Device, Level};

use crate::common::{cpu, invariant};

/// How the tokens come when a bank holds what was read before.
const CALLS: [&[usize]; 3] = [&[150], &[1], &[7, 64, 1, 33]];

/// The same for routing weights; `None`: no bank.
const TRACED: [Option<usize>; 4] = [None, Some(150), Some(1), Some(11)];

fn assert_passed(checks: impl IntoIterator<Item = Check>) {
    for check in checks {
        assert_eq!(check.failure(), None);
    }
}

fn logits(device: &Device) {
    for example in Example::golden().unwrap() {
        assert_passed([example.logits(device, &CALLS).unwrap(), example.routing(device, &TRACED).unwrap()]);
    }
}

fn gradients(device: &Device) {
    for example in Example::golden().unwrap() {
        assert_passed([example.gradients(device).unwrap()]);
    }
}

fn training(device: &Device) {
    for example in Example::golden().unwrap() {
        assert_passed(example.training(device).unwrap());
    }
}

#[test]
fn logits_of_the_fast_engine() {
    logits(&cpu());
    logits(&invariant());
    if Level::portable().is_some() {
        logits(&Device::cpu(CpuOptions { threads: 1, portable: true, ..Default::default() }).unwrap());
    }
}

#[test]
fn logits_of_the_reference_engine() {
    logits(&Device::reference());
}

#[test]
fn gradients_of_the_fast_engine() {
    gradients(&cpu());
    gradients(&invariant());
}

#[test]
fn gradients_of_the_reference_engine() {
    gradients(&Device::reference());
}

#[test]
fn decoding_with_the_fast_engine() {
    for example in Example::golden().unwrap() {
        assert_passed([example.decoding(&invariant()).unwrap()]);
    }
}

#[test]
fn training_with_the_fast_engine() {
    training(&cpu());
}

#[test]
fn training_with_the_reference_engine() {
    training(&Device::reference());
}

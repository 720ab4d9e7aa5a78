//! The five golden checkpoints, through the fast engine and through the equations in f64: logits, routing weights,
//! other policies, gradients, and six steps of AdamW.

#[path = "common/golden.rs"]
mod checks;
mod common;
#[path = "../../engine/tests/toy/mod.rs"]
mod toy;

use checks::{NAMES, decoding, gradients, logits, training};
use common::{cpu, invariant};
use march::engine::{Cpu, CpuOptions, Reference};

/// How the tokens come when a bank holds what was read before.
const CALLS: [&[usize]; 3] = [&[150], &[1], &[7, 64, 1, 33]];

#[test]
fn logits_of_the_fast_engine() {
    logits(&cpu(), &NAMES, &CALLS);
    logits(&invariant(), &NAMES, &CALLS);
    logits(
        &Cpu::new(CpuOptions { threads: 1, portable: true, ..Default::default() }).unwrap(),
        &NAMES,
        &CALLS,
    );
}

#[test]
fn logits_of_the_reference_engine() {
    logits(&Reference, &NAMES, &CALLS);
}

#[test]
fn gradients_of_the_fast_engine() {
    gradients(&cpu(), &NAMES);
    gradients(&invariant(), &NAMES);
}

#[test]
fn gradients_of_the_reference_engine() {
    gradients(&Reference, &NAMES);
}

#[test]
fn decoding_with_the_fast_engine() {
    decoding(&invariant(), &NAMES);
}

#[test]
fn training_with_the_fast_engine() {
    training(&cpu(), &NAMES);
}

#[test]
fn training_with_the_reference_engine() {
    training(&Reference, &NAMES);
}

/// A device that implements four operations and leaves the others to the reference engine computes the same model.
#[test]
fn a_partial_engine() {
    let engine = toy::engine();
    logits(&engine, &["march_topk"], &CALLS);
    let forward = engine.device.counts();
    gradients(&engine, &["march_topk"]);
    let all = engine.device.counts();
    // Products, sums of residuals and norms ran on the device, in both; the model calls no other function of one number.
    for operation in [0, 2, 3] {
        assert!(forward[operation] > 0 && all[operation] > forward[operation], "{forward:?}, {all:?}");
    }
}

//! The tests of GPUs, as one program, which is linked once: a module for each operation.
//!
//! They run on every GPU of this machine, software devices included. Without one, those that need it are ignored; with
//! `MARCH_GPU=required` they fail instead.

mod common;

mod adamw;
mod anchor_read;
mod attention;
mod cross_entropy;
mod doctor;
mod elementwise;
mod embedding;
mod gated_delta;
mod layout;
mod linear;
mod lists;
mod log_linear;
mod matmul;
mod reduce;
mod rms_norm;
mod rotary;
mod shaders;
mod short_conv;
mod softmax;
mod state_read;
mod swiglu;
mod table;

use libtest_mimic::{Arguments, Trial};

use crate::common::Test;

fn main() {
    let required = std::env::var("MARCH_GPU").is_ok_and(|value| value == "required");
    let ignored = !required && march_gpu::adapters().iter().all(|adapter| adapter.usable.is_err());
    let trial = |Test { name, run }: Test| {
        let (_, name) = name.split_once("::").unwrap();
        Trial::test(name, move || {
            run();
            Ok(())
        })
    };
    let gpu = [
        adamw::TESTS,
        anchor_read::TESTS,
        attention::TESTS,
        cross_entropy::TESTS,
        doctor::TESTS,
        elementwise::TESTS,
        embedding::TESTS,
        gated_delta::TESTS,
        layout::TESTS,
        linear::TESTS,
        lists::TESTS,
        log_linear::TESTS,
        matmul::TESTS,
        reduce::TESTS,
        rms_norm::TESTS,
        rotary::TESTS,
        short_conv::TESTS,
        softmax::TESTS,
        state_read::TESTS,
        swiglu::TESTS,
    ];
    let gpu = gpu.concat().into_iter().map(|test| trial(test).with_kind("gpu").with_ignored_flag(ignored));
    let without = [shaders::TESTS, table::TESTS].concat().into_iter().map(trial);
    libtest_mimic::run(&Arguments::from_args(), gpu.chain(without).collect()).exit();
}

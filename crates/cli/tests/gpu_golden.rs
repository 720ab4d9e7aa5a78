//! The golden checkpoints, and a model of Memory Caching, on every GPU of this machine: logits, routing, gradients,
//! training, and decoding token by token.
//!
//! Without a GPU, or a software device, the tests do nothing; with `MARCH_GPU=required` they fail instead.

use std::sync::OnceLock;

use march_cli::golden::Example;
use march_gpu::Gpu;
use march_lm::engine::{CpuOptions, Device};

/// Every GPU that can be used. All tests share them, so that a kernel is compiled once for each.
fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let all = march_gpu::adapters();
        let usable = all.iter().filter(|adapter| adapter.usable.is_ok());
        let open: Vec<Device> = usable.map(|adapter| Gpu::open(Some(adapter.index)).unwrap()).collect();
        let required = std::env::var("MARCH_GPU").is_ok_and(|value| value == "required");
        assert!(!open.is_empty() || !required, "no GPU can be used: {all:?}");
        if open.is_empty() {
            eprintln!("skipped: no GPU or software device was found");
        }
        open
    })
}

fn example(name: &str) -> Example {
    Example::all().unwrap().into_iter().find(|example| example.name == name).unwrap()
}

fn check(name: &str) {
    let example = example(name);
    for device in devices() {
        for check in example.checks(device).unwrap() {
            assert_eq!(check.failure(), None, "{device:?}");
        }
    }
}

#[test]
fn transformer() {
    check("transformer");
}

#[test]
fn gated_deltanet() {
    check("gated_deltanet");
}

#[test]
fn log_linear() {
    check("log_linear");
}

#[test]
fn march() {
    check("march");
}

#[test]
fn march_top_k() {
    check("march_topk");
}

#[test]
fn memory_caching() {
    check("memory_caching");
}

/// The checks notice a device that computes slightly wrong results: here as with embeddings that are 2 % too large.
#[test]
fn wrong_results_fail() {
    let mut example = example("march");
    example.parameters[0].iter_mut().for_each(|value| *value *= 1.02);
    let device = Device::cpu(CpuOptions { threads: 1, ..Default::default() }).unwrap();
    let checks = example.checks(&device).unwrap();
    let failed: Vec<_> =
        checks.iter().filter(|check| check.failure().is_some()).map(|check| check.kind).collect();
    for kind in ["logits", "routing", "gradients", "losses", "norms"] {
        assert!(failed.contains(&kind), "{kind} passed; these failed: {failed:?}");
    }
}

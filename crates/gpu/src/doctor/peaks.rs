//! What the device reaches: products, copies, and a large elementwise operation. Sizes start small and grow while they
//! are fast, so that a software device takes no more than a few seconds.

use std::time::Instant;

use march_engine::ops::elementwise::Zip;
use march_engine::ops::linear::Linear;
use march_engine::{Engine, Result};

use crate::gpu::Gpu;
use crate::tensor::Tensor;

/// A measurement that takes this long, in seconds, is good enough.
const LONG: f64 = 0.1;

/// Speeds of the device; what it cannot do is left out.
pub(super) fn measure(gpu: &Gpu) -> Vec<(String, f64, String)> {
    let mut found = Vec::new();
    if let Ok((size, speed)) = product(gpu) {
        found.push((format!("product {size}×{size}×{size}"), speed, "GFLOP/s".into()));
    }
    if let Ok(speed) = copy(gpu) {
        found.push(("copy (bytes read and written)".into(), speed, "GB/s".into()));
    }
    if let Ok(speed) = sum(gpu) {
        found.push(("a + b (bytes read and written)".into(), speed, "GB/s".into()));
    }
    found
}

/// Seconds for one of `runs` runs of `task`.
fn seconds(gpu: &Gpu, runs: usize, task: &mut impl FnMut() -> Result<()>) -> Result<f64> {
    gpu.wait()?;
    let start = Instant::now();
    for _ in 0..runs {
        task()?;
    }
    gpu.wait()?;
    Ok(start.elapsed().as_secs_f64() / runs as f64)
}

/// Seconds for one run of `task`, or nothing if one of `growth` times its size would still be fast: the larger one is
/// the better measure. The first run compiles kernels and allocates memory and does not count.
fn measured(gpu: &Gpu, growth: f64, mut task: impl FnMut() -> Result<()>) -> Result<Option<f64>> {
    task()?;
    let time = seconds(gpu, 1, &mut task)?;
    if growth * time < LONG {
        return Ok(None);
    }
    let runs = (LONG / time).clamp(1.0, 50.0) as usize;
    Ok(Some(seconds(gpu, runs, &mut task)?.min(time)))
}

/// Size and GFLOP/s of the largest square product that still takes well under a second.
fn product(gpu: &Gpu) -> Result<(usize, f64)> {
    let mut size = 128;
    loop {
        let (x, weight) = (gpu.full(&[size, size], 0.5)?, gpu.full(&[size, size], 0.25)?);
        let task = || gpu.linear(Linear { x: &x, weight: &weight, bias: None }).map(|_| ());
        // A size eight times as costly, unless this is the largest.
        let growth = if size < 4096 { 8.0 } else { f64::INFINITY };
        if let Some(time) = measured(gpu, growth, task)? {
            return Ok((size, 2e-9 * (size as f64).powi(3) / time));
        }
        size *= 2;
    }
}

/// Elements of the largest tensors whose traffic is measured: 64 MiB each, far more than a cache holds.
const ELEMENTS: usize = 16 << 20;

/// GB/s of a task that moves `bytes` bytes for each element of the tensors that it is given.
fn traffic(gpu: &Gpu, bytes: usize, task: impl Fn(&Tensor, &Tensor) -> Result<()>) -> Result<f64> {
    let mut count = 64 << 10;
    loop {
        let (a, b) = (gpu.full(&[count], 1.0)?, gpu.full(&[count], 2.0)?);
        let growth = if count < ELEMENTS { 4.0 } else { f64::INFINITY };
        if let Some(time) = measured(gpu, growth, || task(&a, &b))? {
            return Ok(1e-9 * (bytes * count) as f64 / time);
        }
        count *= 4;
    }
}

fn copy(gpu: &Gpu) -> Result<f64> {
    traffic(gpu, 8, |a, b| {
        gpu.copy(a, 0, b, 0, a.len());
        Ok(())
    })
}

fn sum(gpu: &Gpu) -> Result<f64> {
    traffic(gpu, 12, |a, b| gpu.zip(Zip::Add, a, b).map(|_| ()))
}

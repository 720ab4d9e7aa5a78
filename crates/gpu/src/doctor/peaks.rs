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

/// Seconds for one run of `task`, after a first one that compiles kernels and allocates memory.
fn seconds(gpu: &Gpu, mut task: impl FnMut() -> Result<()>) -> Result<f64> {
    task()?;
    gpu.wait()?;
    let mut runs = 1;
    loop {
        let start = Instant::now();
        for _ in 0..runs {
            task()?;
        }
        gpu.wait()?;
        let time = start.elapsed().as_secs_f64();
        if time > LONG || runs >= 256 {
            return Ok(time / f64::from(runs));
        }
        runs *= 4;
    }
}

/// Size and GFLOP/s of the largest square product that still takes well under a second.
fn product(gpu: &Gpu) -> Result<(usize, f64)> {
    let mut size = 128;
    loop {
        let (x, weight) = (gpu.full(&[size, size], 0.5)?, gpu.full(&[size, size], 0.25)?);
        let time = seconds(gpu, || gpu.linear(Linear { x: &x, weight: &weight, bias: None }).map(|_| ()))?;
        // The next size takes eight times as long.
        if 8.0 * time > LONG || size >= 4096 {
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
        let time = seconds(gpu, || task(&a, &b))?;
        if 4.0 * time > LONG || count >= ELEMENTS {
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

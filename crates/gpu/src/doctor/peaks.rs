//! The device's measured peaks: multiply-adds from registers, and bytes moved. Sizes start small and grow while they are
//! fast, so that a software device takes no more than a few seconds.

use std::time::Instant;

use march_engine::Result;
use march_engine::ops::elementwise::Zip;

use crate::array::GpuArray;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::ops::elementwise;

/// A measurement that takes this long, in seconds, is good enough.
const LONG: f64 = 0.1;

/// Elements of the largest tensors whose traffic is measured: 64 MiB each, far more than a cache holds.
pub(super) const ELEMENTS: usize = 16 << 20;

/// Measured peaks of a device.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// Multiply-adds from registers, in GFLOP/s; a multiply-add counts as two.
    pub gflops: f64,
    /// A copy, in GB/s read and written.
    pub copy_gbs: f64,
    /// a + b, in GB/s read and written.
    pub add_gbs: f64,
}

impl Peaks {
    /// Measures a GPU.
    pub fn measure(gpu: &Gpu) -> Result<Self> {
        let copy = |a: &GpuArray, b: &GpuArray| {
            gpu.copy(a, 0, b, 0, a.len());
            Ok(())
        };
        let add =
            |a: &GpuArray, b: &GpuArray| elementwise::zip_arrays(gpu, Zip::Add, [a, b], a.shape()).map(drop);
        Ok(Self {
            gflops: arithmetic(gpu)?,
            copy_gbs: traffic(gpu, 8, &copy)?,
            add_gbs: traffic(gpu, 12, &add)?,
        })
    }

    /// The faster of both ways to move bytes, in GB/s.
    pub fn gbs(&self) -> f64 {
        self.copy_gbs.max(self.add_gbs)
    }
}

/// Something that is timed.
pub(super) type Task<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// The largest size whose task is still fast, and the seconds that one run takes. Sizes double from the first to the last;
/// a task of twice the size takes about `cost` times as long.
pub(super) fn fastest<'a>(
    gpu: &Gpu,
    [first, last]: [usize; 2],
    cost: f64,
    make: impl Fn(usize) -> Result<Task<'a>>,
) -> Result<(usize, f64)> {
    let mut size = first;
    loop {
        let mut task = make(size)?;
        // The first run compiles kernels and allocates memory; it does not count.
        task()?;
        let time = seconds(gpu, 1, &mut task)?;
        if size >= last || cost * time >= LONG {
            let runs = (LONG / time).clamp(1.0, 50.0) as usize;
            return Ok((size, seconds(gpu, runs, &mut task)?.min(time)));
        }
        size *= 2;
    }
}

/// Seconds for one of `runs` runs of a task.
fn seconds(gpu: &Gpu, runs: usize, task: &mut Task<'_>) -> Result<f64> {
    gpu.wait()?;
    let start = Instant::now();
    for _ in 0..runs {
        task()?;
    }
    gpu.wait()?;
    Ok(start.elapsed().as_secs_f64() / runs as f64)
}

/// Multiply-adds from registers; see `fma.wgsl`.
pub(crate) fn kernel() -> Kernel {
    Kernel {
        name: "multiply-adds from registers",
        source: include_str!("fma.wgsl"),
        entry: "chains",
        constants: Vec::new(),
        writes: &[true],
    }
}

/// GFLOP/s of multiply-adds from registers.
fn arithmetic(gpu: &Gpu) -> Result<f64> {
    const TURNS: usize = 256;
    let (groups, time) = fastest(gpu, [16, 16 << 10], 2.0, |groups| {
        let y = gpu.empty(&[groups * 256])?;
        let numbers = [y.len() as u32, TURNS as u32, 0.999_f32.to_bits(), 0.001_f32.to_bits()];
        Ok(Box::new(move || gpu.run(&kernel(), &[&y], &numbers, gpu.list(groups))))
    })?;
    Ok(1e-9 * (groups * 256 * TURNS * 128) as f64 / time)
}

/// GB/s of a task that moves `bytes` bytes for each element of the tensors that it is given.
fn traffic<'a>(
    gpu: &'a Gpu,
    bytes: usize,
    task: &'a dyn Fn(&GpuArray, &GpuArray) -> Result<()>,
) -> Result<f64> {
    let (count, time) = fastest(gpu, [64 << 10, ELEMENTS], 2.0, |count| {
        let (a, b) = (elementwise::full(gpu, &[count], 1.0)?, elementwise::full(gpu, &[count], 2.0)?);
        Ok(Box::new(move || task(&a, &b)))
    })?;
    Ok(1e-9 * (bytes * count) as f64 / time)
}

//! Measured limits of the machine: peak multiply-adds per second from registers ([`Instructions`]), and memory
//! bandwidth. Benchmarks report their results as fractions of these.

use std::hint::black_box;
use std::time::Instant;

use crate::cpu::{Cpu, Shared};
use crate::peak::{Instructions, highest};
use crate::simd::{Kernel, LANES, Simd};

/// Measured limits of the machine with the engine's threads.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Floating-point operations per second in units of 10⁹; a multiply-add counts as two. The highest of all
    /// instruction sets that the processor has, whether or not the engine's kernels use it.
    pub peak_gflops: f64,
    /// The instructions that reached it.
    pub instructions: Instructions,
    /// Bytes read and written per second by a copy between arrays much larger than the caches, in units of 10⁹.
    pub copy_gbs: f64,
    /// Bytes read per second from an array much larger than the caches, in units of 10⁹.
    pub read_gbs: f64,
}

impl Machine {
    /// Measures for about a second. `bytes` is the size of each array; the default of 256 MiB is much larger than
    /// the last-level cache of an ordinary machine.
    pub fn measure(cpu: &Cpu, bytes: Option<usize>) -> Self {
        let len = bytes.unwrap_or(256 << 20) / size_of::<f32>();
        let mut from = cpu.zeros(&[len]);
        from.data_mut().fill(1.0);
        let mut to = cpu.zeros(&[len]);
        let tasks = cpu.threads() * 8;
        let part = len / tasks / LANES * LANES;
        let array_bytes = (part * tasks * size_of::<f32>()) as f64;
        let (peak_gflops, instructions) = highest(cpu);
        let out = Shared::new(to.data_mut());
        let copy = best(5, || {
            cpu.parallel(tasks, |t| {
                #[allow(unsafe_code)]
                // SAFETY: tasks write disjoint parts.
                let to = unsafe { out.part(t * part, part) };
                cpu.level().run(Copy(&from.data()[t * part..(t + 1) * part], to));
            });
        });
        let read = best(5, || {
            cpu.parallel(tasks, |t| {
                black_box(cpu.level().run(Read(&from.data()[t * part..(t + 1) * part])));
            });
        });
        Self {
            peak_gflops,
            instructions,
            copy_gbs: 2.0 * array_bytes / copy / 1e9,
            read_gbs: array_bytes / read / 1e9,
        }
    }
}

/// Shortest time of several runs, in seconds.
pub(crate) fn best(runs: usize, mut f: impl FnMut()) -> f64 {
    (0..runs)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

struct Copy<'a>(&'a [f32], &'a mut [f32]);
impl Kernel for Copy<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        self.1.copy_from_slice(self.0);
    }
}

struct Read<'a>(&'a [f32]);
impl Kernel for Read<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut acc = [s.splat(0.0); 4];
        for c in self.0.chunks_exact(4 * LANES) {
            for i in 0..4 {
                acc[i] = s.add(acc[i], s.load(&c[i * LANES..]));
            }
        }
        s.sum(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])))
    }
}

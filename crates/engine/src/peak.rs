//! The most multiply-adds per second that the processor can do from registers, with the widest vectors that it has. These
//! need not be those of the engine's own kernels (see [`Level`]).

use std::fmt;
use std::hint::black_box;

use crate::cpu::Cpu;
use crate::machine::best;
use crate::simd::wide::{Path, WIDE, Wide, WideKernel};
use crate::simd::{Kernel, LANES, Level, Simd};

/// Independent chains of multiply-adds: enough to hide their latency, few enough to stay in 16 registers.
const CHAINS: usize = 12;
/// Multiply-adds in a chain.
const ROUNDS: usize = 8_000_000;

/// Instruction sets whose peak can be measured, the widest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instructions {
    /// 512-bit vectors with fused multiply-add.
    Avx512,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// What every processor of this architecture has; on x86-64 only with the feature `portable`.
    Base,
}

impl Instructions {
    /// All of them, the widest first.
    pub const ALL: [Self; 3] = [Self::Avx512, Self::Avx2, Self::Base];

    /// Whether this processor has them, and the system lets programs use them.
    pub fn present(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => std::arch::is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512 => false,
            Self::Avx2 => Level::Avx2.present(),
            Self::Base => Level::portable().is_some(),
        }
    }

    /// The usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "AVX-512",
            Self::Avx2 => "AVX2",
            Self::Base if cfg!(target_arch = "x86_64") => "SSE2",
            Self::Base if cfg!(target_arch = "aarch64") => "NEON",
            Self::Base => "portable",
        }
    }

    /// Floating-point operations per second of all threads in units of 10⁹, a multiply-add counted as two: the best of
    /// some runs. `None` if the processor does not have these instructions.
    pub fn peak_gflops(self, cpu: &Cpu) -> Option<f64> {
        let (run, lanes): (fn(), usize) = match self {
            _ if !self.present() => return None,
            Self::Avx512 => (chains_of_16, 16),
            Self::Avx2 => (|| Level::Avx2.run(Chains), LANES),
            #[cfg(any(not(target_arch = "x86_64"), feature = "portable"))]
            Self::Base => (|| Level::Portable.run(Chains), LANES),
            #[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
            Self::Base => return None,
        };
        let seconds = best(8, || cpu.parallel(cpu.threads(), |_| run()));
        Some((cpu.threads() * CHAINS * ROUNDS * lanes * 2) as f64 / seconds / 1e9)
    }
}

/// The highest peak of all instruction sets that the processor has, and which of them it was.
pub(crate) fn highest(cpu: &Cpu) -> (f64, Instructions) {
    // The widest vectors are the fastest on most processors, but not on those that slow down for them. Nothing is slower
    // than the base, so that it counts only where there is nothing else.
    let wide = Instructions::ALL.into_iter().filter(|&set| set != Instructions::Base);
    let peaks = wide.filter_map(|set| Some((set.peak_gflops(cpu)?, set)));
    peaks
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .unwrap_or_else(|| (Instructions::Base.peak_gflops(cpu).unwrap_or_default(), Instructions::Base))
}

impl fmt::Display for Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Path {
    /// Operations per second of all threads on integers of eight bits in units of 10⁹, a multiply-add counted as two: the
    /// best of some runs. `None` if the processor does not have these instructions.
    pub fn peak_gops(self, cpu: &Cpu) -> Option<f64> {
        let rounds = if self == Self::Portable { ROUNDS / 64 } else { ROUNDS };
        if !self.present() {
            return None;
        }
        let seconds = best(8, || cpu.parallel(cpu.threads(), |_| self.run(IntegerChains(rounds))));
        Some((cpu.threads() * CHAINS * rounds * 4 * WIDE * 2) as f64 / seconds / 1e9)
    }
}

/// Products of three times 64 codes with four numbers in every lane, which change from round to round.
struct IntegerChains(usize);

impl WideKernel for IntegerChains {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Wide>(self, s: S) {
        let (codes, starts) = (black_box([7u8; 3 * 64]), black_box([1u32; CHAINS * WIDE]));
        let x = black_box([3i8; 2 * 4 * 4]);
        // SAFETY: the arrays have as many elements as are read.
        unsafe {
            let mut acc = [s.load_int(starts.as_ptr()); CHAINS];
            let mut w = [s.eight(s.codes(codes.as_ptr())); 3];
            for k in 0..CHAINS {
                acc[k] = s.load_int(starts.as_ptr().add(k * WIDE));
            }
            for j in 0..3 {
                w[j] = s.eight(s.codes(codes.as_ptr().add(64 * j)));
            }
            for round in 0..self.0 {
                for i in 0..4 {
                    let x = s.quad(x.as_ptr().add((round % 2 * 4 + i) * 4));
                    for j in 0..3 {
                        acc[3 * i + j] = s.step8(acc[3 * i + j], w[j], x);
                    }
                }
            }
            for a in acc {
                let mut lanes = [0; WIDE];
                s.store_int(lanes.as_mut_ptr(), a);
                black_box(lanes);
            }
        }
    }
}

struct Chains;

impl Kernel for Chains {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (x, y) = (s.splat(black_box(0.999)), s.splat(black_box(0.001)));
        let mut acc = [s.splat(black_box(1.0)); CHAINS];
        for _ in 0..ROUNDS {
            for a in &mut acc {
                *a = s.fma(*a, x, y);
            }
        }
        for a in acc {
            black_box(s.sum(a));
        }
    }
}

/// [`Chains`] with 16 lanes.
fn chains_of_16() {
    #[cfg(target_arch = "x86_64")]
    if Instructions::Avx512.present() {
        #[allow(unsafe_code)]
        // SAFETY: the processor has the feature.
        unsafe {
            avx512_chains();
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline(never)]
fn avx512_chains() {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
    let (x, y) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(0.001)));
    let mut acc = [_mm512_set1_ps(black_box(1.0)); CHAINS];
    for _ in 0..ROUNDS {
        for a in &mut acc {
            *a = _mm512_fmadd_ps(*a, x, y);
        }
    }
    for a in acc {
        black_box(_mm512_reduce_add_ps(a));
    }
}

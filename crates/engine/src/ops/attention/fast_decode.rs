//! Causal attention for a single query, as in decoding with a key-value cache.
//!
//! With one query the cost is reading the cache from memory, so the work is arranged to read it once and
//! sequentially: a task processes neighbouring heads tile by tile, which gives long contiguous reads, and values
//! are used in place. Sums have the same terms in the same order as for many queries, so results are bit-identical.

use std::f64::consts::LOG2_E;

use super::Sizes;
use super::fast::{Inputs, PANEL, TILE, finish, weights};
use crate::cpu::{Carve, Cpu, Shared, with_scratch};
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Kernel, LANES, Simd, Strided, gemm};

pub(super) fn run(cpu: &Cpu, z: Sizes, input: Inputs<'_>, out: &Shared<'_>, sums: Option<&Shared<'_>>) {
    // A task has whole groups of heads that read the same keys.
    let groups = (2 * cpu.threads()).div_ceil(z.batch.max(1)).min(z.kv_heads);
    let sharing = z.heads / z.kv_heads;
    let task = |t: usize| {
        let (b, group) = (t / groups, t % groups);
        let start = |group: usize| group * z.kv_heads / groups * sharing;
        let heads = start(group)..start(group + 1);
        with_scratch(Decode::scratch(z, heads.len()), |scratch| {
            cpu.level().run(Decode { z, input, b, heads, out, sums, scratch });
        });
    };
    if z.batch * z.heads * z.keys * (z.dk + z.dv) < 64 * 1024 {
        (0..z.batch * groups).for_each(task);
    } else {
        cpu.parallel(z.batch * groups, task);
    }
}

struct Decode<'a> {
    z: Sizes,
    input: Inputs<'a>,
    b: usize,
    heads: std::ops::Range<usize>,
    out: &'a Shared<'a>,
    sums: Option<&'a Shared<'a>>,
    scratch: &'a mut [f32],
}

impl Decode<'_> {
    fn scratch(z: Sizes, heads: usize) -> usize {
        let wide = z.dv.next_multiple_of(PANEL);
        [heads * z.dk, heads * wide, heads, heads, TILE * z.dk, TILE * wide, TILE]
            .map(Carve::size)
            .iter()
            .sum()
    }
}

impl Kernel for Decode<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(self, s: S) {
        let Self { z, input, b, heads, .. } = self;
        let (dk, wide) = (z.dk, z.dv.next_multiple_of(PANEL));
        let mut carve = Carve(self.scratch);
        // Per head: scaled query, weighted sum of values, maximum score, sum of weights. Per tile: Kᵀ, V (if it
        // must be packed) and scores.
        let q = carve.take(heads.len() * dk);
        let o = carve.take(heads.len() * wide);
        let largest = carve.take(heads.len());
        let total = carve.take(heads.len());
        let kt = carve.take(TILE * dk);
        let packed = carve.take(TILE * wide);
        let scores = carve.take(TILE);
        let factor = (z.scale() * LOG2_E) as f32;
        let query = &input.query.data()[(b * z.heads + heads.start) * dk..][..heads.len() * dk];
        simd::scale_to(s, q, factor, query);
        o.fill(0.0);
        largest.fill(f32::NEG_INFINITY);
        total.fill(0.0);
        let begin = z.first_key(z.keys - 1);
        let sharing = z.heads / z.kv_heads;
        for k0 in (begin / TILE * TILE..z.keys).step_by(TILE) {
            let count = TILE.min(z.keys - k0);
            for (r, h) in heads.clone().enumerate() {
                let g = z.kv_head(h);
                let (value, first_value) = input.value.head(z.kv_heads, b, g, k0);
                let o = &mut o[r * wide..(r + 1) * wide];
                let scores = &mut scores[..count.next_multiple_of(PANEL)];
                if h % sharing == 0 {
                    let (key, first_key) = input.key.head(z.kv_heads, b, g, k0);
                    key.pack_transposed(s, first_key, count, kt);
                }
                row_product(s, &q[r * dk..(r + 1) * dk], Block::panels(kt, dk), scores, Epilogue::Set);
                scores[..begin.saturating_sub(k0)].fill(f32::NEG_INFINITY);
                scores[count..].fill(f32::NEG_INFINITY);
                let decay = weights(s, scores, &mut largest[r], &mut total[r]);
                simd::scale(s, o, decay);
                let v = if wide == z.dv {
                    Block::rows(&value.data[first_value * value.stride..], value.stride)
                } else {
                    if h % sharing == 0 {
                        value.pack_panels(first_value, count, packed);
                    }
                    Block::panels(packed, TILE)
                };
                row_product(s, &scores[..count], v, o, Epilogue::Add);
            }
        }
        for (r, h) in heads.enumerate() {
            let at = b * z.heads + h;
            // SAFETY: head h of batch entry b belongs to this task only.
            let (y, sum) = unsafe { (self.out.part(at * z.dv, z.dv), self.sums.map(|l| l.part(at, 1))) };
            finish(s, &o[r * wide..], largest[r], total[r], y, sum);
        }
    }
}

/// y ← epilogue(y, a B) for one row. Sums have the order of [`gemm`], but up to eight vectors are computed in
/// parallel to hide the latency of the multiply-adds. The length of y is a multiple of 16.
#[inline(always)]
fn row_product<S: Simd>(s: S, a: &[f32], b: Block<'_>, y: &mut [f32], epilogue: Epilogue<'_>) {
    let mut p = 0;
    for wide in y.chunks_mut(4 * PANEL) {
        let b = Block { data: &b.data[p * b.panel..], ..b };
        let (size, a) = ([1, wide.len(), a.len()], Strided::rows(a, a.len()));
        if let Ok(y) = <&mut [f32; 4 * PANEL]>::try_from(&mut *wide) {
            four_panels(s, a.data, b, y, matches!(epilogue, Epilogue::Add));
        } else {
            gemm(s, size, Band::Full, a, b, BlockMut::rows(wide, PANEL), epilogue);
        }
        p += 4;
    }
}

/// y = a B, or y += a B with `add`, for 64 columns.
#[inline(always)]
fn four_panels<S: Simd>(s: S, a: &[f32], b: Block<'_>, y: &mut [f32; 4 * PANEL], add: bool) {
    let mut sums = [[s.splat(0.0); 2]; 4];
    for (l, &x) in a.iter().enumerate() {
        let x = s.splat(x);
        for (p, [low, high]) in sums.iter_mut().enumerate() {
            let b = &b.data[l * b.row + p * b.panel..][..PANEL];
            *low = s.fma(x, s.load(b), *low);
            *high = s.fma(x, s.load(&b[LANES..]), *high);
        }
    }
    for (y, sum) in y.chunks_exact_mut(LANES).zip(sums.as_flattened()) {
        s.store(y, if add { s.add(s.load(y), *sum) } else { *sum });
    }
}

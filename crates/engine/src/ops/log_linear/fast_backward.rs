//! Optimised backward pass of the log-linear gated delta rule, chunk by chunk from last to first.
//!
//! To limit memory, the forward pass saves states only at the start of each block; inside a block the states and −W
//! S are recomputed and kept until the block is done. `fast_levels` handles the part that involves states and
//! yields dW, dpQ, dKs, dU, τ and part of dλ. This file computes the rest, which stays within a chunk:
//!
//! ```text
//! dW −= Pᵀ dpQ;   dKbe = Nᵀ dW;   Hu = Nᵀ dU;   dVb = (M ∘ Λ)ᵀ dO + Hu
//! E = tril(dO (diag(β) V)ᵀ);   dλ_i[level(i, j)] += (E ∘ M)_ij;   F = (E ∘ Λ) Nᵀ
//! R = tril(F − dpQ Wᵀ) ∘ Γ;   X = −strict_tril(dKbe Wᵀ + Hu Uᵀ + Mᵀ F) ∘ Γ
//! ```
//! dN is never formed: the sum in parentheses in X is Nᵀ dN Nᵀ. The remaining equations are those of the plain
//! gated delta rule, with a_i = e_i <dpQ_i, Q_i> + β_i e_i <dKbe_i, K_i>, and τ in place of tot <S, dS'>.

use super::chunk::{Chunk, Prep, Segment, Source, chunks, inner_scale, segments};
use super::fast::Levels;
use super::fast_levels::{Work, levels_step, replay, slot, slots};
use super::{LogLinear, LogLinearBackward, NAME, Sizes};
use crate::cpu::{Carve, Cpu, Shared, with_scratch};
use crate::error::{Result, bad_value};
use crate::ops::gated_delta::chunk::{CHUNK, gate_gradients, through_norm};
use crate::ops::gated_delta::fast::Padded;
use crate::simd::{
    self, Band, Block, BlockMut, Epilogue, Kernel, LANES, PANEL, Simd, Strided, gemm, transpose,
};
use crate::tensor::Tensor;

pub(crate) fn backward(cpu: &Cpu, op: LogLinearBackward, sizes: Sizes) -> Result<LogLinear<Tensor>> {
    let (input, options, gradient) = (op.input.each(Tensor::f32), &op.options, op.gradient.f32());
    let n = sizes.heads;
    let pad = Padded::of(&n);
    let chunks = chunks(sizes.position, n.tokens);
    let (segments, kept) = segments(&chunks);
    let tasks = n.batch * n.value_heads;
    let Some(saved) = op.saved.as_ref().map(Tensor::f32).filter(|t| t.shape() == [tasks, kept, pad.state()])
    else {
        return bad_value(NAME, "the saved tensors do not match the forward pass of this call");
    };
    let plan = Plan { sizes, chunks: &chunks, segments: &segments };
    let mut d = input.each(|t| cpu.uninit(t.shape()));
    // Per-batch-row sums over tokens: L, then a_log and dt_bias. The rows are summed in order below.
    let width = sizes.scales + 2;
    let mut sums = cpu.uninit(&[tasks, width]);
    {
        let out = Outputs {
            query: Shared::new(d.query.data_mut()),
            key: Shared::new(d.key.data_mut()),
            value: Shared::new(d.value.data_mut()),
            retention_input: Shared::new(d.retention_input.data_mut()),
            write_input: Shared::new(d.write_input.data_mut()),
            level_input: Shared::new(d.level_input.data_mut()),
            sums: Shared::new(sums.data_mut()),
        };
        let group = n.value_heads / n.key_heads;
        // One task per key head: the value heads that share it accumulate into the same gradients, in a fixed
        // order.
        cpu.parallel(n.batch * n.key_heads, |task| {
            let (b, key_head) = (task / n.key_heads, task % n.key_heads);
            for h in key_head * group..(key_head + 1) * group {
                let source = Source::new(sizes, input, options, b, h);
                let task = b * n.value_heads + h;
                with_scratch(plan.scratch(pad), |scratch| {
                    cpu.level().run(Head {
                        source,
                        plan: &plan,
                        saved: &saved.data()[task * kept * pad.state()..][..kept * pad.state()],
                        gradient: gradient.data(),
                        first_of_group: h % group == 0,
                        out: &out,
                        scratch,
                    });
                });
            }
        });
    }
    d.level_scale.data_mut().fill(0.0);
    d.a_log.data_mut().fill(0.0);
    d.dt_bias.data_mut().fill(0.0);
    for (task, row) in sums.data().chunks_exact(width).enumerate() {
        let h = task % n.value_heads;
        let scale = &mut d.level_scale.data_mut()[h * sizes.scales..][..sizes.scales];
        scale.iter_mut().zip(row).for_each(|(s, v)| *s += v);
        d.a_log.data_mut()[h] += row[sizes.scales];
        d.dt_bias.data_mut()[h] += row[sizes.scales + 1];
    }
    Ok(d.map(|array| op.gradient.like(array)))
}

struct Plan<'a> {
    sizes: Sizes,
    chunks: &'a [Chunk],
    segments: &'a [Segment],
}

impl Plan<'_> {
    /// Maximum number of state slots and of chunks in any block.
    fn most(&self) -> (usize, usize) {
        let runs = self.segments.iter().map(|segment| &self.chunks[segment.chunks.clone()]);
        runs.fold((0, 0), |(a, b), run| (a.max(run.iter().map(slots).sum()), b.max(run.len())))
    }

    fn scratch(&self, pad: Padded) -> usize {
        let (most_slots, most_chunks) = self.most();
        most_slots * slot(pad)
            + most_chunks * Prep::size(pad, self.sizes.scales)
            + self.sizes.levels[1] * pad.state()
            + Work::size(pad, self.sizes.scales)
    }
}

struct Outputs<'a> {
    query: Shared<'a>,
    key: Shared<'a>,
    value: Shared<'a>,
    retention_input: Shared<'a>,
    write_input: Shared<'a>,
    level_input: Shared<'a>,
    sums: Shared<'a>,
}

struct Head<'a> {
    source: Source<'a>,
    plan: &'a Plan<'a>,
    saved: &'a [f32],
    gradient: &'a [f32],
    first_of_group: bool,
    out: &'a Outputs<'a>,
    scratch: &'a mut [f32],
}

impl Kernel for Head<'_> {
    type Output = ();
    #[inline(always)]
    #[allow(unsafe_code)]
    fn run<S: Simd>(mut self, s: S) {
        let (source, plan) = (self.source, self.plan);
        let (pad, scales) = (source.pad, source.sizes.scales);
        let (most_slots, most_chunks) = plan.most();
        let mut carve = Carve(std::mem::take(&mut self.scratch));
        let arena = carve.take(most_slots * slot(pad));
        let mut gradients =
            Levels { data: carve.take(source.sizes.levels[1] * pad.state()), size: pad.state() };
        let mut work = Work::new(pad, scales, &mut carve);
        let mut preps: Vec<Prep<'_>> = (0..most_chunks).map(|_| Prep::new(pad, scales, &mut carve)).collect();
        for segment in plan.segments.iter().rev() {
            let run = &plan.chunks[segment.chunks.clone()];
            let mut at = 0;
            for i in 0..slots(&run[0]) - 1 {
                let kept = &self.saved[(segment.kept + i) * pad.state()..][..pad.state()];
                arena[i * slot(pad)..][..pad.state()].copy_from_slice(kept);
            }
            for (chunk, prep) in run.iter().zip(&mut preps) {
                let (here, next) = arena[at..].split_at_mut(slots(chunk) * slot(pad));
                prep.fill(s, &source, chunk);
                let last_of_run =
                    chunk.start + chunk.len == run[run.len() - 1].start + run[run.len() - 1].len;
                replay(s, &source, chunk, prep, here, if last_of_run { None } else { Some(next) });
                at += here.len();
            }
            for (chunk, prep) in run.iter().zip(&preps).rev() {
                at -= slots(chunk) * slot(pad);
                let here = &arena[at..][..slots(chunk) * slot(pad)];
                let last = chunk.start + chunk.len == source.sizes.heads.tokens;
                levels_step(s, &source, chunk, prep, here, &mut gradients, last, &mut work, self.gradient);
                self.inner_step(s, chunk, prep, &mut work);
            }
        }
        let at = (source.b * source.sizes.heads.value_heads + source.h) * (scales + 2);
        // SAFETY: each pair of batch row and head has its own disjoint part.
        let sums = unsafe { self.out.sums.part(at, scales + 2) };
        sums.copy_from_slice(&work.sums[..scales + 2]);
    }
}

/// C ← epilogue(C, A B) with a triangular A; B and C have `rows` rows of `width` elements.
#[inline(always)]
fn triangle<S: Simd>(
    s: S,
    [rows, width]: [usize; 2],
    band: Band,
    a: Strided<'_>,
    b: &[f32],
    c: &mut [f32],
    epilogue: Epilogue<'_>,
) {
    gemm(s, [rows, width, rows], band, a, Block::rows(b, width), BlockMut::rows(c, width), epilogue);
}

/// C ← epilogue(C, A B) with B given as its transpose [depth, 16]; rows of A are `stride` apart.
#[inline(always)]
fn by_rows_t<S: Simd>(
    s: S,
    [rows, depth, stride]: [usize; 3],
    a: &[f32],
    b_t: &[f32],
    c: &mut [f32],
    epilogue: Epilogue<'_>,
) {
    let size = [rows, CHUNK, depth];
    gemm(
        s,
        size,
        Band::Full,
        Strided::rows(a, stride),
        Block::rows(b_t, PANEL),
        BlockMut::rows(c, CHUNK),
        epilogue,
    );
}

/// Each token's terms of the gate gradients.
struct Terms {
    /// d log α
    dlog: [f32; CHUNK + 1],
    /// dβ
    dwrite: [f32; CHUNK],
    /// a
    suffix: [f32; CHUNK],
    /// b = <dKs, K>
    prefix: [f32; CHUNK],
}

impl Terms {
    /// d log α_t += τ + Σ_{i≥t} a_i + Σ_{j<t} b_j, with `through` = τ.
    #[inline(always)]
    fn add_states_and_rows(&mut self, len: usize, through: f32) {
        let mut sum = through;
        let mut tail = 0.0;
        for t in (0..len).rev() {
            tail += self.suffix[t];
            self.dlog[t] += tail;
        }
        for t in 0..len {
            self.dlog[t] += sum;
            sum += self.prefix[t];
        }
    }
}

/// X and R from their products, βX + (βX)ᵀ, and their terms of dβ and d log α:
///
/// ```text
/// R = tril(F − dpQ Wᵀ) ∘ Γ;   X = −strict_tril(dKbe Wᵀ + Hu Uᵀ + Mᵀ F) ∘ Γ
/// Y = strict_tril(R ∘ Q Kᵀ) + βX ∘ K Kᵀ
/// dβ_i = Σ_j X_ij (K Kᵀ)_ij;   d log α_t = Σ_{i≥t>j} Y_ij
/// ```
#[inline(always)]
fn triangle_gradients(len: usize, prep: &Prep<'_>, work: &mut Work<'_>, terms: &mut Terms) {
    let (p, g) = (&prep.triangles, &prep.gates);
    let (x, r) = work.xr.split_at_mut(len * CHUNK);
    for i in 0..len {
        let mut before = 0.0;
        for j in 0..CHUNK {
            let at = i * CHUNK + j;
            // Products right of the diagonal may be inf or NaN: assign zero instead of multiplying by it.
            x[at] = if j < i { x[at] * p.decay[at] } else { 0.0 };
            r[at] = if j <= i { (r[at] + work.f[at]) * p.decay[at] } else { 0.0 };
            if j < i {
                let kk = x[at] * p.products[at];
                terms.dwrite[i] += kk;
                // Σ_{i≥t>j} Y_ij: row i contributes to t = j+1..=i.
                before += r[at] * p.products[(len + i) * CHUNK + j] + g.write[i] * kk;
                terms.dlog[j + 1] += before;
            }
        }
    }
    for i in 0..len {
        for j in 0..CHUNK {
            work.mixed[i * CHUNK + j] = match j {
                _ if j < i => g.write[i] * x[i * CHUNK + j],
                _ if j > i && j < len => g.write[j] * x[j * CHUNK + i],
                _ => 0.0,
            };
        }
    }
}

impl Head<'_> {
    /// Backward step within a chunk, including all gradients of its tokens.
    #[inline(always)]
    fn inner_step<S: Simd>(&mut self, s: S, chunk: &Chunk, prep: &Prep<'_>, work: &mut Work<'_>) {
        self.through_inverse(s, chunk, prep, work);
        self.intra_gradients(s, chunk, prep, work);
        self.triangle_products(s, chunk, prep, work);
        let mut terms = Terms {
            dlog: [0.0; CHUNK + 1],
            dwrite: [0.0; CHUNK],
            suffix: [0.0; CHUNK],
            prefix: [0.0; CHUNK],
        };
        triangle_gradients(chunk.len, prep, work, &mut terms);
        self.token_gradients(s, chunk, prep, work, &mut terms);
        self.pair_gradients(s, chunk, prep, work);
        terms.add_states_and_rows(chunk.len, prep.gates.whole * work.through);
        self.write_gates(s, chunk, prep, &terms.dlog, &terms.dwrite, work);
        self.write_rows(s, chunk, prep, work);
    }

    /// The gradients of W and U, and what they give through N:
    ///
    /// ```text
    /// dW −= Pᵀ dpQ;   dKbe = Nᵀ dW;   Hu = Nᵀ dU;   dVb = (M ∘ Λ)ᵀ dO + Hu
    /// ```
    #[inline(always)]
    fn through_inverse<S: Simd>(&self, s: S, chunk: &Chunk, prep: &Prep<'_>, work: &mut Work<'_>) {
        let (pad, len) = (self.source.pad, chunk.len);
        let p = &prep.triangles;
        let (by_key, by_value) = ([len, pad.key], [len, pad.value]);
        let (dw, dpq) = work.dwq.split_at_mut(len * pad.key);
        let scores_t = Strided::transposed(p.scores, CHUNK);
        let inverse_t = Strided::transposed(p.inverse, CHUNK);
        triangle(s, by_key, Band::Upper, scores_t, dpq, dw, Epilogue::Sub);
        let (dkbe, again) = work.back.split_at_mut(len * pad.key);
        triangle(s, by_key, Band::Upper, inverse_t, dw, dkbe, Epilogue::Set);
        again[..len * pad.key].copy_from_slice(&dpq[..len * pad.key]);
        let mixed_t = Strided::transposed(prep.mixed, CHUNK);
        triangle(s, by_value, Band::Upper, mixed_t, work.dout, work.dv, Epilogue::Set);
        if work.writes {
            triangle(s, by_value, Band::Upper, inverse_t, work.du, work.hu, Epilogue::Set);
            simd::add_scaled(s, &mut work.dv[..len * pad.value], 1.0, &work.hu[..len * pad.value]);
        }
    }

    /// E = tril(dO (diag(β) V)ᵀ);   dλ_i[level(i, j)] += (E ∘ M)_ij;   F = (E ∘ Λ) Nᵀ
    #[inline(always)]
    fn intra_gradients<S: Simd>(&self, s: S, chunk: &Chunk, prep: &Prep<'_>, work: &mut Work<'_>) {
        let source = &self.source;
        let (pad, len, value_dim) = (source.pad, chunk.len, source.sizes.heads.value_dim);
        transpose(s, CHUNK, pad.value, prep.written, pad.value, work.rows_t, PANEL);
        by_rows_t(s, [len, value_dim, pad.value], work.dout, work.rows_t, work.e, Epilogue::Set);
        for i in 0..len {
            for j in 0..=i {
                let at = i * CHUNK + j;
                let level = inner_scale(source, chunk, i, j) + i;
                work.dlambda[level] += work.e[at] * prep.m[at];
                work.dm[at] = work.e[at] * prep.lambda[level];
            }
        }
        transpose(s, CHUNK, CHUNK, prep.triangles.inverse, CHUNK, work.inverse_t, CHUNK);
        for i in 0..len {
            work.dm[i * CHUNK + i + 1..(i + 1) * CHUNK].fill(0.0);
        }
        let dm = Strided::rows(work.dm, CHUNK);
        triangle(s, [len, CHUNK], Band::Lower, dm, work.inverse_t, work.f, Epilogue::Set);
    }

    /// The products in X and R: −(dKbe Wᵀ + Hu Uᵀ + Mᵀ F), followed by −dpQ Wᵀ.
    #[inline(always)]
    fn triangle_products<S: Simd>(&self, s: S, chunk: &Chunk, prep: &Prep<'_>, work: &mut Work<'_>) {
        let (pad, len) = (self.source.pad, chunk.len);
        let (key_dim, value_dim) = (self.source.sizes.heads.key_dim, self.source.sizes.heads.value_dim);
        // `wq` holds −W.
        transpose(s, CHUNK, pad.key, prep.wq, pad.key, work.rows_t, PANEL);
        by_rows_t(s, [2 * len, key_dim, pad.key], work.back, work.rows_t, work.xr, Epilogue::Set);
        if work.writes {
            transpose(s, CHUNK, pad.value, prep.u, pad.value, work.rows_t, PANEL);
            by_rows_t(s, [len, value_dim, pad.value], work.hu, work.rows_t, work.xr, Epilogue::Sub);
        }
        let m_t = Strided::transposed(prep.m, CHUNK);
        triangle(s, [len, CHUNK], Band::Upper, m_t, work.f, work.xr, Epilogue::Sub);
    }

    /// The terms that involve no other token of the chunk:
    ///
    /// ```text
    /// dK = dKs + diag(βe) dKbe;   dQ = diag(e) dpQ;   dβ_i += e_i <dKbe_i, K_i> + <dVb_i, V_i>
    /// a_i = e_i <dpQ_i, Q_i> + β_i e_i <dKbe_i, K_i>;   b_j = <dKs_j, K_j>
    /// ```
    #[inline(always)]
    fn token_gradients<S: Simd>(
        &self,
        s: S,
        chunk: &Chunk,
        prep: &Prep<'_>,
        work: &mut Work<'_>,
        terms: &mut Terms,
    ) {
        let (pad, g, len) = (self.source.pad, &prep.gates, chunk.len);
        let (keys, queries) = prep.kq.split_at(len * pad.key);
        let dpq = &work.dwq[len * pad.key..];
        for t in 0..len {
            let row = t * pad.key..(t + 1) * pad.key;
            let (k, q) = (&keys[row.clone()], &queries[row.clone()]);
            let (beta, e) = (g.write[t], g.since_start[t]);
            let dk = &mut work.dk[row.clone()];
            simd::scale(s, dk, g.until_end[t]);
            terms.prefix[t] = simd::dot(s, dk, k);
            let back = simd::dot(s, &work.back[row.clone()], k);
            terms.suffix[t] = e * simd::dot(s, &dpq[row.clone()], q) + beta * e * back;
            simd::add_scaled(s, dk, beta * e, &work.back[row.clone()]);
            simd::scale_to(s, &mut work.dq[row.clone()], e, &dpq[row]);
            let row = t * pad.value..(t + 1) * pad.value;
            terms.dwrite[t] += e * back + simd::dot(s, &work.dv[row.clone()], &prep.value[row]);
        }
    }

    /// The terms of pairs of tokens: dQ += R K;   dK += Rᵀ Q + (βX + (βX)ᵀ) K
    #[inline(always)]
    fn pair_gradients<S: Simd>(&self, s: S, chunk: &Chunk, prep: &Prep<'_>, work: &mut Work<'_>) {
        let (pad, len) = (self.source.pad, chunk.len);
        let by_key = [len, pad.key];
        let (keys, queries) = prep.kq.split_at(len * pad.key);
        let r = &work.xr[len * CHUNK..];
        triangle(s, by_key, Band::Lower, Strided::rows(r, CHUNK), keys, work.dq, Epilogue::Add);
        triangle(s, by_key, Band::Upper, Strided::transposed(r, CHUNK), queries, work.dk, Epilogue::Add);
        triangle(s, by_key, Band::Full, Strided::rows(work.mixed, CHUNK), keys, work.dk, Epilogue::Add);
    }

    /// Writes the gradients of the gate and level inputs.
    #[inline(always)]
    #[allow(unsafe_code)]
    fn write_gates<S: Simd>(
        &self,
        s: S,
        chunk: &Chunk,
        prep: &Prep<'_>,
        dlog: &[f32; CHUNK + 1],
        dwrite: &[f32; CHUNK],
        work: &mut Work<'_>,
    ) {
        let Source { sizes, gates: input, b, h, .. } = self.source;
        let (heads, scales, len) = (sizes.heads.value_heads, sizes.scales, chunk.len);
        let d = gate_gradients(s, &prep.gates, input, chunk.start * heads, len, dlog, dwrite);
        for t in 0..len {
            let at = (b * sizes.heads.tokens + chunk.start + t) * heads + h;
            // SAFETY: this element belongs to this head and token only.
            unsafe {
                self.out.retention_input.set(at, d.retention_input[t]);
                self.out.write_input.set(at, d.write_input[t]);
            }
        }
        work.sums[scales] += d.a_log;
        work.sums[scales + 1] += d.dt_bias;
        // λ = softplus(L w):  dp = dλ σ(L w),  dL = Σ dp w,  dw = dp L
        for (l, &scale) in self.source.level_scale().iter().enumerate() {
            let (w, d) = (&prep.level[l * CHUNK..], &mut work.dlambda[l * CHUNK..][..CHUNK]);
            let mut sum = s.splat(0.0);
            for i in [0, LANES] {
                let w = s.load(&w[i..]);
                let dp = s.mul(s.load(&d[i..]), simd::sigmoid(s, s.mul(s.splat(scale), w)));
                sum = s.fma(dp, w, sum);
                s.store(&mut d[i..], s.mul(dp, s.splat(scale)));
            }
            work.sums[l] += s.sum(sum);
        }
        for t in 0..len {
            let [_, _, at] = self.source.at(chunk.start + t);
            // SAFETY: this head's levels of this token are written by this task only.
            let to = unsafe { self.out.level_input.part(at, scales) };
            for (l, to) in to.iter_mut().enumerate() {
                *to = work.dlambda[l * CHUNK + t];
            }
        }
    }

    /// Writes the gradients of values, and of queries and keys through the L2 norm: dx = r (dy − y <dy, y>).
    #[inline(always)]
    #[allow(unsafe_code)]
    fn write_rows<S: Simd>(&self, s: S, chunk: &Chunk, prep: &Prep<'_>, work: &Work<'_>) {
        let (pad, n) = (self.source.pad, &self.source.sizes.heads);
        let (dk, len) = (n.key_dim, chunk.len);
        for t in 0..len {
            let [key_at, value_at, _] = self.source.at(chunk.start + t);
            let pairs = [
                (
                    &self.out.key,
                    &prep.kq[t * pad.key..][..dk],
                    &work.dk[t * pad.key..][..dk],
                    prep.key_factors[t],
                ),
                (
                    &self.out.query,
                    &prep.kq[(len + t) * pad.key..][..dk],
                    &work.dq[t * pad.key..][..dk],
                    prep.query_factors[t],
                ),
            ];
            for (out, y, dy, r) in pairs {
                // SAFETY: this key head's columns of this token are written by this task only.
                let out = unsafe { out.part(key_at, dk) };
                through_norm(s, out, !self.first_of_group, r, y, dy);
            }
            // SAFETY: this head's columns of this token are written by this task only.
            let dv = unsafe { self.out.value.part(value_at, n.value_dim) };
            simd::scale_to(s, dv, prep.gates.write[t], &work.dv[t * pad.value..][..n.value_dim]);
        }
    }
}

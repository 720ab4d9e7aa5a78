//! Optimised backward pass of the gated delta rule, chunk by chunk from last to first.
//!
//! Saving every chunk's state would need too much memory, so the forward pass saves one state per block of 64
//! tokens; here the states inside a block are recomputed from it (transposed, which is the layout the products
//! below need). Because Vn is saved too, and with H = Nᵀ dVn, the gradient of the inverse N never has to be formed:
//!
//! ```text
//! dVn = Pᵀ dO + diag(d) K dS';   H = Nᵀ dVn;   X = −strict_tril(H Vnᵀ ∘ Γ);   R = s · tril(dO Vnᵀ ∘ Γ)
//! dKbe = −H Sᵀ;   dKs = diag(d) Vn dS'ᵀ;   dV = diag(β) H
//! dQ = s diag(e) dO Sᵀ + R K;   dK = dKs + Rᵀ Q + diag(βe) dKbe + (βX + (βX)ᵀ) K
//! dβ_i = e_i <dKbe_i, K_i> + <H_i, V_i> + Σ_j X_ij (K Kᵀ)_ij
//! a_i = s e_i <(dO Sᵀ)_i, Q_i> + β_i e_i <dKbe_i, K_i>;   b_j = <dKs_j, K_j>
//! Y = strict_tril(R ∘ Q Kᵀ) + βX ∘ K Kᵀ
//! d log α_t = tot <S, dS'> + Σ_{i≥t} a_i + Σ_{j<t} b_j + Σ_{i≥t>j} Y_ij
//! dS = tot dS' + [−diag(βe) K; s diag(e) Q]ᵀ [H; dO]
//! ```

use super::chunk::{
    CHUNK, Chunk, GateInput, Gates, MASK, Prepared, SQUARE, gate_gradients, gates, load_normalised,
    load_rows, through_norm,
};
use super::fast::{KEPT_EVERY, Padded, Plan, gate_input};
use super::{GatedDelta, GatedDeltaBackward, GatedDeltaGradient, Sizes};
use crate::array::Array;
use crate::cpu::{Carve, Cpu, Shared, with_scratch};
use crate::error::{Result, bad_value};
use crate::simd::{
    self, Band, Block, BlockMut, Epilogue, Kernel, LANES, PANEL, Simd, Strided, gemm, transpose,
};
use crate::tensor::Tensor;

pub(crate) fn backward(cpu: &Cpu, op: GatedDeltaBackward, sizes: Sizes) -> Result<GatedDelta<Tensor>> {
    let (input, options) = (op.input.as_ref().map(Tensor::f32), &op.options);
    let gradient = op.gradient.as_ref().map(Tensor::f32);
    let pad = Padded::of(&sizes);
    let kept = sizes.tokens.div_ceil(KEPT_EVERY);
    let (writes, states) = match &op.kept[..] {
        [w, s]
            if w.len() == input.value.len()
                && s.len() == sizes.batch * sizes.value_heads * kept * pad.state() =>
        {
            (w.f32(), s.f32())
        }
        _ => return bad_value("gated_delta", "the saved tensors do not match the forward pass of this call"),
    };
    let plan = Plan::new(&sizes, options);
    let mut d = input.map(|t| cpu.uninit(t.shape()));
    // Per-batch-row sums over tokens; the rows are summed in order below, so the result is deterministic.
    let mut sums = cpu.uninit(&[2, sizes.batch, sizes.value_heads]);
    {
        let out = Outputs {
            query: Shared::new(d.query.data_mut()),
            key: Shared::new(d.key.data_mut()),
            value: Shared::new(d.value.data_mut()),
            retention_input: Shared::new(d.retention_input.data_mut()),
            write_input: Shared::new(d.write_input.data_mut()),
            initial_state: d.initial_state.as_mut().map(|t| Shared::new(t.data_mut())),
            sums: Shared::new(sums.data_mut()),
        };
        let group = sizes.value_heads / sizes.key_heads;
        // One task per key head: the value heads that share it accumulate into the same gradients, in a fixed
        // order.
        cpu.parallel(sizes.batch * sizes.key_heads, |task| {
            let (b, key_head) = (task / sizes.key_heads, task % sizes.key_heads);
            let most = most_chunks(&plan.chunks[b]);
            for h in key_head * group..(key_head + 1) * group {
                let gates = gate_input(&sizes, &input, options.allow_neg_eigval, b, h);
                with_scratch(Head::scratch(pad, most), |scratch| {
                    let head = Head {
                        sizes,
                        pad,
                        input: &input,
                        gradient: &gradient,
                        writes: writes.data(),
                        states: &states.data()[(b * sizes.value_heads + h) * kept * pad.state()..],
                        gates,
                        chunks: &plan.chunks[b],
                        first_boundary: plan.first_boundary[b],
                        b,
                        h,
                        first_of_group: h % group == 0,
                        most,
                        out: &out,
                        scratch,
                    };
                    cpu.level().run(head);
                });
            }
        });
    }
    let (a_log, dt_bias) = sums.data().split_at(sizes.batch * sizes.value_heads);
    for (to, from) in [(&mut d.a_log, a_log), (&mut d.dt_bias, dt_bias)] {
        let to = to.data_mut();
        to.fill(0.0);
        for row in from.chunks_exact(sizes.value_heads) {
            to.iter_mut().zip(row).for_each(|(s, v)| *s += v);
        }
    }
    Ok(d.map(|array| op.input.key.like(array)))
}

/// Maximum number of chunks in any block of 64 tokens.
fn most_chunks(chunks: &[Chunk]) -> usize {
    chunks
        .chunk_by(|a, b| a.start / KEPT_EVERY == b.start / KEPT_EVERY)
        .map(<[Chunk]>::len)
        .max()
        .unwrap_or(0)
}

struct Outputs<'a> {
    query: Shared<'a>,
    key: Shared<'a>,
    value: Shared<'a>,
    retention_input: Shared<'a>,
    write_input: Shared<'a>,
    initial_state: Option<Shared<'a>>,
    sums: Shared<'a>,
}

struct Head<'a> {
    sizes: Sizes,
    pad: Padded,
    input: &'a GatedDelta<&'a Array<f32>>,
    gradient: &'a GatedDeltaGradient<&'a Array<f32>>,
    writes: &'a [f32],
    states: &'a [f32],
    gates: GateInput<'a>,
    chunks: &'a [Chunk],
    first_boundary: usize,
    b: usize,
    h: usize,
    first_of_group: bool,
    most: usize,
    out: &'a Outputs<'a>,
    scratch: &'a mut [f32],
}

/// Values of a chunk that are computed when its block is recomputed and used again in its backward step.
#[derive(Clone, Copy)]
struct Step {
    chunk: Chunk,
    gates: Gates,
    key_factors: [f32; CHUNK],
    query_factors: [f32; CHUNK],
}

impl Head<'_> {
    fn scratch(pad: Padded, most: usize) -> usize {
        let per_chunk = pad.state() + 2 * CHUNK * pad.key + CHUNK * pad.value;
        let rows = CHUNK * (pad.key * 6 + pad.value * 4);
        most * per_chunk + 3 * pad.state() + rows + CHUNK * (pad.key + pad.value) + 9 * SQUARE
    }
}

impl Kernel for Head<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Self { sizes, pad, b, h, .. } = self;
        let Sizes { value_heads, key_dim, value_dim, .. } = sizes;
        let mut carve = Carve(std::mem::take(&mut self.scratch));
        let mut work = Work {
            dstate: carve.take(pad.state()),
            dstate_t: carve.take(pad.state()),
            scaled: carve.take(2 * CHUNK * pad.key),
            h_do: carve.take(2 * CHUNK * pad.value),
            dvn: carve.take(CHUNK * pad.value),
            value: carve.take(CHUNK * pad.value),
            hs: carve.take(2 * CHUNK * pad.key),
            dq: carve.take(CHUNK * pad.key),
            dk: carve.take(CHUNK * pad.key),
            vn_t: carve.take(CHUNK * pad.value),
            hv: carve.take(2 * SQUARE),
            mixed: carve.take(SQUARE),
            flipped: carve.take(SQUARE),
            prepared: Prepared {
                key_t: carve.take(CHUNK * pad.key),
                products: carve.take(2 * SQUARE),
                decay: carve.take(SQUARE),
                inverse: carve.take(SQUARE),
                scores: carve.take(SQUARE),
            },
            a_log: 0.0,
            dt_bias: 0.0,
        };
        let states_t = carve.take((self.most + 1) * pad.state());
        let keys = carve.take(self.most * 2 * CHUNK * pad.key);
        let writes = carve.take(self.most * CHUNK * pad.value);
        match self.gradient.final_state {
            Some(g) => {
                let at = (b * value_heads + h) * sizes.state();
                simd::pack(key_dim, value_dim, &g.data()[at..at + sizes.state()], work.dstate);
            }
            None => work.dstate.fill(0.0),
        }
        let mut end = self.chunks.len();
        while end > 0 {
            let block = self.chunks[end - 1].start / KEPT_EVERY;
            let mut begin = end - 1;
            while begin > 0 && self.chunks[begin - 1].start / KEPT_EVERY == block {
                begin -= 1;
            }
            let kept = &self.states[block * pad.state()..][..pad.state()];
            simd::transpose_panels(s, pad.key, pad.value, kept, states_t);
            let mut steps = [None; KEPT_EVERY];
            for (i, &chunk) in self.chunks[begin..end].iter().enumerate() {
                let kq = &mut keys[i * 2 * CHUNK * pad.key..][..2 * CHUNK * pad.key];
                let vn = &mut writes[i * CHUNK * pad.value..][..CHUNK * pad.value];
                let (before, after) =
                    states_t[i * pad.state()..][..2 * pad.state()].split_at_mut(pad.state());
                let last = begin + i + 1 == end;
                steps[i] = Some(self.replay(s, chunk, kq, vn, before, after, work.scaled, last));
            }
            for i in (0..end - begin).rev() {
                let Some(step) = &steps[i] else { continue };
                let kq = &keys[i * 2 * CHUNK * pad.key..][..2 * CHUNK * pad.key];
                let vn = &writes[i * CHUNK * pad.value..][..CHUNK * pad.value];
                let state_t = &states_t[i * pad.state()..][..pad.state()];
                self.step(s, step, kq, vn, state_t, &mut work);
            }
            end = begin;
        }
        self.finish(&work);
    }
}

/// Scratch buffers for one head's backward pass.
struct Work<'a> {
    /// dS', panels of [d_k, d_v]
    dstate: &'a mut [f32],
    /// dS'ᵀ, panels of [d_v, d_k]
    dstate_t: &'a mut [f32],
    /// [−diag(βe) K; s diag(e) Q]
    scaled: &'a mut [f32],
    /// [H; dO]
    h_do: &'a mut [f32],
    dvn: &'a mut [f32],
    value: &'a mut [f32],
    /// [H; dO] Sᵀ
    hs: &'a mut [f32],
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    vn_t: &'a mut [f32],
    /// [H; dO] Vnᵀ, later overwritten by X and R
    hv: &'a mut [f32],
    /// βX + (βX)ᵀ
    mixed: &'a mut [f32],
    flipped: &'a mut [f32],
    prepared: Prepared<'a>,
    a_log: f32,
    dt_bias: f32,
}

/// What the backward step of a chunk reads.
#[derive(Clone, Copy)]
struct ChunkInputs<'a> {
    gates: &'a Gates,
    len: usize,
    /// First token, counted over all batch rows.
    row: usize,
    /// s
    scale: f32,
    /// K
    keys: &'a [f32],
    /// Q
    queries: &'a [f32],
    vn: &'a [f32],
    /// Sᵀ, panels of [d_v, d_k]
    state_t: &'a [f32],
}

impl ChunkInputs<'_> {
    /// Prefetch position: the previous chunk.
    #[inline(always)]
    fn before(self) -> usize {
        self.row.saturating_sub(CHUNK)
    }

    /// Prefetch position: the chunk at this position in the previous block.
    #[inline(always)]
    fn block_before(self) -> usize {
        self.row.saturating_sub(KEPT_EVERY)
    }
}

/// Each token's terms of the gate gradients.
struct Terms {
    /// d log α
    dlog: [f32; CHUNK],
    /// dβ
    dwrite: [f32; CHUNK],
    /// a
    suffix: [f32; CHUNK],
    /// b
    prefix: [f32; CHUNK],
}

impl Terms {
    /// d log α_t += tot <S, dS'> + Σ_{i≥t} a_i + Σ_{j<t} b_j, with `through` = tot <S, dS'>.
    #[inline(always)]
    fn add_states_and_rows(&mut self, len: usize, through: f32) {
        let mut sum = through;
        let mut tail = [0.0f32; CHUNK + 1];
        for t in (0..len).rev() {
            tail[t] = tail[t + 1] + self.suffix[t];
        }
        for t in 0..len {
            self.dlog[t] += sum + tail[t];
            sum += self.prefix[t];
        }
    }
}

impl Head<'_> {
    /// Loads a chunk's keys, queries and Vn, and recomputes the transposed state after the chunk from the one
    /// before.
    #[inline(always)]
    fn replay<S: Simd>(
        &self,
        s: S,
        chunk: Chunk,
        kq: &mut [f32],
        vn: &mut [f32],
        before: &[f32],
        after: &mut [f32],
        scaled: &mut [f32],
        last: bool,
    ) -> Step {
        let Self { sizes, pad, input, .. } = self;
        let (len, dk) = (chunk.len, sizes.key_dim);
        let row = self.b * sizes.tokens + chunk.start;
        let stride = sizes.key_heads * dk;
        let at = row * stride + sizes.key_head(self.h) * dk;
        let gates = gates(s, self.gates, chunk.start * sizes.value_heads, len);
        let key_factors = load_normalised(s, len, dk, &input.key.data()[at..], stride, kq);
        let queries = &mut kq[len * pad.key..];
        let query_factors = load_normalised(s, len, dk, &input.query.data()[at..], stride, queries);
        let value_stride = sizes.value_heads * sizes.value_dim;
        let value_at = row * value_stride + self.h * sizes.value_dim;
        load_rows(s, len, sizes.value_dim, &self.writes[value_at..], value_stride, vn);
        if !last {
            for t in 0..len {
                let row = t * pad.key..(t + 1) * pad.key;
                simd::scale_to(s, &mut scaled[row.clone()], gates.until_end[t], &kq[row]);
            }
            after.copy_from_slice(before);
            gemm(
                s,
                [sizes.value_dim, pad.key, len],
                Band::Full,
                Strided::transposed(vn, pad.value),
                Block::rows(scaled, pad.key),
                BlockMut::panels(after, pad.value),
                Epilogue::Decay(gates.whole),
            );
        }
        Step { chunk, gates, key_factors, query_factors }
    }

    /// Backward step of one chunk: propagates dS' to dS and computes all gradients of the chunk's tokens.
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, step: &Step, kq: &[f32], vn: &[f32], state_t: &[f32], work: &mut Work<'_>) {
        let Step { chunk, gates, .. } = step;
        let len = chunk.len;
        let (keys, queries) = kq.split_at(len * self.pad.key);
        let row = self.b * self.sizes.tokens + chunk.start;
        let scale = 1.0 / (self.sizes.key_dim as f32).sqrt();
        let inputs = ChunkInputs { gates, len, row, scale, keys, queries, vn, state_t };
        self.add_boundary(s, chunk, work);
        self.ask_values(s, self.input.value.data().as_ptr(), inputs.before(), CHUNK);
        work.prepared.fill(s, gates, [len, len], self.sizes.key_dim, kq, scale);
        let through = self.load(s, inputs, work);
        self.write_gradients(s, inputs, work);
        self.h_products(s, inputs, work);
        let mut terms =
            Terms { dlog: [0.0; CHUNK], dwrite: [0.0; CHUNK], suffix: [0.0; CHUNK], prefix: [0.0; CHUNK] };
        triangle_gradients(
            s,
            gates,
            len,
            scale,
            &work.prepared,
            work.hv,
            work.mixed,
            work.flipped,
            &mut terms.dlog,
            &mut terms.dwrite,
        );
        self.ask_values(s, self.out.value.pointer(0), row, len);
        self.token_gradients(s, inputs, work, &mut terms);
        self.pair_gradients(s, inputs, work);
        self.state_gradient(s, inputs, work);
        terms.add_states_and_rows(len, gates.whole * through);
        self.write_gates(s, gates, chunk, &terms.dlog, &terms.dwrite, work);
        self.write_rows(s, step, kq, work);
        self.write_values(s, inputs, work);
    }

    /// dS' += dA_m, if the chunk ends on boundary m.
    #[inline(always)]
    fn add_boundary<S: Simd>(&self, s: S, chunk: &Chunk, work: &mut Work<'_>) {
        let Sizes { key_dim, value_dim, value_heads, .. } = self.sizes;
        if let (Some(m), Some(g)) = (chunk.boundary, self.gradient.boundary_states) {
            let at = ((self.first_boundary + m) * value_heads + self.h) * self.sizes.state();
            simd::add_rows(s, key_dim, value_dim, &g.data()[at..at + self.sizes.state()], work.dstate);
        }
    }

    /// Loads V and dO (zero without a gradient of the readout) and transposes dS'; returns <S, dS'>.
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, inputs: ChunkInputs<'_>, work: &mut Work<'_>) -> f32 {
        let Self { sizes, pad, .. } = *self;
        let Sizes { value_dim, value_heads, .. } = sizes;
        let len = inputs.len;
        let stride = value_heads * value_dim;
        let at = inputs.row * stride + self.h * value_dim;
        load_rows(s, len, value_dim, &self.input.value.data()[at..], stride, work.value);
        simd::transpose_panels(s, pad.key, pad.value, work.dstate, work.dstate_t);
        let through = simd::dot(s, inputs.state_t, work.dstate_t);
        let dout = &mut work.h_do[len * pad.value..];
        match self.gradient.readout {
            Some(g) => load_rows(s, len, value_dim, &g.data()[at..], stride, dout),
            None => dout[..len * pad.value].fill(0.0),
        }
        through
    }

    /// dVn = diag(d) K dS' + Pᵀ dO;   H = Nᵀ dVn
    #[inline(always)]
    fn write_gradients<S: Simd>(&self, s: S, inputs: ChunkInputs<'_>, work: &mut Work<'_>) {
        let (pad, len) = (self.pad, inputs.len);
        let (h_rows, dout) = work.h_do.split_at_mut(len * pad.value);
        gemm(
            s,
            [len, pad.value, self.sizes.key_dim],
            Band::Full,
            Strided::rows(inputs.keys, pad.key),
            Block::panels(work.dstate, pad.key),
            BlockMut::rows(work.dvn, pad.value),
            Epilogue::Set,
        );
        for t in 0..len {
            let row = t * pad.value..(t + 1) * pad.value;
            simd::scale(s, &mut work.dvn[row], inputs.gates.until_end[t]);
        }
        let triangle = [len, pad.value, len];
        gemm(
            s,
            triangle,
            Band::Upper,
            Strided::transposed(work.prepared.scores, CHUNK),
            Block::rows(dout, pad.value),
            BlockMut::rows(work.dvn, pad.value),
            Epilogue::Add,
        );
        if let Some(g) = self.gradient.readout {
            self.ask_values(s, g.data().as_ptr(), inputs.before(), CHUNK);
        }
        gemm(
            s,
            triangle,
            Band::Upper,
            Strided::transposed(work.prepared.inverse, CHUNK),
            Block::rows(work.dvn, pad.value),
            BlockMut::rows(h_rows, pad.value),
            Epilogue::Set,
        );
    }

    /// [H; dO] Sᵀ = [−dKbe; dO Sᵀ] and [H; dO] Vnᵀ, from which [`triangle_gradients`] forms X and R.
    #[inline(always)]
    fn h_products<S: Simd>(&self, s: S, inputs: ChunkInputs<'_>, work: &mut Work<'_>) {
        let (pad, len, value_dim) = (self.pad, inputs.len, self.sizes.value_dim);
        self.ask_keys(s, self.out.key.pointer(0), inputs.row, len);
        gemm(
            s,
            [2 * len, pad.key, value_dim],
            Band::Full,
            Strided::rows(work.h_do, pad.value),
            Block::panels(inputs.state_t, pad.value),
            BlockMut::rows(work.hs, pad.key),
            Epilogue::Set,
        );
        self.ask_keys(s, self.out.query.pointer(0), inputs.row, len);
        transpose(s, CHUNK, pad.value, inputs.vn, pad.value, work.vn_t, PANEL);
        gemm(
            s,
            [2 * len, CHUNK, value_dim],
            Band::Full,
            Strided::rows(work.h_do, pad.value),
            Block::rows(work.vn_t, PANEL),
            BlockMut::rows(work.hv, CHUNK),
            Epilogue::Set,
        );
    }

    /// The terms that involve no other token of the chunk, and the rows −diag(βe) K and s diag(e) Q of dS:
    ///
    /// ```text
    /// dKs = diag(d) Vn dS'ᵀ;   dK = dKs + diag(βe) dKbe;   dQ = s diag(e) dO Sᵀ
    /// dβ_i += e_i <dKbe_i, K_i> + <H_i, V_i>
    /// a_i = s e_i <(dO Sᵀ)_i, Q_i> + β_i e_i <dKbe_i, K_i>;   b_j = <dKs_j, K_j>
    /// ```
    #[inline(always)]
    fn token_gradients<S: Simd>(
        &self,
        s: S,
        inputs: ChunkInputs<'_>,
        work: &mut Work<'_>,
        terms: &mut Terms,
    ) {
        let (pad, gates, len, scale) = (self.pad, inputs.gates, inputs.len, inputs.scale);
        gemm(
            s,
            [len, pad.key, self.sizes.value_dim],
            Band::Full,
            Strided::rows(inputs.vn, pad.value),
            Block::panels(work.dstate_t, pad.value),
            BlockMut::rows(work.dk, pad.key),
            Epilogue::Set,
        );
        let (back_rows, forth_rows) = work.scaled.split_at_mut(len * pad.key);
        for t in 0..len {
            let span = t * pad.key..(t + 1) * pad.key;
            let (beta, e, d) = (gates.write[t], gates.since_start[t], gates.until_end[t]);
            let row = Row {
                key: &inputs.keys[span.clone()],
                query: &inputs.queries[span.clone()],
                h_state: &work.hs[span.clone()],
                do_state: &work.hs[(len + t) * pad.key..(len + t + 1) * pad.key],
                dkey: &mut work.dk[span.clone()],
                dquery: &mut work.dq[span.clone()],
                back: &mut back_rows[span.clone()],
                forth: &mut forth_rows[span],
            };
            let [along_key, held, along_query] = row.run(s, d, -beta * e, scale * e);
            terms.prefix[t] = d * along_key;
            terms.suffix[t] = scale * e * along_query - beta * e * held;
            let rows = t * pad.value..(t + 1) * pad.value;
            terms.dwrite[t] += simd::dot(s, &work.h_do[rows.clone()], &work.value[rows]) - e * held;
        }
    }

    /// The terms of pairs of tokens: dQ += R K;   dK += Rᵀ Q + (βX + (βX)ᵀ) K
    #[inline(always)]
    fn pair_gradients<S: Simd>(&self, s: S, inputs: ChunkInputs<'_>, work: &mut Work<'_>) {
        let (pad, len) = (self.pad, inputs.len);
        let r = &work.hv[len * CHUNK..];
        let square = [len, pad.key, len];
        self.ask_keys(s, self.input.key.data().as_ptr(), inputs.block_before(), len);
        gemm(
            s,
            square,
            Band::Lower,
            Strided::rows(r, CHUNK),
            Block::rows(inputs.keys, pad.key),
            BlockMut::rows(work.dq, pad.key),
            Epilogue::Add,
        );
        gemm(
            s,
            square,
            Band::Upper,
            Strided::transposed(r, CHUNK),
            Block::rows(inputs.queries, pad.key),
            BlockMut::rows(work.dk, pad.key),
            Epilogue::Add,
        );
        self.ask_keys(s, self.input.query.data().as_ptr(), inputs.block_before(), len);
        gemm(
            s,
            square,
            Band::Full,
            Strided::rows(work.mixed, CHUNK),
            Block::rows(inputs.keys, pad.key),
            BlockMut::rows(work.dk, pad.key),
            Epilogue::Add,
        );
    }

    /// dS = tot dS' + [−diag(βe) K; s diag(e) Q]ᵀ [H; dO], which replaces dS'.
    #[inline(always)]
    fn state_gradient<S: Simd>(&self, s: S, inputs: ChunkInputs<'_>, work: &mut Work<'_>) {
        let (pad, len) = (self.pad, inputs.len);
        self.ask_values(s, self.writes.as_ptr(), inputs.block_before(), len);
        gemm(
            s,
            [self.sizes.key_dim, pad.value, 2 * len],
            Band::Full,
            Strided::transposed(work.scaled, pad.key),
            Block::rows(work.h_do, pad.value),
            BlockMut::panels(work.dstate, pad.key),
            Epilogue::Decay(inputs.gates.whole),
        );
    }

    /// dV = diag(β) H
    #[inline(always)]
    #[allow(unsafe_code)]
    fn write_values<S: Simd>(&self, s: S, inputs: ChunkInputs<'_>, work: &Work<'_>) {
        let Sizes { value_heads, value_dim, .. } = self.sizes;
        let stride = value_heads * value_dim;
        let at = inputs.row * stride + self.h * value_dim;
        for t in 0..inputs.len {
            // SAFETY: this head's columns of this token are written by this task only.
            let dv = unsafe { self.out.value.part(at + t * stride, value_dim) };
            simd::scale_to(s, dv, inputs.gates.write[t], &work.h_do[t * self.pad.value..][..value_dim]);
        }
    }

    /// Prefetches this head's value columns of `count` rows from `row` on. Prefetches are spread between the
    /// products of a step, because the number of outstanding cache misses is limited.
    #[inline(always)]
    fn ask_values<S: Simd>(&self, s: S, p: *const f32, row: usize, count: usize) {
        let Sizes { value_heads, value_dim, .. } = self.sizes;
        let stride = value_heads * value_dim;
        simd::prefetch_at(s, p, row * stride + self.h * value_dim, stride, count, value_dim);
    }

    #[inline(always)]
    fn ask_keys<S: Simd>(&self, s: S, p: *const f32, row: usize, count: usize) {
        let Sizes { key_heads, key_dim, .. } = self.sizes;
        let stride = key_heads * key_dim;
        simd::prefetch_at(s, p, row * stride + self.sizes.key_head(self.h) * key_dim, stride, count, key_dim);
    }

    /// Writes the gradients of the gate inputs.
    #[inline(always)]
    #[allow(unsafe_code)]
    fn write_gates<S: Simd>(
        &self,
        s: S,
        gates: &Gates,
        chunk: &Chunk,
        dlog: &[f32; CHUNK],
        dwrite: &[f32; CHUNK],
        work: &mut Work<'_>,
    ) {
        let heads = self.sizes.value_heads;
        let at = chunk.start * heads;
        let d = gate_gradients(s, gates, self.gates, at, chunk.len, dlog, dwrite);
        for t in 0..chunk.len {
            let at = (self.b * self.sizes.tokens + chunk.start + t) * heads + self.h;
            // SAFETY: this element belongs to this head and token only.
            unsafe {
                self.out.retention_input.set(at, d.retention_input[t]);
                self.out.write_input.set(at, d.write_input[t]);
            }
        }
        work.dt_bias += d.dt_bias;
        work.a_log += d.a_log;
    }

    /// Writes the gradients of queries and keys, backpropagated through the L2 norm: dx = r (dy − y <dy, y>).
    #[inline(always)]
    #[allow(unsafe_code)]
    fn write_rows<S: Simd>(&self, s: S, step: &Step, kq: &[f32], work: &Work<'_>) {
        let Self { sizes, pad, .. } = self;
        let (dk, len) = (sizes.key_dim, step.chunk.len);
        let stride = sizes.key_heads * dk;
        let at = (self.b * sizes.tokens + step.chunk.start) * stride + sizes.key_head(self.h) * dk;
        for t in 0..len {
            let pairs = [
                (&self.out.key, &kq[t * pad.key..][..dk], &work.dk[t * pad.key..][..dk], step.key_factors[t]),
                (
                    &self.out.query,
                    &kq[(len + t) * pad.key..][..dk],
                    &work.dq[t * pad.key..][..dk],
                    step.query_factors[t],
                ),
            ];
            for (out, y, dy, r) in pairs {
                // SAFETY: this key head's columns of this token are written by this task only.
                let out = unsafe { out.part(at + t * stride, dk) };
                through_norm(s, out, !self.first_of_group, r, y, dy);
            }
        }
    }

    #[allow(unsafe_code)]
    fn finish(&self, work: &Work<'_>) {
        let sizes = &self.sizes;
        let at = self.b * sizes.value_heads + self.h;
        // SAFETY: each pair of batch row and head has its own elements.
        unsafe {
            self.out.sums.set(at, work.a_log);
            self.out.sums.set(sizes.batch * sizes.value_heads + at, work.dt_bias);
            if let Some(initial) = &self.out.initial_state {
                let out = initial.part(at * sizes.state(), sizes.state());
                simd::unpack(sizes.key_dim, sizes.value_dim, work.dstate, out);
            }
        }
    }
}

/// The first `n` vectors of a row.
#[inline(always)]
fn lanes(row: &[f32], n: usize) -> &[[f32; LANES]] {
    &row.as_chunks().0[..n]
}

/// The first `n` vectors of a row, mutable.
#[inline(always)]
fn lanes_mut(row: &mut [f32], n: usize) -> &mut [[f32; LANES]] {
    &mut row.as_chunks_mut().0[..n]
}

/// One token's rows of padded width d_k, which [`Row::run`] reads and writes in a single pass.
struct Row<'a> {
    key: &'a [f32],
    query: &'a [f32],
    /// (H Sᵀ)_t
    h_state: &'a [f32],
    /// (dO Sᵀ)_t
    do_state: &'a [f32],
    /// In: (Vn dS'ᵀ)_t. Out: d · (Vn dS'ᵀ)_t − βe (H Sᵀ)_t.
    dkey: &'a mut [f32],
    dquery: &'a mut [f32],
    /// Out: −βe k, the row that multiplies H in dS.
    back: &'a mut [f32],
    /// Out: s e q, the row that multiplies dO in dS.
    forth: &'a mut [f32],
}

impl Row<'_> {
    /// dk ← d dk + back·hs, dq ← forth·ds; returns <old dk, k>, <hs, k>, <ds, q>.
    #[inline(always)]
    fn run<S: Simd>(self, s: S, until_end: f32, back: f32, forth: f32) -> [f32; 3] {
        let (d, b, f) = (s.splat(until_end), s.splat(back), s.splat(forth));
        let mut sums = [s.splat(0.0); 3];
        let n = self.key.len() / LANES;
        let (keys, queries) = (lanes(self.key, n), lanes(self.query, n));
        let (h_states, do_states) = (lanes(self.h_state, n), lanes(self.do_state, n));
        let dkeys = lanes_mut(self.dkey, n);
        let dqueries = lanes_mut(self.dquery, n);
        let backs = lanes_mut(self.back, n);
        let forths = lanes_mut(self.forth, n);
        // Indexed, because the compiler does not inline eight iterators zipped.
        for i in 0..n {
            let (k, q, old) = (s.load(&keys[i]), s.load(&queries[i]), s.load(&dkeys[i]));
            let (hs, ds) = (s.load(&h_states[i]), s.load(&do_states[i]));
            sums[0] = s.fma(old, k, sums[0]);
            sums[1] = s.fma(hs, k, sums[1]);
            sums[2] = s.fma(ds, q, sums[2]);
            s.store(&mut dkeys[i], s.fma(b, hs, s.mul(d, old)));
            s.store(&mut dqueries[i], s.mul(f, ds));
            s.store(&mut backs[i], s.mul(b, k));
            s.store(&mut forths[i], s.mul(f, q));
        }
        [s.sum(sums[0]), s.sum(sums[1]), s.sum(sums[2])]
    }
}

/// Processes [H; dO] Vnᵀ in `hv`: replaces it by X and R, and writes βX + (βX)ᵀ to `mixed`, Σ_j X_ij (K Kᵀ)_ij to
/// `dwrite` and Σ_{i≥t>j} Y_ij to `dlog`.
#[inline(always)]
fn triangle_gradients<S: Simd>(
    s: S,
    gates: &Gates,
    len: usize,
    scale: f32,
    p: &Prepared<'_>,
    hv: &mut [f32],
    mixed: &mut [f32],
    flipped: &mut [f32],
    dlog: &mut [f32; CHUNK],
    dwrite: &mut [f32; CHUNK],
) {
    let zero = s.splat(0.0);
    let (x, r) = hv.split_at_mut(len * CHUNK);
    mixed[len * CHUNK..].fill(0.0);
    // Running sum of the rows of Y, from the last row upwards.
    let mut below = [zero; 2];
    for i in (0..len).rev() {
        let mut kk_sum = zero;
        let mut y_sum = zero;
        for (h, o) in [0, LANES].into_iter().enumerate() {
            let at = i * CHUNK + o;
            // Products right of the diagonal may be inf or NaN: select zero instead of multiplying by zero.
            let (strict, with_diagonal) =
                (s.load(&MASK[CHUNK - i + o..]), s.load(&MASK[CHUNK - 1 - i + o..]));
            let fade = s.load(&p.decay[at..]);
            let xv = s.select_lt(zero, strict, s.mul(s.load(&x[at..]), s.sub(zero, fade)), zero);
            let rv = s.mul(s.mul(s.splat(scale), s.load(&r[at..])), fade);
            let rv = s.select_lt(zero, with_diagonal, rv, zero);
            s.store(&mut x[at..], xv);
            s.store(&mut r[at..], rv);
            let weighted = s.mul(s.splat(gates.write[i]), xv);
            s.store(&mut mixed[at..], weighted);
            let (kk, qk) = (s.load(&p.products[at..]), s.load(&p.products[len * CHUNK + at..]));
            let along = s.select_lt(zero, strict, s.mul(xv, kk), zero);
            kk_sum = s.add(kk_sum, along);
            let y = s.fma(s.splat(gates.write[i]), along, s.select_lt(zero, strict, s.mul(rv, qk), zero));
            below[h] = s.add(below[h], y);
            y_sum = s.fma(strict, below[h], y_sum);
        }
        dwrite[i] = s.sum(kk_sum);
        dlog[i] = s.sum(y_sum);
    }
    transpose(s, CHUNK, CHUNK, mixed, CHUNK, flipped, CHUNK);
    simd::add_scaled(s, mixed, 1.0, flipped);
}

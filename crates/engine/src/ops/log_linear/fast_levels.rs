//! State-dependent part of the log-linear backward pass.
//!
//! The states of a block are recomputed first; then their gradients are propagated from the last chunk to the
//! first. D is the gradient of a state after the chunk:
//!
//! ```text
//! level m above the target:  Vn = −W S^m,   Y = diag(d) K D,   dS^m = tot D − Wᵀ Y + pQᵀ diag(λ_m) dO
//! target:                    Vn = U − W T,  Y = dU = diag(d) K D,   dT = tot D − Wᵀ Y
//! level m below it:          dS^m = dT + pQᵀ diag(λ_m) dO
//! all:  dKs += diag(d) Vn Dᵀ,   dW −= Y Sᵀ,   τ += tot <S, D>
//!       Z = dO (S^m)ᵀ,   dλ_m = <Z, pQ> by rows,   dpQ += diag(λ_m) Z
//! ```

use super::chunk::{Chunk, Prep, Source, add_to_levels, filled};
use super::fast::{Levels, into_state, times_state};
use crate::cpu::Carve;
use crate::ops::gated_delta::chunk::{CHUNK, SQUARE, load_rows};
use crate::ops::gated_delta::fast::Padded;
use crate::simd::{self, Band, Block, BlockMut, Epilogue, Simd, Strided, gemm};

/// Elements per state slot of the recomputation: the state and −W S.
pub(crate) fn slot(pad: Padded) -> usize {
    pad.state() + CHUNK * pad.value
}

/// Number of state slots a chunk needs: its non-empty levels and T.
pub(crate) fn slots(chunk: &Chunk) -> usize {
    chunk.position.count_ones() as usize + 1
}

/// Recomputes −W S for a chunk's states (U − W T for T), T itself, and the states of the next chunk.
#[inline(always)]
pub(crate) fn replay<S: Simd>(
    s: S,
    source: &Source<'_>,
    chunk: &Chunk,
    prep: &Prep<'_>,
    here: &mut [f32],
    next: Option<&mut [f32]>,
) {
    let (pad, len) = (source.pad, chunk.len);
    let Some(target) = chunk.target() else { return };
    let tot = prep.gates.whole;
    let below = filled(chunk.position).take_while(|&m| m < target).count();
    let (levels, total) = here.split_at_mut((slots(chunk) - 1) * slot(pad));
    let (t, vn) = total.split_at_mut(pad.state());
    for (i, slot) in levels.chunks_exact(slot(pad)).take(below).enumerate() {
        let state = &slot[..pad.state()];
        if i == 0 {
            t.copy_from_slice(state);
        } else {
            simd::add_scaled(s, t, 1.0, state);
        }
    }
    vn[..len * pad.value].copy_from_slice(&prep.u[..len * pad.value]);
    if below > 0 {
        times_state(s, source, len, prep.wq, t, vn, Epilogue::Add);
    }
    for slot in levels.chunks_exact_mut(slot(pad)).skip(below) {
        let (state, held) = slot.split_at_mut(pad.state());
        times_state(s, source, len, prep.wq, state, held, Epilogue::Set);
    }
    let Some(next) = next else { return };
    let mut next = next.chunks_exact_mut(slot(pad));
    if let Some(to) = next.next() {
        let to = &mut to[..pad.state()];
        if below > 0 {
            to.copy_from_slice(t);
            into_state(s, pad, len, prep.faded, vn, to, Epilogue::Decay(tot));
        } else {
            into_state(s, pad, len, prep.faded, vn, to, Epilogue::Set);
        }
    }
    for (to, from) in next.zip(levels.chunks_exact(slot(pad)).skip(below)) {
        let (state, held) = from.split_at(pad.state());
        let to = &mut to[..pad.state()];
        to.copy_from_slice(state);
        into_state(s, pad, len, prep.faded, held, to, Epilogue::Decay(tot));
    }
}

/// Scratch buffers for one head's backward pass.
pub(crate) struct Work<'a> {
    /// Y of a level, followed by diag(λ) dO
    pub y_do: &'a mut [f32],
    /// dO
    pub dout: &'a mut [f32],
    /// Sᵀ and Dᵀ
    pub state_t: &'a mut [f32],
    pub gradient_t: &'a mut [f32],
    /// dW, followed by dpQ
    pub dwq: &'a mut [f32],
    /// dKbe, followed by dpQ
    pub back: &'a mut [f32],
    /// Z
    pub z: &'a mut [f32],
    pub dk: &'a mut [f32],
    pub dq: &'a mut [f32],
    /// dU and Hu
    pub du: &'a mut [f32],
    pub hu: &'a mut [f32],
    /// dVb
    pub dv: &'a mut [f32],
    /// Rows of a chunk, transposed, [d, 16]
    pub rows_t: &'a mut [f32],
    /// 16 × 16 matrices: E, E ∘ Λ, Nᵀ, F, [X; R], βX + (βX)ᵀ
    pub e: &'a mut [f32],
    pub dm: &'a mut [f32],
    pub inverse_t: &'a mut [f32],
    pub f: &'a mut [f32],
    pub xr: &'a mut [f32],
    pub mixed: &'a mut [f32],
    /// dλ, [NL][16]
    pub dlambda: &'a mut [f32],
    /// dL, d a_log, d dt_bias
    pub sums: &'a mut [f32],
    /// Σ <S, D>
    pub through: f32,
    /// Whether `du` is valid for the current chunk.
    pub writes: bool,
}

impl<'a> Work<'a> {
    pub(crate) fn size(pad: Padded, scales: usize) -> usize {
        let wide = pad.key.max(pad.value);
        2 * pad.state()
            + CHUNK * (6 * pad.value + 7 * pad.key + wide)
            + 7 * SQUARE
            + CHUNK * scales
            + Carve::size(scales + 2)
    }

    pub(crate) fn new(pad: Padded, scales: usize, carve: &mut Carve<'a>) -> Self {
        let work = Self {
            y_do: carve.take(2 * CHUNK * pad.value),
            dout: carve.take(CHUNK * pad.value),
            state_t: carve.take(pad.state()),
            gradient_t: carve.take(pad.state()),
            dwq: carve.take(2 * CHUNK * pad.key),
            back: carve.take(2 * CHUNK * pad.key),
            z: carve.take(CHUNK * pad.key),
            dk: carve.take(CHUNK * pad.key),
            dq: carve.take(CHUNK * pad.key),
            du: carve.take(CHUNK * pad.value),
            hu: carve.take(CHUNK * pad.value),
            dv: carve.take(CHUNK * pad.value),
            rows_t: carve.take(CHUNK * pad.key.max(pad.value)),
            e: carve.take(SQUARE),
            dm: carve.take(SQUARE),
            inverse_t: carve.take(SQUARE),
            f: carve.take(SQUARE),
            xr: carve.take(2 * SQUARE),
            mixed: carve.take(SQUARE),
            dlambda: carve.take(CHUNK * scales),
            sums: carve.take(scales + 2),
            through: 0.0,
            writes: false,
        };
        work.sums.fill(0.0);
        work
    }
}

/// Computes the state-dependent gradients: dW, dpQ, dKs / d (in `dk`), dU, dλ, τ, and the gradients of the states.
#[inline(always)]
pub(crate) fn levels_step<S: Simd>(
    s: S,
    source: &Source<'_>,
    chunk: &Chunk,
    prep: &Prep<'_>,
    here: &[f32],
    gradients: &mut Levels<'_>,
    last: bool,
    work: &mut Work<'_>,
    gradient: &[f32],
) {
    let (pad, len) = (source.pad, chunk.len);
    let n = &source.sizes.heads;
    let tot = prep.gates.whole;
    let [_, value_at, _] = source.at(chunk.start);
    load_rows(s, len, n.value_dim, &gradient[value_at..], n.value_heads * n.value_dim, work.dout);
    work.dwq[..2 * len * pad.key].fill(0.0);
    work.dk[..len * pad.key].fill(0.0);
    work.dlambda.fill(0.0);
    work.through = 0.0;
    // Nothing depends on the states after the last chunk.
    let target = chunk.target().filter(|_| !last);
    work.writes = target.is_some();
    let below = target.map_or(0, |target| filled(chunk.position).take_while(|&m| m < target).count());
    if let Some(target) = target {
        let (t, vn) = here[(slots(chunk) - 1) * slot(pad)..].split_at(pad.state());
        let d = gradients.of_mut(target);
        times_state(s, source, len, prep.faded, d, work.du, Epilogue::Set);
        simd::transpose_panels(s, pad.key, pad.value, d, work.gradient_t);
        by_state_t(s, source, len, vn, work.gradient_t, work.dk, Epilogue::Add);
        if below > 0 {
            simd::transpose_panels(s, pad.key, pad.value, t, work.state_t);
            work.through += simd::dot(s, work.state_t, work.gradient_t);
            by_state_t(s, source, len, work.du, work.state_t, work.dwq, Epilogue::Sub);
            into_state(s, pad, len, prep.wq, work.du, d, Epilogue::Decay(tot));
        }
    }
    let mut inner = [0.0; CHUNK];
    for (i, m) in filled(chunk.position).enumerate() {
        let (state, vn) = here[i * slot(pad)..][..slot(pad)].split_at(pad.state());
        let weights = prep.weights(source, chunk, m);
        simd::transpose_panels(s, pad.key, pad.value, state, work.state_t);
        by_state_t(s, source, len, work.dout, work.state_t, work.z, Epilogue::Set);
        let (_, pq) = prep.wq.split_at(len * pad.key);
        let (_, dpq) = work.dwq.split_at_mut(len * pad.key);
        for t in 0..len {
            let row = t * pad.key..(t + 1) * pad.key;
            inner[t] = simd::dot(s, &work.z[row.clone()], &pq[row.clone()]);
            simd::add_scaled(s, &mut dpq[row.clone()], weights[t], &work.z[row]);
            let row = t * pad.value..(t + 1) * pad.value;
            let to = &mut work.y_do[(len + t) * pad.value..(len + t + 1) * pad.value];
            simd::scale_to(s, to, weights[t], &work.dout[row]);
        }
        add_to_levels(source, chunk, m, &inner, work.dlambda);
        let read = &work.y_do[len * pad.value..];
        match target {
            None => into_state(s, pad, len, pq, read, gradients.of_mut(m), Epilogue::Set),
            Some(target) if m < target => {
                let (to, total) = gradients.pair(m, target);
                to.copy_from_slice(total);
                into_state(s, pad, len, pq, read, to, Epilogue::Add);
            }
            Some(_) => {
                let d = gradients.of_mut(m);
                times_state(s, source, len, prep.faded, d, work.y_do, Epilogue::Set);
                simd::transpose_panels(s, pad.key, pad.value, d, work.gradient_t);
                work.through += simd::dot(s, work.state_t, work.gradient_t);
                by_state_t(s, source, len, vn, work.gradient_t, work.dk, Epilogue::Add);
                by_state_t(s, source, len, work.y_do, work.state_t, work.dwq, Epilogue::Sub);
                into_state(s, pad, 2 * len, prep.wq, work.y_do, d, Epilogue::Decay(tot));
            }
        }
    }
}

/// C ← epilogue(C, A Sᵀ) with Sᵀ in panels; rows of A have `pad.value` elements.
#[inline(always)]
fn by_state_t<S: Simd>(
    s: S,
    source: &Source<'_>,
    rows: usize,
    a: &[f32],
    state_t: &[f32],
    c: &mut [f32],
    epilogue: Epilogue<'_>,
) {
    let pad = source.pad;
    gemm(
        s,
        [rows, pad.key, source.sizes.heads.value_dim],
        Band::Full,
        Strided::rows(a, pad.value),
        Block::panels(state_t, pad.value),
        BlockMut::rows(c, pad.key),
        epilogue,
    );
}

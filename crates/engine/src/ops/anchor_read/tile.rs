//! Shared parts of the forward and backward kernels: the call's tensors, tiles of tokens, and the scoring routine.
//!
//! A tile is up to 96 tokens of one segment and one head. Scores are computed transposed, [anchors, tokens], so
//! that the softmax over anchors runs vectorised with one token per lane, and the weights of one anchor are
//! contiguous. Every score is a single chain of multiply-adds over d_r, independent of the tile shape. Training,
//! prefill and decoding therefore compute bit-identical scores and select the same anchors.

use super::stored::{Codes, StoredStates};
use super::{AnchorRead, AnchorReadOptions, Sizes, Visible};
use crate::ops::gated_delta::L2_EPS;
use crate::simd::{self, Band, Block, BlockMut, Epilogue, PANEL, Simd, Strided, gemm, transpose};
use crate::tensor::{Data, Tensor};

/// Maximum tokens per tile, chosen so that the working set of a backward tile fits in the L2 cache.
pub(super) const TOKENS: usize = 96;
/// Number of anchors scored at a time.
pub(super) const ANCHORS: usize = 64;
/// Number of tokens from which packing an anchor state into panels pays off; fewer tokens read the state in place.
pub(super) const PACK_FROM: usize = 12;

/// Dimensions rounded up to whole panels.
#[derive(Clone, Copy)]
pub(super) struct Padded {
    pub key: usize,
    pub value: usize,
    pub routing: usize,
}

impl Padded {
    pub(super) fn of(sizes: &Sizes) -> Self {
        Self {
            key: simd::padded(sizes.key_dim),
            value: simd::padded(sizes.value_dim),
            routing: simd::padded(sizes.routing_dim),
        }
    }
    pub(super) fn state(self) -> usize {
        self.key * self.value
    }
}

/// Source of the anchor states.
#[derive(Clone, Copy)]
pub(super) enum States<'a> {
    Tensor(&'a [f32]),
    /// Each entry with the index of its first anchor.
    Stored(&'a [(usize, &'a StoredStates)]),
    /// One anchor per entry.
    Single(&'a [Tensor]),
    /// No states: only the weights are computed.
    Absent,
}

/// Tensors and options of a call.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub sizes: Sizes,
    pub pad: Padded,
    pub query: &'a [f32],
    pub routing_query: &'a [f32],
    pub routing_keys: &'a [f32],
    pub null_score: Option<&'a [f32]>,
    pub states: States<'a>,
    pub routing_scale: f32,
}

impl<'a> Call<'a> {
    pub(super) fn new<A>(
        sizes: Sizes,
        input: &'a AnchorRead<Tensor, A>,
        states: States<'a>,
        options: &AnchorReadOptions,
    ) -> Self {
        Self {
            sizes,
            pad: Padded::of(&sizes),
            query: input.query.f32().data(),
            routing_query: input.routing_query.f32().data(),
            routing_keys: input.routing_keys.f32().data(),
            null_score: input.null_score.as_ref().map(|null| null.f32().data()),
            states,
            routing_scale: options.routing_scale as f32,
        }
    }

    /// Query scale s = d_k^-½.
    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.sizes.key_dim as f32).sqrt()
    }

    /// State (`anchor`, `head`) of a tensor.
    #[inline(always)]
    fn of_tensor(&self, data: &'a [f32], anchor: usize, head: usize) -> &'a [f32] {
        &data[(anchor * self.sizes.value_heads + head) * self.sizes.state()..][..self.sizes.state()]
    }

    /// Stored states that an anchor is in, and its index in them.
    #[inline(always)]
    fn stored(&self, anchor: usize) -> Option<(&'a StoredStates, usize)> {
        match self.states {
            States::Stored(list) => {
                let (first, stored) = list[list.partition_point(|(first, _)| *first <= anchor) - 1];
                Some((stored, anchor - first))
            }
            States::Single(list) => match list[anchor].data() {
                Data::Stored(stored) => Some((stored, 0)),
                _ => None,
            },
            States::Tensor(_) | States::Absent => None,
        }
    }

    /// Writes state (`anchor`, `head`) into panels.
    #[inline(always)]
    pub(super) fn pack_state<S: Simd>(&self, s: S, anchor: usize, head: usize, panels: &mut [f32]) {
        let Sizes { key_dim, value_dim, .. } = self.sizes;
        if let States::Tensor(data) = self.states {
            simd::pack(key_dim, value_dim, self.of_tensor(data, anchor, head), panels);
        } else if let Some((stored, n)) = self.stored(anchor) {
            stored.pack(s, n, head, panels);
        } else {
            panels.fill(0.0);
        }
    }

    /// State (`anchor`, `head`) in place, if the product can read it in that layout.
    #[inline(always)]
    pub(super) fn state(&self, anchor: usize, head: usize) -> Option<Codes<'a>> {
        if !self.sizes.value_dim.is_multiple_of(PANEL) {
            return None;
        }
        if let States::Tensor(data) = self.states {
            return Some(Codes::F32(self.of_tensor(data, anchor, head)));
        }
        let (stored, n) = self.stored(anchor)?;
        stored.codes(n, head)
    }

    /// State (`anchor`, `head`) in place, if it is stored as f32.
    #[inline(always)]
    pub(super) fn plain_state(&self, anchor: usize, head: usize) -> Option<&'a [f32]> {
        match self.state(anchor, head) {
            Some(Codes::F32(state)) => Some(state),
            _ => None,
        }
    }

    /// Writes s q / |q| of one token to a row of `pad.key` elements; returns 1 / |q|.
    #[inline(always)]
    pub(super) fn load_query<S: Simd>(&self, s: S, row: usize, head: usize, to: &mut [f32]) -> f32 {
        let Sizes { key_dim, key_heads, .. } = self.sizes;
        let x = &self.query[(row * key_heads + head / self.sizes.group()) * key_dim..][..key_dim];
        let factor = 1.0 / (simd::dot(s, x, x) + L2_EPS as f32).sqrt();
        simd::scale_to(s, to, factor * self.scale(), x);
        to[key_dim..].fill(0.0);
        factor
    }

    /// Loads rows `first..first + count` of ρ, scaled, into rows of `pad.routing` elements, with zero rows up to a
    /// multiple of 16; then transposes them into one panel per 16 tokens.
    #[inline(always)]
    pub(super) fn load_routing<S: Simd>(
        &self,
        s: S,
        first: usize,
        count: usize,
        head: usize,
        rho: &mut [f32],
        rho_t: &mut [f32],
    ) {
        let Sizes { routing_dim, value_heads, .. } = self.sizes;
        let wide = self.pad.routing;
        for t in 0..simd::padded(count) {
            let to = &mut rho[t * wide..(t + 1) * wide];
            if t < count {
                let x =
                    &self.routing_query[((first + t) * value_heads + head) * routing_dim..][..routing_dim];
                simd::scale_to(s, to, self.routing_scale, x);
                to[routing_dim..].fill(0.0);
            } else {
                to.fill(0.0);
            }
        }
        for p in 0..simd::padded(count) / PANEL {
            let rows = &rho[p * PANEL * wide..][..PANEL * wide];
            transpose(s, PANEL, wide, rows, wide, &mut rho_t[p * PANEL * wide..], PANEL);
        }
    }

    /// Scores of visible anchors `from..to` for a tile, as rows of `width` tokens (`width` is a multiple of 16).
    #[inline(always)]
    pub(super) fn scores<S: Simd>(
        &self,
        s: S,
        visible: &Visible,
        range: std::ops::Range<usize>,
        head: usize,
        rho_t: &[f32],
        width: usize,
        gathered: &mut [f32],
        scores: &mut [f32],
    ) {
        let Sizes { routing_dim, value_heads, .. } = self.sizes;
        let stride = value_heads * routing_dim;
        let keys = match visible {
            Visible::Run(run) => Strided {
                data: &self.routing_keys[(run.start + range.start) * stride + head * routing_dim..],
                row: stride,
                col: 1,
            },
            Visible::List(list) => {
                for (i, &m) in list[range.clone()].iter().enumerate() {
                    gathered[i * routing_dim..(i + 1) * routing_dim].copy_from_slice(
                        &self.routing_keys[m * stride + head * routing_dim..][..routing_dim],
                    );
                }
                Strided::rows(gathered, routing_dim)
            }
        };
        gemm(
            s,
            [range.len(), width, routing_dim],
            Band::Full,
            keys,
            Block::panels(rho_t, self.pad.routing),
            BlockMut::rows(scores, width),
            Epilogue::Set,
        );
    }

    /// Loads the null scores of a tile, or −inf without a null; lanes from `count` on are 0.
    #[inline(always)]
    pub(super) fn load_null(&self, first: usize, count: usize, head: usize, to: &mut [f32]) {
        for (t, to) in to.iter_mut().enumerate() {
            *to = match self.null_score {
                _ if t >= count => 0.0,
                Some(null) => null[(first + t) * self.sizes.value_heads + head],
                None => f32::NEG_INFINITY,
            };
        }
    }
}

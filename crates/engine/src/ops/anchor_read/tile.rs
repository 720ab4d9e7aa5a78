//! What the forward and backward kernels share: the call's tensors, tiles of tokens, and the one scoring routine.
//!
//! A tile is up to 96 tokens of one segment and one head. Scores are formed transposed, [anchors, tokens], so
//! that the softmax runs down the anchors with a token in every lane, and an anchor's weights lie together.
//! Every score is one chain of multiply-adds over d_r, whatever the tile: training, prefill and a decoding step
//! choose the same anchors.

use std::sync::Arc;

use super::stored::{Codes, StoredStates};
use super::{AnchorRead, AnchorReadOptions, Sizes, Visible};
use crate::ops::gated_delta::L2_EPS;
use crate::simd::{self, Band, Block, BlockMut, Epilogue, PANEL, Simd, Strided, gemm, transpose};
use crate::tensor::Tensor;

/// Tokens of a tile: what a backward tile touches stays in the second-level cache.
pub(super) const TOKENS: usize = 96;
/// Anchors that are scored at a time.
pub(super) const ANCHORS: usize = 64;
/// Fewer tokens than this read an anchor where it lies; more are worth laying it out in panels.
pub(super) const PACK_FROM: usize = 12;

/// Widths rounded up to whole panels.
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

/// Where anchor states come from.
#[derive(Clone, Copy)]
pub(super) enum States<'a> {
    Tensor(&'a [f32]),
    /// With the number of the first anchor of each.
    Stored(&'a [(usize, &'a StoredStates)]),
    /// One anchor in each.
    Single(&'a [Arc<StoredStates>]),
    /// Only the weights are wanted.
    Absent,
}

/// The tensors and settings of a call.
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
        input: AnchorRead<&'a Tensor<f32>, A>,
        states: States<'a>,
        options: &AnchorReadOptions,
    ) -> Self {
        Self {
            sizes,
            pad: Padded::of(&sizes),
            query: input.query.data(),
            routing_query: input.routing_query.data(),
            routing_keys: input.routing_keys.data(),
            null_score: input.null_score.map(Tensor::data),
            states,
            routing_scale: options.routing_scale as f32,
        }
    }

    /// s = d_k^-½
    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.sizes.key_dim as f32).sqrt()
    }

    /// Writes state (`anchor`, `head`) into panels.
    #[inline(always)]
    pub(super) fn pack_state<S: Simd>(&self, s: S, anchor: usize, head: usize, panels: &mut [f32]) {
        let Sizes { key_dim, value_dim, value_heads, .. } = self.sizes;
        match self.states {
            States::Tensor(data) => {
                let at = (anchor * value_heads + head) * self.sizes.state();
                simd::pack(key_dim, value_dim, &data[at..at + self.sizes.state()], panels);
            }
            States::Stored(list) => {
                let which = list.partition_point(|(first, _)| *first <= anchor) - 1;
                let (first, stored) = list[which];
                stored.pack(s, anchor - first, head, panels);
            }
            States::Single(list) => list[anchor].pack(s, 0, head, panels),
            States::Absent => panels.fill(0.0),
        }
    }

    /// State (`anchor`, `head`) as it lies in memory, if the product can read it from there.
    #[inline(always)]
    pub(super) fn state(&self, anchor: usize, head: usize) -> Option<Codes<'a>> {
        if !self.sizes.value_dim.is_multiple_of(PANEL) {
            return None;
        }
        match self.states {
            States::Tensor(data) => {
                let at = (anchor * self.sizes.value_heads + head) * self.sizes.state();
                Some(Codes::F32(&data[at..at + self.sizes.state()]))
            }
            States::Stored(list) => {
                let (first, stored) = list[list.partition_point(|(first, _)| *first <= anchor) - 1];
                stored.codes(anchor - first, head)
            }
            States::Single(list) => list[anchor].codes(0, head),
            States::Absent => None,
        }
    }

    /// The numbers of a state in place, if they are f32.
    #[inline(always)]
    pub(super) fn plain_state(&self, anchor: usize, head: usize) -> Option<&'a [f32]> {
        match self.state(anchor, head) {
            Some(Codes::F32(state)) => Some(state),
            _ => None,
        }
    }

    /// s q / |q| of one token, into a row of `pad.key` numbers; returns 1 / |q|.
    #[inline(always)]
    pub(super) fn load_query<S: Simd>(&self, s: S, row: usize, head: usize, to: &mut [f32]) -> f32 {
        let Sizes { key_dim, key_heads, .. } = self.sizes;
        let x = &self.query[(row * key_heads + head / self.sizes.group()) * key_dim..][..key_dim];
        let factor = 1.0 / (simd::dot(s, x, x) + L2_EPS as f32).sqrt();
        simd::scale_to(s, to, factor * self.scale(), x);
        to[key_dim..].fill(0.0);
        factor
    }

    /// Rows `first..first + count` of ρ, scaled, into rows of `pad.routing` numbers; rows up to a multiple of 16
    /// are zero. Then their transposes, one panel for 16 tokens.
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

    /// Scores of anchors `from..to` of the list against a tile: rows of `width` (a multiple of 16) tokens.
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

    /// The null's scores of a tile, or −inf; lanes past `count` are 0.
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

//! What every kernel of the anchor reader is told about a call.

use march_engine::Result;
use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions, Sizes};

use super::arena::Layout;
use crate::array::GpuArray;
use crate::error::device;

/// Sizes of a small model, for tests without a device.
pub(super) fn example() -> Sizes {
    Sizes { rows: 8, anchors: 4, key_heads: 2, value_heads: 4, key_dim: 64, value_dim: 128, routing_dim: 32 }
}

/// Anchor states for a kernel: a tensor of f32, or slots of an arena.
pub(super) struct States {
    pub tensor: GpuArray,
    /// As STORAGE in `states.wgsl`.
    pub storage: u32,
    /// Words of one anchor, and of the codes that precede its scales.
    pub slot_words: usize,
    pub code_words: usize,
    /// The slot of each anchor; `None` if the anchors follow each other.
    pub slots: Option<Vec<u32>>,
}

impl States {
    /// A tensor [N, value_heads, d_k, d_v].
    pub fn whole(tensor: &GpuArray, sizes: &Sizes) -> Self {
        let words = sizes.value_heads * sizes.key_dim * sizes.value_dim;
        Self { tensor: tensor.clone(), storage: 0, slot_words: words, code_words: words, slots: None }
    }
}

/// Numbers of a dispatch, in the order of `common.wgsl`.
pub(super) struct Call {
    pub tiles: usize,
    pub first_tile: usize,
    pub k: usize,
    pub strips: usize,
    pub slots: usize,
    pub add: bool,
    sizes: Sizes,
    null: bool,
    slot_words: usize,
    code_words: usize,
    routing_scale: f32,
}

impl Call {
    pub fn new(sizes: &Sizes, options: &AnchorReadOptions, input: &AnchorRead<&GpuArray, &States>) -> Self {
        let states = input.anchor_states;
        let mut call = Self::without_states(sizes, options, input.null_score.is_some());
        (call.slot_words, call.code_words) = (states.slot_words, states.code_words);
        call
    }

    pub fn without_states(sizes: &Sizes, options: &AnchorReadOptions, null: bool) -> Self {
        Self {
            tiles: 0,
            first_tile: 0,
            k: 0,
            strips: 1,
            slots: 0,
            add: false,
            sizes: *sizes,
            null,
            slot_words: 0,
            code_words: 0,
            routing_scale: options.routing_scale as f32,
        }
    }

    /// Numbers of `unstore.wgsl`.
    pub fn of_slot(sizes: &Sizes, layout: &Layout, slot: u32, anchor: usize) -> Vec<u32> {
        let call = Self {
            tiles: 0,
            first_tile: slot as usize,
            k: 0,
            strips: 1,
            slots: 0,
            add: false,
            sizes: Sizes { rows: anchor, ..*sizes },
            null: false,
            slot_words: layout.slot_words(),
            code_words: layout.code_words(),
            routing_scale: 1.0,
        };
        call.words()
    }

    pub fn words(&self) -> Vec<u32> {
        let s = &self.sizes;
        let counts = [
            self.tiles,
            self.first_tile,
            s.rows,
            s.value_heads,
            s.group(),
            s.key_dim,
            s.value_dim,
            s.routing_dim,
            s.anchors,
            self.k,
            self.strips,
            usize::from(self.null),
            self.slots,
            self.slot_words,
            self.code_words,
            usize::from(self.add),
        ];
        let root = (s.key_dim as f64).sqrt();
        let numbers = [self.routing_scale, (1.0 / root) as f32, root as f32];
        counts.iter().map(|&n| n as u32).chain(numbers.map(f32::to_bits)).collect()
    }
}

/// Error for heads that no tile has room for.
pub(super) fn too_wide<T>(sizes: &Sizes) -> Result<T> {
    device(format!(
        "anchor_read: d_k {}, d_v {} and d_r {} together are too large for the workgroup memory of a GPU; use more and \
         narrower heads",
        sizes.key_dim, sizes.value_dim, sizes.routing_dim
    ))
}

//! Adaptive placement of anchors: where the first layer's state has moved most since the last anchor.
//!
//! The first layer's recurrence runs ahead of the call: the same recurrence over the same inputs, cut at every candidate,
//! with its own state. The decision therefore depends on the text alone, not on the anchors or on where calls end, and
//! no gradient flows through it. The mixers do not know of it: they get a list of boundaries.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use march_engine::Tensor;

use super::Mixer;
use super::anchored::AnchoredMemory;
use super::gated_delta_net::{DeltaMemory, GatedDeltaNet};
use super::march::March;
use super::memory_caching::{MemoryCaching, SegmentMemory};
use crate::anchors::{AnchorPlan, Candidate, Placement, Policy, Timeline, movement};
use crate::error::Result;
use crate::memory::{LayerReader, LayerWriter, Memory};
use crate::model::{Pass, Row};

/// The first layer's state as adaptive placement follows it. It is cut at every candidate for an anchor, whereas the
/// mixer's own state is cut only at the anchors; the two differ by rounding.
#[derive(Clone, Default)]
pub(super) struct PlacementState {
    /// The state at the last point of the chunk grid; `None` stands for zero.
    state: Option<Tensor>,
    /// The state at the last anchor, from which movement is measured.
    anchor: Option<Tensor>,
}

/// Names in a file.
const PLACEMENT: [&str; 2] = ["placement_state", "placement_anchor"];

impl PlacementState {
    /// Everything that is kept.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.state.iter().chain(&self.anchor)
    }

    pub fn save<'a>(&'a self, file: &mut LayerWriter<'a>) {
        for (name, tensor) in PLACEMENT.into_iter().zip([&self.state, &self.anchor]) {
            if let Some(tensor) = tensor {
                file.tensor(name, tensor);
            }
        }
    }

    pub fn load(file: &LayerReader<'_>) -> Result<Self> {
        let [state, anchor] = PLACEMENT.map(|name| file.tensor(name));
        Ok(Self { state: state?, anchor: anchor? })
    }

    /// Continues at an anchor with this state.
    pub fn rollback(&mut self, state: &Tensor) {
        if self.state.is_some() {
            *self = Self { state: Some(state.clone()), anchor: Some(state.clone()) };
        }
    }
}

/// The recurrence of a mixer with anchors, and its memory.
fn anchored<'a>(
    mixer: &'a dyn Mixer,
    memory: &'a mut dyn Memory,
) -> Option<(&'a GatedDeltaNet, &'a mut AnchoredMemory)> {
    let (mixer, memory): (&dyn Any, &mut dyn Any) = (mixer, memory);
    match mixer.downcast_ref::<March>() {
        Some(march) => Some((&march.base, memory.downcast_mut()?)),
        None => {
            let caching = mixer.downcast_ref::<MemoryCaching>()?;
            Some((&caching.base, &mut memory.downcast_mut::<SegmentMemory>()?.anchored))
        }
    }
}

/// Places anchors among the next `tokens` tokens of a text, for all layers. `input` computes the input of the first
/// layer's mixer for a range of the tokens, [1, n, D]. `timeline` and `memory`, that of the first layer, are those before
/// these tokens; what later decisions need is recorded in them.
pub(in crate::model) fn place(
    mixer: &dyn Mixer,
    pass: &Pass,
    tokens: usize,
    input: &dyn Fn(Range<usize>) -> Result<Tensor>,
    policy: &Policy,
    timeline: &mut Timeline,
    memory: &mut dyn Memory,
) -> Result<Vec<usize>> {
    let (Placement::Adaptive(min), Some(interval)) = (policy.placement, policy.interval) else {
        return Ok(policy.periodic(timeline.position, tokens));
    };
    let Some((base, memory)) = anchored(mixer, memory) else {
        return Ok(policy.periodic(timeline.position, tokens));
    };
    let (chunk, begin) = (pass.device().chunk_tokens(), timeline.position);
    let end = begin + tokens;
    if begin / min == end / min && begin / chunk == end / chunk {
        // No candidate, and no chunk ends whose state would be needed later.
        return Ok(Vec::new());
    }
    let mut ahead = memory.base.clone();
    ahead.recurrence.state = memory.placement.state.clone();
    let mut placed = timeline.clone();
    let mut boundaries = Vec::new();
    let mut last = memory.placement.anchor.as_ref().map(Tensor::to_f32);
    // Process pieces that end with a chunk, so that only a few candidates' states are held at once.
    let piece = chunk * min;
    let mut position = begin;
    while position < end {
        let tokens = (piece - position % piece).min(end - position);
        let candidates = policy.placement.candidates(position, tokens);
        let chunk_start = position / chunk * chunk;
        let plan = AnchorPlan {
            boundaries: Arc::new(vec![candidates.iter().map(|c| c - position).collect()]),
            recent: policy.placement.candidates(chunk_start, position - chunk_start),
            ..AnchorPlan::default()
        };
        let text = input(position - begin..position - begin + tokens)?;
        let row = Row { index: 0, position, tokens, anchors: &plan };
        let states = states_at(base, pass, &text, row, &mut ahead)?;
        for (i, &position) in candidates.iter().enumerate() {
            let tensor = states.slice(0, i..i + 1)?;
            let state = tensor.to_f32();
            let candidate = Candidate { position, movement: movement(&state, last.as_deref()) };
            let is_placed = candidate.is_placed(interval, &mut placed);
            if is_placed {
                placed.complete += 1;
                boundaries.push(position);
            }
            if is_placed || last.is_none() {
                memory.placement.anchor = Some(tensor);
                last = Some(state);
            }
        }
        position += tokens;
    }
    memory.placement.state = ahead.recurrence.state;
    timeline.usual_movement = placed.usual_movement;
    Ok(boundaries)
}

/// Computes only the states at the row's boundaries, [N, value_heads, d_k, d_v].
fn states_at(
    base: &GatedDeltaNet,
    pass: &Pass,
    text: &Tensor,
    row: Row<'_>,
    memory: &mut DeltaMemory,
) -> Result<Tensor> {
    let [q, k, v, a, b] = pass.project(text, base.projections())?;
    let [q, k, v] = base.convolve(pass, [&q, &k, &v], Some(memory))?;
    let out = base.recur(pass, [&q, &k, &v, &a, &b], row, Some(&mut memory.recurrence))?;
    Ok(out.boundary_states)
}

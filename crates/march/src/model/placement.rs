//! Adaptive placement in the model: the first layer's recurrence runs ahead of the call and says where anchors are.
//!
//! It is the same recurrence over the same inputs, cut at every candidate, with a state of its own in the bank. So
//! the decision depends on the text alone: not on the anchors, not on where calls are cut, and no gradient flows.

use std::rc::Rc;
use std::sync::Arc;

use march_engine::ops::embedding::Embedding;
use march_engine::ops::gated_delta::CHUNK_TOKENS;
use march_engine::{Engine, Tape};

use super::Model;
use super::pass::{Context, Pass, Weights};
use crate::anchors::{AnchorPlan, Candidate, Placement, Policy, Timeline, movement};
use crate::error::Result;
use crate::memory::{LayerMemory, PLACEMENT_ANCHOR, PLACEMENT_STATE, StateBank};

impl<E: Engine> Model<E> {
    /// The boundaries of a text's next tokens; with adaptive placement the bank learns what was seen.
    pub(super) fn place(
        &self,
        engine: &E,
        weights: &Weights<E>,
        ids: &[u32],
        bank: &mut StateBank<E>,
    ) -> Result<Vec<usize>> {
        let policy = bank.policy().clone();
        let position = bank.timeline.position;
        let (Placement::Adaptive(min), Some(memory)) = (policy.placement, bank.layers.first_mut()) else {
            return Ok(policy.periodic(position, ids.len()));
        };
        let end = position + ids.len();
        if position / min == end / min && position / CHUNK_TOKENS == end / CHUNK_TOKENS {
            // No candidate, and no chunk ends whose state would be needed later.
            return Ok(Vec::new());
        }
        let mut ahead = memory.for_placement();
        let boundaries = self.run_ahead(engine, weights, ids, &policy, &mut bank.timeline, &mut ahead)?;
        for (from, to) in [("state", PLACEMENT_STATE), (PLACEMENT_ANCHOR, PLACEMENT_ANCHOR)] {
            if let Some(tensor) = ahead.get(from) {
                memory.set(to, tensor.clone());
            }
        }
        Ok(boundaries)
    }

    /// The boundaries of a text from its beginning, with adaptive placement.
    pub(super) fn place_fresh(
        &self,
        engine: &E,
        weights: &Weights<E>,
        ids: &[u32],
        policy: &Policy,
    ) -> Result<Vec<usize>> {
        let (mut timeline, mut memory) = (Timeline::default(), LayerMemory::default());
        self.run_ahead(engine, weights, ids, policy, &mut timeline, &mut memory)
    }

    /// Follows the first layer's state over `ids` and decides at each candidate. Of the timeline only how far
    /// the state usually moves changes.
    fn run_ahead(
        &self,
        engine: &E,
        weights: &Weights<E>,
        ids: &[u32],
        policy: &Policy,
        timeline: &mut Timeline,
        memory: &mut LayerMemory<E>,
    ) -> Result<Vec<usize>> {
        let (Placement::Adaptive(min), Some(interval)) = (policy.placement, policy.interval) else {
            return Ok(policy.periodic(timeline.position, ids.len()));
        };
        let tape = Tape::inference(engine);
        let constants = weights.iter().map(|weight| weight.clone().map(|var| var.detach())).collect();
        let context =
            Context { weights: constants, plans: Vec::new(), norm_eps: self.config.norm_eps, trace: None };
        let pass = Pass { tape: &tape, context: Rc::new(context) };
        let mut placed = timeline.clone();
        let mut boundaries = Vec::new();
        let mut last = memory.get(PLACEMENT_ANCHOR).map(|state| engine.to_f32(state));
        // Few candidates' states are held at once, and pieces end where chunks do.
        let piece = CHUNK_TOKENS * min;
        let (mut position, mut ids) = (timeline.position, ids);
        while !ids.is_empty() {
            let tokens = (piece - position % piece).min(ids.len());
            let (now, later) = ids.split_at(tokens);
            let candidates = policy.placement.candidates(position, tokens);
            let chunk = position / CHUNK_TOKENS * CHUNK_TOKENS;
            let replay = policy.placement.candidates(chunk, position - chunk);
            let plan = AnchorPlan {
                position,
                tokens,
                boundaries: Arc::new(vec![candidates.iter().map(|c| c - position).collect()]),
                replay: replay.iter().map(|c| c - chunk).collect(),
                ..AnchorPlan::default()
            };
            let table = pass.matrix(self.embeddings);
            let text = tape.embedding(Embedding { table, ids: now, shape: &[1, tokens] })?;
            let states = match self.blocks.first() {
                Some(block) => block.states(&pass, &text, &plan, memory)?,
                None => None,
            };
            let Some(states) = states else { break };
            for (i, &position) in candidates.iter().enumerate() {
                let tensor = engine.slice(&states, 0, i..i + 1)?;
                let state = engine.to_f32(&tensor);
                let candidate = Candidate { position, movement: movement(&state, last.as_deref()) };
                let is_placed = candidate.is_placed(interval, &mut placed);
                if is_placed {
                    placed.complete += 1;
                    boundaries.push(position);
                }
                if is_placed || last.is_none() {
                    memory.set(PLACEMENT_ANCHOR, tensor);
                    last = Some(state);
                }
            }
            position += tokens;
            ids = later;
        }
        timeline.usual_movement = placed.usual_movement;
        Ok(boundaries)
    }
}

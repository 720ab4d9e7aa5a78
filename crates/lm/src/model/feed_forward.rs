//! The feed-forward half of a block: W_down (SiLU(W_gate x) ∘ W_up x).

use march_engine::ops::swiglu::swiglu_each;

use super::config::ModelConfig;
use super::mixer::Streams;
use super::parameters::{Builder, Projection};
use super::pass::Pass;
use crate::error::Result;

pub(super) struct FeedForward {
    gate_proj: Projection,
    up_proj: Projection,
    pub down_proj: Projection,
}

impl FeedForward {
    pub fn new(config: &ModelConfig, builder: &mut Builder<'_>) -> Self {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        Self {
            gate_proj: builder.linear("gate_proj", inner, width),
            up_proj: builder.linear("up_proj", inner, width),
            down_proj: builder.linear("down_proj", width, inner),
        }
    }

    /// SiLU(W_gate x) ∘ W_up x of each stream, which W_down multiplies.
    pub fn forward(&self, pass: &Pass, x: &Streams) -> Result<Streams> {
        let found = pass.project_streams(x, [self.gate_proj, self.up_proj])?;
        let (gates, ups): (Vec<_>, Vec<_>) = found.iter().map(|[gate, up]| (gate, up)).unzip();
        Ok(Streams::of(swiglu_each(&gates, &ups)?))
    }
}

//! The feed-forward half of a block: W_down (SiLU(W_gate x) ∘ W_up x).

use march_engine::ops::swiglu::SwiGlu;
use march_engine::{Engine, Var};

use super::config::ModelConfig;
use super::parameters::{Builder, Parameter};
use super::pass::Pass;
use crate::error::Result;

pub(super) struct FeedForward {
    gate_proj: Parameter,
    up_proj: Parameter,
    down_proj: Parameter,
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

    pub fn forward<E: Engine>(&self, pass: &Pass<'_, '_, E>, x: &Var<E::Tensor>) -> Result<Var<E::Tensor>> {
        let [gate, up] = pass.linear_each(x, [self.gate_proj, self.up_proj])?;
        pass.linear(&pass.tape.swiglu(SwiGlu { gate: &gate, up: &up })?, self.down_proj)
    }
}

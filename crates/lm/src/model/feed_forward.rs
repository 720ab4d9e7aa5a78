//! The feed-forward half of a block: W_down (SiLU(W_gate x) ∘ W_up x).

use march_engine::Engine;
use march_engine::ops::linear::Product;
use march_engine::ops::swiglu::SwiGlu;

use super::config::ModelConfig;
use super::mixer::Streams;
use super::parameters::{Builder, Parameter};
use super::pass::Pass;
use crate::error::Result;

pub(super) struct FeedForward {
    gate_proj: Parameter,
    up_proj: Parameter,
    pub down_proj: Parameter,
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
    pub fn forward<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        x: &Streams<E::Tensor>,
    ) -> Result<Streams<E::Tensor>> {
        let x = x.list();
        let products: Vec<_> = (0..x.len()).flat_map(|i| [Product::new(i, 0), Product::new(i, 1)]).collect();
        let found = pass.linear_list(&x, &[self.gate_proj, self.up_proj], &products)?;
        let inputs: Vec<_> = found.chunks_exact(2).map(|two| SwiGlu { gate: &two[0], up: &two[1] }).collect();
        Ok(Streams::of(pass.tape.swiglu_each(&inputs)?))
    }
}

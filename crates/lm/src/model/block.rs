//! A block: x + W_o mixer(norm(x)), then x + W_down feed_forward(norm(x)), with the same weights for text and anchors.

use std::sync::Arc;

use march_engine::{Tensor, tape};

use super::config::ModelConfig;
use super::feed_forward::FeedForward;
use super::mixer::{Mixer, Streams};
use super::parameters::{Builder, Init, Parameter};
use super::pass::Pass;
use crate::error::Result;
use crate::memory::Memory;

pub(super) struct Block {
    pub attn_norm: Parameter,
    pub mixer: Box<dyn Mixer>,
    mlp_norm: Parameter,
    mlp: FeedForward,
}

impl Block {
    pub fn new(
        config: &ModelConfig,
        builder: &mut Builder<'_>,
        mixer: impl FnOnce(&mut Builder<'_>) -> Box<dyn Mixer>,
    ) -> Self {
        let width = [config.hidden_size];
        Self {
            attn_norm: builder.add("attn_norm.weight", &width, Init::Constant(1.0)),
            mixer: mixer(&mut builder.child("attn.")),
            mlp_norm: builder.add("mlp_norm.weight", &width, Init::Constant(1.0)),
            mlp: FeedForward::new(config, &mut builder.child("mlp.")),
        }
    }

    pub fn forward(&self, pass: &Pass, x: &Streams, memory: &mut [&mut dyn Memory]) -> Result<Streams> {
        let readout = self.mixer.forward(pass, &pass.rms_norm(x, self.attn_norm)?, memory)?;
        let mut y = pass.add_linear(x, &readout, self.mixer.output())?;
        if self.mixer.passes_anchors() {
            y.anchors = x.anchors.clone();
        }
        let x = y;
        let hidden = self.mlp.forward(pass, &pass.rms_norm(&x, self.mlp_norm)?)?;
        pass.add_linear(&x, &hidden, self.mlp.down_proj)
    }

    /// The forward pass with activation recomputation: keeps only the block's inputs, and the backward pass recomputes
    /// the block.
    pub fn forward_recomputed(self: &Arc<Self>, pass: &Pass, x: &Streams) -> Result<Streams> {
        let (block, pass) = (Arc::clone(self), pass.clone());
        let region = move |inputs: &[Tensor]| -> Result<Vec<Tensor>> {
            let y = block.forward(&pass, &Streams::of(inputs.to_vec()), &mut [])?;
            Ok([y.text].into_iter().chain(y.anchors).collect())
        };
        Ok(Streams::of(tape::recompute(&x.list(), region)?))
    }
}

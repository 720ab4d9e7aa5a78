//! A block: x + W_o mixer(norm(x)), then x + W_down feed_forward(norm(x)), with the same weights for text and anchors.

use std::ops::Range;
use std::sync::Arc;

use march_engine::ops::rms_norm::RmsNorm;
use march_engine::{Engine, Tape, Var};

use super::config::ModelConfig;
use super::feed_forward::FeedForward;
use super::mixer::{AnyMixer, FirstInput, Streams};
use super::parameters::{Builder, Init, Parameter};
use super::pass::{Context, Pass};
use crate::anchors::{Policy, Storage, Timeline};
use crate::error::{Error, Result};
use crate::memory::Memory;

pub(super) struct Block<E: Engine> {
    attn_norm: Parameter,
    mixer: Box<dyn AnyMixer<E>>,
    mlp_norm: Parameter,
    mlp: FeedForward,
}

impl<E: Engine> Block<E> {
    pub fn new(
        config: &ModelConfig,
        builder: &mut Builder<'_>,
        mixer: impl FnOnce(&mut Builder<'_>) -> Box<dyn AnyMixer<E>>,
    ) -> Self {
        let width = [config.hidden_size];
        Self {
            attn_norm: builder.add("attn_norm.weight", &width, Init::Constant(1.0)),
            mixer: mixer(&mut builder.child("attn.")),
            mlp_norm: builder.add("mlp_norm.weight", &width, Init::Constant(1.0)),
            mlp: FeedForward::new(config, &mut builder.child("mlp.")),
        }
    }

    pub fn work(&self, tokens: usize, policy: &Policy) -> f64 {
        self.mixer.count_work(tokens, policy)
    }

    pub fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        self.mixer.count_memory(tokens, policy)
    }

    pub fn rollback_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        self.mixer.count_rollback(tokens, policy)
    }

    pub fn anchor_bytes(&self, storage: Storage) -> usize {
        self.mixer.count_anchor(storage)
    }

    pub fn new_memory(&self) -> Box<dyn Memory<E>> {
        self.mixer.new_memory()
    }

    /// Calls [`super::mixer::Mixer::place`] with the block's input.
    pub fn place(
        &self,
        pass: &Pass<'_, '_, E>,
        tokens: usize,
        input: FirstInput<'_, E::Tensor>,
        policy: &Policy,
        timeline: &mut Timeline,
        memory: &mut dyn Memory<E>,
    ) -> Result<Vec<usize>> {
        let normed = |range: Range<usize>| {
            let norm = RmsNorm { x: &input(range)?, weight: pass.weight(self.attn_norm) };
            Ok(pass.tape.rms_norm(norm, pass.norm_eps())?)
        };
        self.mixer.place_anchors(pass, tokens, &normed, policy, timeline, memory)
    }

    pub fn forward(
        &self,
        pass: &Pass<'_, '_, E>,
        x: Streams<E::Tensor>,
        memory: &mut [&mut dyn Memory<E>],
    ) -> Result<Streams<E::Tensor>> {
        let mix = |x: &Streams<E::Tensor>, memory: &mut [&mut dyn Memory<E>]| {
            let readout = self.mixer.mix(pass, &pass.rms_norm(x, self.attn_norm)?, memory)?;
            pass.add_linear(x, &readout, self.mixer.output_matrix())
        };
        let x = mix(&x, memory)?;
        let hidden = self.mlp.forward(pass, &pass.rms_norm(&x, self.mlp_norm)?)?;
        pass.add_linear(&x, &hidden, self.mlp.down_proj)
    }

    /// The forward pass with activation recomputation: keeps only the block's inputs, and the backward pass recomputes
    /// the block.
    pub fn forward_recomputed<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        context: &Arc<Context<E>>,
        x: Streams<E::Tensor>,
    ) -> Result<Streams<E::Tensor>> {
        let inputs = x.list();
        let context = Arc::clone(context);
        let region = move |tape: &Tape<'e, E>, inputs: &[Var<E::Tensor>]| {
            let pass = Pass { tape, context: Arc::clone(&context) };
            let x = Streams { text: inputs[0].clone(), anchors: inputs.get(1).cloned() };
            match self.forward(&pass, x, &mut []) {
                Ok(y) => Ok([y.text].into_iter().chain(y.anchors).collect()),
                Err(Error::Engine(error)) => Err(error),
                Err(other) => {
                    Err(march_engine::Error::Value { operation: "block", message: other.to_string() })
                }
            }
        };
        let mut outputs = tape.recompute(&inputs, region)?.into_iter();
        let Some(text) = outputs.next() else { unreachable!("a block returns its text") };
        Ok(Streams { text, anchors: outputs.next() })
    }
}

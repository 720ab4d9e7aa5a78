//! The model: embedding, blocks, final norm, head, on two streams.
//!
//! A [`Model`] knows the layout and the computation but holds no numbers; [`Parameters`] are the numbers. Training,
//! prefill and a decoding step are one function, [`Model::forward`] from nothing or [`Model::extend`] from a bank.

mod block;
mod config;
mod feed_forward;
mod fingerprint;
mod init;
pub mod mixer;
mod parameters;
mod pass;
mod placement;
mod trace;

use std::cell::RefCell;
use std::rc::Rc;

use march_engine::ops::cross_entropy::{LinearCrossEntropy, TokenLosses};
use march_engine::ops::embedding::Embedding;
use march_engine::ops::rms_norm::RmsNorm;
use march_engine::{Engine, Precision, Tape, Var};

use crate::anchors::{AnchorPlan, Placement, Policy, Recording};
use crate::error::{Error, Result};
use crate::memory::{LayerMemory, StateBank};
use block::Block;
use mixer::{Layer, Mixer, Streams};

pub use config::ModelConfig;
pub use parameters::{Builder, Init, Parameter, ParameterSpec};
pub use pass::{Pass, Weights};
pub use trace::Trace;

use pass::Context;

/// The numbers of a model, in the order of [`Model::layout`].
pub type Parameters<E> = Vec<<E as Engine>::Tensor>;

/// Sequences of token ids, all of one length.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The ids of the first sequence, then of the second, …
    pub ids: &'a [u32],
    /// How many sequences.
    pub rows: usize,
}

impl<'a> Batch<'a> {
    /// One sequence.
    pub fn one(ids: &'a [u32]) -> Self {
        Self { ids, rows: 1 }
    }

    /// Tokens of each sequence.
    fn tokens(&self) -> usize {
        self.ids.len() / self.rows.max(1)
    }
}

/// How a sequence is computed from nothing.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Anchors.
    pub policy: Policy,
    /// Keep only the inputs of each block for the backward pass, and compute the rest again.
    pub recompute: bool,
}

/// Routing weights that a call notes down; see [`Trace`].
pub type TraceCell<E> = Rc<RefCell<Trace<E>>>;

/// A model's layout and computation.
pub struct Model<E: Engine> {
    config: ModelConfig,
    layout: Vec<ParameterSpec>,
    embeddings: Parameter,
    anchor_embedding: Option<Parameter>,
    blocks: Vec<Block<E>>,
    norm: Parameter,
    head: Parameter,
}

impl<E: Engine> Model<E> {
    /// The model that a configuration describes.
    pub fn new(config: &ModelConfig) -> Self {
        Self::with_mixer(config, |layer, builder| config.mixer.build(config.hidden_size, layer, builder))
    }

    /// The same around mixers of another kind.
    pub fn with_mixer(
        config: &ModelConfig,
        mut mixer: impl FnMut(Layer, &mut Builder<'_>) -> Box<dyn Mixer<E>>,
    ) -> Self {
        let (width, vocabulary) = (config.hidden_size, config.vocab_size);
        let mut layout = Vec::new();
        let mut builder = Builder::new(&mut layout, "model.");
        let embeddings = builder.linear("embeddings", vocabulary, width);
        let anchor_embedding =
            config.mixer.policy().map(|_| builder.add("anchor_embedding", &[width], Init::Normal));
        let count = config.num_hidden_layers;
        let blocks = (0..count)
            .map(|index| {
                let mut builder = builder.child(&format!("layers.{index}."));
                Block::new(config, &mut builder, |builder| mixer(Layer { index, count }, builder))
            })
            .collect();
        let norm = builder.add("norm.weight", &[width], Init::Constant(1.0));
        let head = if config.tie_word_embeddings {
            embeddings
        } else {
            Builder::new(&mut layout, "").linear("lm_head", vocabulary, width)
        };
        Self { config: config.clone(), layout, embeddings, anchor_embedding, blocks, norm, head }
    }

    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The parameters' names and shapes.
    pub fn layout(&self) -> &[ParameterSpec] {
        &self.layout
    }

    /// Numbers in all parameters.
    pub fn parameter_count(&self) -> usize {
        self.layout.iter().map(ParameterSpec::count).sum()
    }

    /// Floating-point operations of the products in a forward pass over one text of `tokens` tokens, without those of
    /// the anchors' own way through the layers. The backward pass takes twice as many.
    pub fn work(&self, tokens: usize, policy: &Policy) -> f64 {
        // The table of embeddings is read, not multiplied with; the head is a matrix as any other, also if it is tied.
        let table = if self.head.0 == self.embeddings.0 { None } else { Some(self.embeddings.0) };
        let matrices =
            self.layout.iter().enumerate().filter(|(i, spec)| spec.shape.len() == 2 && Some(*i) != table);
        let numbers: usize = matrices.map(|(_, spec)| spec.count()).sum();
        let along: f64 = self.blocks.iter().map(|block| block.work(tokens, policy)).sum();
        2.0 * numbers as f64 * tokens as f64 + along
    }

    /// Bytes that decoding keeps after `tokens` tokens.
    pub fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        self.blocks.iter().map(|block| block.memory_bytes(tokens, policy)).sum()
    }

    /// Bytes of one anchor in all layers together.
    pub fn anchor_bytes(&self, policy: &Policy) -> usize {
        self.blocks.iter().map(|block| block.anchor_bytes(policy.storage)).sum()
    }

    /// The policy that the model was made for; no anchors where it has none.
    pub fn policy(&self) -> Policy {
        self.config.policy().unwrap_or_default()
    }

    /// Refuses a policy that the model cannot follow.
    pub fn check_policy(&self, policy: &Policy) -> Result<()> {
        if self.anchor_embedding.is_none() && *policy != Policy::default() {
            return Err(Error::Request(format!(
                "a model of type `{}` has no anchors: interval, top-K, retention, placement and storage do not apply \
                 to it",
                self.config.mixer.model_type()
            )));
        }
        policy.check()?;
        let least = self.anchor_bytes(policy);
        match policy.budget() {
            Some(bytes) if bytes < least => Err(Error::Request(format!(
                "a budget of {bytes} bytes holds no anchor: one takes {least} in the model's {} layers; \
                 give it that or more, or store anchors as int8",
                self.blocks.len()
            ))),
            _ => Ok(()),
        }
    }

    /// The same parameters for the same seed, on any engine and number of threads.
    pub fn init(&self, engine: &E, seed: u64) -> Result<Parameters<E>> {
        let count = self.layout.len();
        (0..count).map(|i| Ok(engine.from_f32(&self.initial(i, seed), &self.layout[i].shape)?)).collect()
    }

    /// The first values of one parameter.
    pub fn initial(&self, index: usize, seed: u64) -> Vec<f32> {
        init::values(&self.layout[index], index, self.config.initializer_range, seed)
    }

    /// Parameters for inference in fewer bits: the matrices that products and embeddings read. Norms, convolutions
    /// and the gates' vectors stay f32. No gradient passes such weights.
    pub fn quantize(
        &self,
        engine: &E,
        parameters: Parameters<E>,
        weights: Precision,
    ) -> Result<Parameters<E>> {
        let both = self.layout.iter().zip(parameters);
        both.map(|(spec, tensor)| rounded(engine, spec, tensor, weights)).collect()
    }

    /// Bytes of all parameters with weights in a precision.
    pub fn parameter_bytes(&self, weights: Precision) -> usize {
        self.layout.iter().map(|spec| spec.bytes(weights)).sum()
    }

    /// Puts the parameters on a tape; for inference once for many calls.
    pub fn bind(&self, tape: &Tape<'_, E>, parameters: &[E::Tensor]) -> Weights<E::Tensor> {
        parameters.iter().enumerate().map(|(key, tensor)| tape.parameter(key, tensor.clone())).collect()
    }

    /// A bank for an empty text.
    pub fn bank(&self, policy: Policy) -> Result<StateBank<E>> {
        self.check_policy(&policy)?;
        Ok(StateBank::new(policy, self.blocks.len()))
    }

    /// The last hidden layer, normalised, [rows, tokens, hidden_size], of sequences from their beginning. States are
    /// exact whatever the policy's storage is.
    pub fn forward<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E::Tensor>,
        batch: Batch<'_>,
        settings: &Settings,
        trace: Option<&TraceCell<E>>,
    ) -> Result<Var<E::Tensor>> {
        self.check_policy(&settings.policy)?;
        self.check_batch(&batch)?;
        let policy = &settings.policy;
        if policy.budget().is_some() {
            return Err(Error::Request(format!(
                "retention {} is decided layer by layer while text is read into a bank; the forward pass can only \
                 replay it from a recording; train with all, fenwick or recent:N",
                policy.retention
            )));
        }
        let plan = match policy.placement {
            Placement::Periodic => AnchorPlan::fresh(policy, batch.rows, batch.tokens()),
            Placement::Adaptive(_) => {
                let rows = batch.ids.chunks(batch.tokens()).map(|ids| {
                    let boundaries = self.place_fresh(tape.engine(), weights, ids, policy)?;
                    Ok(Recording { boundaries, evictions: Vec::new() })
                });
                let rows = rows.collect::<Result<Vec<_>>>()?;
                AnchorPlan::replayed(policy, &rows, batch.tokens(), self.blocks.len())?
            }
        };
        self.run(tape, weights, batch, vec![plan], &mut [], settings.recompute, trace)
    }

    /// The same with the anchors that banks recorded, one recording for each sequence.
    pub fn replay<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E::Tensor>,
        batch: Batch<'_>,
        settings: &Settings,
        recordings: &[Recording],
        trace: Option<&TraceCell<E>>,
    ) -> Result<Var<E::Tensor>> {
        self.check_policy(&settings.policy)?;
        self.check_batch(&batch)?;
        if recordings.len() != batch.rows {
            let message = format!("{} recordings came for {} sequences", recordings.len(), batch.rows);
            return Err(Error::Request(message));
        }
        let plan = AnchorPlan::replayed(&settings.policy, recordings, batch.tokens(), self.blocks.len())?;
        self.run(tape, weights, batch, vec![plan], &mut [], settings.recompute, trace)
    }

    /// The same for sequences that continue, each with its own bank; the banks are brought up to date.
    pub fn extend<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E::Tensor>,
        batch: Batch<'_>,
        banks: &mut [&mut StateBank<E>],
        trace: Option<&TraceCell<E>>,
    ) -> Result<Var<E::Tensor>> {
        self.check_batch(&batch)?;
        if banks.len() != batch.rows {
            let message = format!("{} banks came for {} sequences", banks.len(), batch.rows);
            return Err(Error::Request(message));
        }
        banks.iter().try_for_each(|bank| bank.check_whole())?;
        let tokens = batch.tokens();
        let mut boundaries = Vec::with_capacity(banks.len());
        for (bank, ids) in banks.iter_mut().zip(batch.ids.chunks(tokens)) {
            boundaries.push(self.place(tape.engine(), weights, ids, bank)?);
        }
        // Where layers decide at a boundary what they keep, the next piece begins: it sees what they kept.
        let mut ends = vec![tokens];
        for (bank, boundaries) in banks.iter().zip(&boundaries) {
            if bank.policy().budget().is_some() {
                ends.extend(boundaries.iter().map(|boundary| boundary - bank.timeline.position));
            }
        }
        ends.sort_unstable();
        ends.dedup();
        if ends.len() == 1 {
            return self.extend_piece(tape, weights, batch, banks, &boundaries, trace);
        }
        let (mut parts, mut start) = (Vec::with_capacity(ends.len()), 0);
        for end in ends {
            let ids: Vec<u32> = batch.ids.chunks(tokens).flat_map(|ids| &ids[start..end]).copied().collect();
            let piece = Batch { ids: &ids, rows: batch.rows };
            parts.push(self.extend_piece(tape, weights, piece, banks, &boundaries, trace)?);
            start = end;
        }
        Ok(tape.concat(&parts.iter().collect::<Vec<_>>(), 1)?)
    }

    /// A call, or a piece of one, whose anchors are at those of `boundaries` that lie in it.
    fn extend_piece<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E::Tensor>,
        batch: Batch<'_>,
        banks: &mut [&mut StateBank<E>],
        boundaries: &[Vec<usize>],
        trace: Option<&TraceCell<E>>,
    ) -> Result<Var<E::Tensor>> {
        let mut plans = Vec::with_capacity(banks.len());
        let mut timelines = Vec::with_capacity(banks.len());
        let (tokens, mut first_new) = (batch.tokens(), 0);
        for (bank, boundaries) in banks.iter().zip(boundaries) {
            let timeline = &bank.timeline;
            let up_to = |position| boundaries.partition_point(|&boundary| boundary <= position);
            let here = &boundaries[up_to(timeline.position)..up_to(timeline.position + tokens)];
            let (plan, after) = if here.is_empty() && trace.is_none() {
                (AnchorPlan::quiet(bank.policy(), timeline, tokens, first_new), None)
            } else {
                let (plan, after) = AnchorPlan::next(bank.policy(), timeline, tokens, here, first_new);
                (plan, Some(after))
            };
            first_new = plan.new.end;
            plans.push(plan);
            timelines.push(after);
        }
        banks.iter_mut().for_each(|bank| bank.torn = true);
        let hidden = self.run(tape, weights, batch, plans, banks, false, trace)?;
        for (bank, timeline) in banks.iter_mut().zip(timelines) {
            bank.torn = false;
            let Some(timeline) = timeline else {
                bank.timeline.advance(tokens);
                continue;
            };
            let placed = timeline.complete > bank.timeline.complete;
            bank.timeline = timeline;
            if placed && bank.policy().budget().is_some() {
                bank.join_layers();
            }
        }
        Ok(hidden)
    }

    /// Logits from the last hidden layer, [.., vocab_size].
    pub fn logits(
        &self,
        tape: &Tape<'_, E>,
        weights: &Weights<E::Tensor>,
        hidden: &Var<E::Tensor>,
    ) -> Result<Var<E::Tensor>> {
        let weight = &weights[self.head.0];
        Ok(tape.linear(march_engine::ops::linear::Linear { x: hidden, weight, bias: None })?)
    }

    /// Σ −ln p(target) / normaliser from the last hidden layer; the normaliser is the number of targets by default.
    pub fn loss(
        &self,
        tape: &Tape<'_, E>,
        weights: &Weights<E::Tensor>,
        hidden: &Var<E::Tensor>,
        targets: &[u32],
        normaliser: Option<f64>,
    ) -> Result<Var<E::Tensor>> {
        let input = LinearCrossEntropy { x: hidden, weight: &weights[self.head.0] };
        Ok(tape.linear_cross_entropy(input, targets, normaliser)?)
    }

    /// −ln p of each target from the last hidden layer, and each most probable token.
    pub fn token_losses(
        &self,
        tape: &Tape<'_, E>,
        weights: &Weights<E::Tensor>,
        hidden: &Var<E::Tensor>,
        targets: &[u32],
    ) -> Result<TokenLosses> {
        Ok(tape.engine().token_losses(hidden.value(), weights[self.head.0].value(), targets)?)
    }

    fn check_batch(&self, batch: &Batch<'_>) -> Result<()> {
        let Batch { ids, rows } = *batch;
        if rows == 0 || ids.is_empty() || !ids.len().is_multiple_of(rows) {
            let message = format!(
                "{} token ids came for {rows} sequences; each needs as many, at least one",
                ids.len()
            );
            return Err(Error::Request(message));
        }
        if let Some(at) = ids.iter().position(|&id| id as usize >= self.config.vocab_size) {
            let message = format!(
                "token id {} at position {at} is not below the {} of the model's vocabulary",
                ids[at], self.config.vocab_size
            );
            return Err(Error::Request(message));
        }
        Ok(())
    }

    fn run<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E::Tensor>,
        batch: Batch<'_>,
        plans: Vec<AnchorPlan>,
        banks: &mut [&mut StateBank<E>],
        recompute: bool,
        trace: Option<&TraceCell<E>>,
    ) -> Result<Var<E::Tensor>> {
        let context = Rc::new(Context {
            weights: Rc::clone(weights),
            plans,
            norm_eps: self.config.norm_eps,
            trace: trace.cloned(),
        });
        let pass = Pass { tape, context: Rc::clone(&context) };
        let shape = [batch.rows, batch.tokens()];
        let table = pass.weight(self.embeddings);
        let text = tape.embedding(Embedding { table, ids: batch.ids, shape: &shape })?;
        let anchors = match self.anchor_embedding {
            Some(embedding) if pass.new_anchors() > 0 => {
                Some(tape.reshape(pass.weight(embedding), &[1, self.config.hidden_size])?)
            }
            _ => None,
        };
        let mut streams = Streams { text, anchors };
        for (index, block) in self.blocks.iter().enumerate() {
            streams = if recompute && banks.is_empty() {
                block.forward_recomputed(tape, &context, streams)?
            } else {
                let mut memory: Vec<&mut LayerMemory<E>> =
                    banks.iter_mut().map(|bank| &mut bank.layers[index]).collect();
                block.forward(&pass, streams, &mut memory)?
            };
        }
        let input = RmsNorm { x: &streams.text, weight: pass.weight(self.norm) };
        Ok(tape.rms_norm(input, self.config.norm_eps)?)
    }
}

/// A parameter in the precision of the weights, if it is one of their matrices.
pub(crate) fn rounded<E: Engine>(
    engine: &E,
    spec: &ParameterSpec,
    tensor: E::Tensor,
    weights: Precision,
) -> Result<E::Tensor> {
    if weights == Precision::F32 || !spec.is_matrix() {
        return Ok(tensor);
    }
    engine.quantize(&tensor, weights).map_err(|error| Error::Request(format!("`{}`: {error}", spec.name)))
}

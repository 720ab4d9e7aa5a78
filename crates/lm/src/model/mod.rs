//! The model: embedding, blocks, final norm and head, on two streams.
//!
//! A [`Model`] defines the layout and the computation but holds no numbers; [`Parameters`] are the numbers. Training,
//! prefill and decoding use the same function: [`Model::forward`] from the beginning of a text, or [`Model::extend`]
//! from a bank.

mod block;
mod config;
mod feed_forward;
mod fingerprint;
mod init;
pub mod mixer;
mod parameters;
mod pass;
mod trace;

use std::sync::{Arc, Mutex};

use march_engine::ops::cross_entropy::TokenLosses;
use march_engine::{Device, Precision, Tape, Tensor};

use crate::anchors::{AnchorPlan, Placement, Policy, Recording, Timeline};
use crate::error::{Error, Result};
use crate::memory::{BankFile, BankTag, Memory, StateBank};
use block::Block;
use mixer::{Layer, Mixer, Streams, adaptive};

pub use config::{Dialect, ModelConfig};
pub use parameters::{Builder, Init, Parameter, ParameterSpec, Projection};
pub use pass::{MixerOutput, Pass, Projections, Row, RowInputs, Weights};
pub use trace::{MeanRouting, Trace};

use pass::{Context, RowPlan};

/// The parameters of a model, in the order of [`Model::layout`]. For inference, matrices may be packed in fewer bits
/// ([`Model::quantize`]).
pub type Parameters = Vec<Tensor>;

/// Sequences of token ids, all of one length.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The ids of the first sequence, then of the second, and so on.
    pub ids: &'a [u32],
    /// Number of sequences.
    pub rows: usize,
}

impl<'a> Batch<'a> {
    /// A batch of one sequence.
    pub fn one(ids: &'a [u32]) -> Self {
        Self { ids, rows: 1 }
    }

    /// Number of tokens in each sequence.
    fn tokens(&self) -> usize {
        self.ids.len() / self.rows.max(1)
    }
}

/// How a sequence is computed from its beginning.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The anchor policy.
    pub policy: Policy,
    /// Whether to keep only the inputs of each block for the backward pass, and recompute the rest.
    pub recompute: bool,
    /// The anchors that banks recorded ([`StateBank::recording`]), one recording per sequence, in place of those that
    /// the policy would place and keep.
    pub recordings: Option<Vec<Recording>>,
}

/// Where calls record the routing weights of one sequence; see [`Trace`].
pub type TraceCell = Arc<Mutex<Trace>>;

/// One sequence's part of a call that continues sequences: its next tokens and its bank.
pub struct Part<'a> {
    /// The next tokens, at least one.
    pub ids: &'a [u32],
    /// What is kept of the tokens before them; the call updates it.
    pub bank: &'a mut StateBank,
    /// Where routing weights are recorded, if anywhere.
    pub trace: Option<&'a TraceCell>,
}

impl<'a> Part<'a> {
    /// Creates the part for the next tokens of a sequence, without a trace.
    pub fn new(ids: &'a [u32], bank: &'a mut StateBank) -> Self {
        Self { ids, bank, trace: None }
    }
}

/// A model's layout and computation. Cloning copies a handle.
#[derive(Clone)]
pub struct Model {
    config: Arc<ModelConfig>,
    layout: Arc<[ParameterSpec]>,
    embeddings: Parameter,
    anchor_embedding: Option<Parameter>,
    blocks: Arc<[Arc<Block>]>,
    norm: Parameter,
    head: Parameter,
}

impl Model {
    /// Creates the model that a configuration describes.
    pub fn new(config: &ModelConfig) -> Self {
        Self::with_mixer(config, |layer, builder| config.mixer.build(config.hidden_size, layer, builder))
    }

    /// Creates a model from a configuration, but with mixers of another kind.
    pub fn with_mixer(
        config: &ModelConfig,
        mut mixer: impl FnMut(Layer, &mut Builder<'_>) -> Box<dyn Mixer>,
    ) -> Self {
        let (width, vocabulary) = (config.hidden_size, config.vocab_size);
        let mut layout = Vec::new();
        let mut builder = Builder::new(&mut layout, "model.");
        let embeddings = builder.linear("embeddings", vocabulary, width).weight;
        let stream = config.mixer.has_anchor_stream();
        let anchor_embedding = stream.then(|| builder.add("anchor_embedding", &[width], Init::Normal));
        let count = config.num_hidden_layers;
        let blocks = (0..count)
            .map(|index| {
                let mut builder = builder.child(&format!("layers.{index}."));
                Arc::new(Block::new(config, &mut builder, |builder| mixer(Layer::of(index, count), builder)))
            })
            .collect();
        let norm = builder.add("norm.weight", &[width], Init::Constant(1.0));
        let head = if config.tie_word_embeddings {
            embeddings
        } else {
            Builder::new(&mut layout, "").linear("lm_head", vocabulary, width).weight
        };
        let (config, layout) = (Arc::new(config.clone()), layout.into());
        Self { config, layout, embeddings, anchor_embedding, blocks, norm, head }
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The parameters' names and shapes.
    pub fn layout(&self) -> &[ParameterSpec] {
        &self.layout
    }

    /// Total number of parameters.
    pub fn parameter_count(&self) -> usize {
        self.layout.iter().map(ParameterSpec::count).sum()
    }

    /// Floating-point operations of the products in a forward pass over one text of `tokens` tokens, without those of
    /// the anchor stream. The backward pass takes twice as many.
    pub fn work(&self, tokens: usize, policy: &Policy) -> f64 {
        // The embedding table is read, not multiplied; the head is an ordinary matrix, even if it is tied.
        let table = if self.head.0 == self.embeddings.0 { None } else { Some(self.embeddings.0) };
        let matrices =
            self.layout.iter().enumerate().filter(|(i, spec)| spec.shape.len() == 2 && Some(*i) != table);
        let numbers: usize = matrices.map(|(_, spec)| spec.count()).sum();
        let along: f64 = self.blocks.iter().map(|block| block.mixer.work(tokens, policy)).sum();
        2.0 * numbers as f64 * tokens as f64 + along
    }

    /// Size of what decoding keeps after `tokens` tokens, in bytes.
    pub fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        self.blocks.iter().map(|block| block.mixer.memory_bytes(tokens, policy)).sum()
    }

    /// Of [`Model::memory_bytes`], those that only a rollback uses: the anchors' convolution tails, which no token reads.
    pub fn rollback_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        self.blocks.iter().map(|block| block.mixer.rollback_bytes(tokens, policy)).sum()
    }

    /// Size of one anchor in all layers together, in bytes.
    pub fn anchor_bytes(&self, policy: &Policy) -> usize {
        self.blocks.iter().map(|block| block.mixer.anchor_bytes(policy.storage)).sum()
    }

    /// The policy that the model was trained with; a policy without anchors if the model has none.
    pub fn policy(&self) -> Policy {
        self.config.policy().unwrap_or_default()
    }

    /// Rejects a policy that the model cannot follow.
    pub fn check_policy(&self, policy: &Policy) -> Result<()> {
        if self.config.mixer.policy().is_none() && *policy != Policy::default() {
            return Err(Error::Request(format!(
                "a model of type `{}` has no anchors: interval, top-K, retention, placement and storage do not apply \
                 to it",
                self.config.mixer.model_type()
            )));
        }
        policy.check()?;
        if policy.placement != Placement::Periodic && !self.config.mixer.places_adaptively() {
            return Err(Error::Request(format!(
                "placement {} follows the state of the first layer, which has no anchors in this model; use periodic \
                 placement",
                policy.placement
            )));
        }
        let least = self.anchor_bytes(policy);
        match policy.budget() {
            Some(bytes) if bytes < least => Err(Error::Request(format!(
                "a budget of {bytes} bytes is too small: one anchor takes {least} in the model's {} layers; \
                 use at least that, or store anchors as int8",
                self.blocks.len()
            ))),
            _ => Ok(()),
        }
    }

    /// Initial parameters: identical for the same seed, on any device and with any number of threads.
    pub fn init(&self, device: &Device, seed: u64) -> Result<Parameters> {
        let tensor = |(i, spec): (usize, &ParameterSpec)| {
            Ok(Tensor::from_slice(&self.initial(i, seed), &spec.shape, device)?)
        };
        self.layout.iter().enumerate().map(tensor).collect()
    }

    /// The initial values of one parameter.
    pub fn initial(&self, index: usize, seed: u64) -> Vec<f32> {
        init::values(&self.layout[index], index, self.config.initializer_range, seed)
    }

    /// Converts parameters for inference to fewer bits: the matrices used in products and embeddings. Norms,
    /// convolutions and the gates' vectors stay in f32. Such weights cannot be trained: no gradient passes through
    /// them.
    pub fn quantize(&self, parameters: Parameters, weights: Precision) -> Result<Parameters> {
        let both = self.layout.iter().zip(parameters);
        both.map(|(spec, tensor)| rounded(spec, tensor, weights)).collect()
    }

    /// Size of all parameters with weights in the given precision, in bytes.
    pub fn parameter_bytes(&self, weights: Precision) -> usize {
        self.layout.iter().map(|spec| spec.bytes(weights)).sum()
    }

    /// Puts the parameters on a tape for training. Inference needs no tape: `parameters.into()`.
    pub fn bind(&self, tape: &Tape, parameters: &[Tensor]) -> Weights {
        parameters.iter().enumerate().map(|(key, tensor)| tape.parameter(key, tensor)).collect()
    }

    /// Puts only some of the parameters on a tape: the others are constants, for which no gradient is computed.
    pub fn bind_some(&self, tape: &Tape, parameters: &[Tensor], trained: &[bool]) -> Weights {
        let bind = |(key, (tensor, trained)): (usize, (&Tensor, &bool))| match trained {
            true => tape.parameter(key, tensor),
            false => tensor.clone(),
        };
        parameters.iter().zip(trained).enumerate().map(bind).collect()
    }

    /// Creates the bank of an empty text.
    pub fn bank(&self, policy: Policy) -> Result<StateBank> {
        self.check_policy(&policy)?;
        Ok(StateBank::new(policy, self.blocks.iter().map(|block| block.mixer.memory()).collect()))
    }

    /// Loads the bank of a file that was written for the same model and tokenizer. A `policy` replaces the file's; it
    /// may differ only in top-K and retention.
    pub fn load_bank(
        &self,
        device: &Device,
        file: &BankFile,
        tag: &BankTag,
        policy: Option<&Policy>,
    ) -> Result<StateBank> {
        file.check_tag(tag)?;
        file.load(device, self.bank(policy.unwrap_or(file.policy()).clone())?, tag)
    }

    /// The last hidden layer, normalised, [rows, tokens, hidden_size], for sequences from their beginning. States are
    /// exact, whatever the policy's storage.
    pub fn forward(
        &self,
        weights: &Weights,
        batch: Batch<'_>,
        settings: &Settings,
        trace: Option<&TraceCell>,
    ) -> Result<Tensor> {
        self.check_policy(&settings.policy)?;
        self.check_batch(&batch)?;
        let anchors = self.plan(weights, &batch, settings)?;
        let rows = vec![RowPlan { position: 0, tokens: batch.tokens(), anchors }];
        let pass = self.pass(weights, rows, trace.into_iter().map(|trace| Some(trace.clone())).collect());
        self.run(&pass, batch.ids, [batch.rows, batch.tokens()], &mut [], settings.recompute)
    }

    /// The anchors of sequences from their beginning.
    fn plan(&self, weights: &Weights, batch: &Batch<'_>, settings: &Settings) -> Result<AnchorPlan> {
        let (policy, tokens, layers) = (&settings.policy, batch.tokens(), self.blocks.len());
        if let Some(recordings) = &settings.recordings {
            if recordings.len() != batch.rows {
                let (found, expected) = (recordings.len(), batch.rows);
                let message = format!("got {found} recordings, expected {expected} (one per sequence)");
                return Err(Error::Request(message));
            }
            return AnchorPlan::replayed(policy, recordings, tokens, layers);
        }
        if policy.budget().is_some() {
            return Err(Error::Request(format!(
                "retention {} is decided per layer while a bank reads the text, and the forward pass can \
                 only replay it from a recording; train with all, fenwick or recent:N",
                policy.retention
            )));
        }
        let Placement::Adaptive(_) = policy.placement else {
            return Ok(AnchorPlan::fresh(policy, batch.rows, tokens));
        };
        let rows = batch.ids.chunks(tokens).map(|ids| {
            let mut memory = self.blocks.first().map(|block| block.mixer.memory());
            let mut timeline = Timeline::default();
            let boundaries = self.place(weights, ids, policy, &mut timeline, memory.as_deref_mut())?;
            Ok(Recording { boundaries, evictions: Vec::new() })
        });
        AnchorPlan::replayed(policy, &rows.collect::<Result<Vec<_>>>()?, tokens, layers)
    }

    /// Same as [`Model::step`] for sequences with equal numbers of tokens: [rows, tokens, hidden_size].
    pub fn extend(
        &self,
        weights: &Weights,
        batch: Batch<'_>,
        banks: &mut [&mut StateBank],
        trace: Option<&TraceCell>,
    ) -> Result<Tensor> {
        self.check_batch(&batch)?;
        if banks.len() != batch.rows {
            let message = format!("got {} banks, expected {} (one per sequence)", banks.len(), batch.rows);
            return Err(Error::Request(message));
        }
        let rows = batch.ids.chunks(batch.tokens()).zip(banks);
        let mut parts: Vec<_> = rows.map(|(ids, bank)| Part { ids, bank, trace }).collect();
        let hidden = self.step(weights, &mut parts)?;
        Ok(hidden.reshape(&[batch.rows, batch.tokens(), self.config.hidden_size])?)
    }

    /// The last hidden layer, normalised, for the next tokens of any number of sequences, each with any number of
    /// tokens: concatenated, [1, tokens of all, hidden_size]. The banks are updated. The result of a sequence is
    /// bit-identical whatever else is in the call.
    pub fn step(&self, weights: &Weights, parts: &mut [Part<'_>]) -> Result<Tensor> {
        for part in parts.iter() {
            self.check_batch(&Batch::one(part.ids))?;
            part.bank.check_whole()?;
        }
        let mut boundaries = Vec::with_capacity(parts.len());
        for part in parts.iter_mut() {
            let StateBank { policy, timeline, layers, .. } = &mut *part.bank;
            let memory = layers.first_mut().map(|layer| &mut **layer);
            boundaries.push(self.place(weights, part.ids, policy, timeline, memory)?);
        }
        // Where layers decide at a boundary which anchors they keep, a new call begins there, so that it sees what they
        // kept.
        let ends: Vec<Vec<usize>> = std::iter::zip(&*parts, &boundaries)
            .map(|(part, boundaries)| {
                let inner = boundaries.iter().map(|boundary| boundary - part.bank.timeline.position);
                let inner =
                    inner.filter(|&end| part.bank.policy().budget().is_some() && end < part.ids.len());
                inner.chain([part.ids.len()]).collect()
            })
            .collect();
        let rounds = ends.iter().map(Vec::len).max().unwrap_or(0);
        if rounds == 1 {
            return self.step_once(weights, parts, &boundaries);
        }
        let mut hidden: Vec<Vec<Tensor>> = parts.iter().map(|_| Vec::new()).collect();
        for round in 0..rounds {
            let (mut now, mut here, mut owners) = (Vec::new(), Vec::new(), Vec::new());
            for (i, part) in parts.iter_mut().enumerate() {
                let Some(&end) = ends[i].get(round) else { continue };
                let start = if round == 0 { 0 } else { ends[i][round - 1] };
                owners.push((i, end - start));
                here.push(boundaries[i].clone());
                now.push(Part { ids: &part.ids[start..end], bank: part.bank, trace: part.trace });
            }
            let all = self.step_once(weights, &mut now, &here)?;
            let mut at = 0;
            for (owner, tokens) in owners {
                hidden[owner].push(all.slice(1, at..at + tokens)?);
                at += tokens;
            }
        }
        Ok(Tensor::concat(&hidden.iter().flatten().collect::<Vec<_>>(), 1)?)
    }

    /// One call of [`Model::step`]; its anchors are at those of `boundaries` that lie within it.
    fn step_once(
        &self,
        weights: &Weights,
        parts: &mut [Part<'_>],
        boundaries: &[Vec<usize>],
    ) -> Result<Tensor> {
        let chunk = weights[0].device().chunk_tokens();
        let mut rows = Vec::with_capacity(parts.len());
        let mut timelines = Vec::with_capacity(parts.len());
        let mut first_new = 0;
        for (part, boundaries) in parts.iter().zip(boundaries) {
            let (timeline, policy, tokens) = (&part.bank.timeline, part.bank.policy(), part.ids.len());
            let up_to = |position| boundaries.partition_point(|&boundary| boundary <= position);
            let here = &boundaries[up_to(timeline.position)..up_to(timeline.position + tokens)];
            let (anchors, after) = if here.is_empty() && part.trace.is_none() {
                (AnchorPlan::quiet(policy, timeline, tokens, first_new), None)
            } else {
                let (plan, after) = AnchorPlan::next(policy, timeline, tokens, here, first_new, chunk);
                (plan, Some(after))
            };
            first_new = anchors.new.end;
            rows.push(RowPlan { position: timeline.position, tokens, anchors });
            timelines.push(after);
        }
        let ids: Vec<u32> = parts.iter().flat_map(|part| part.ids).copied().collect();
        let traces = match parts.iter().any(|part| part.trace.is_some()) {
            true => parts.iter().map(|part| part.trace.cloned()).collect(),
            false => Vec::new(),
        };
        let pass = self.pass(weights, rows, traces);
        let mut banks: Vec<&mut StateBank> = parts.iter_mut().map(|part| &mut *part.bank).collect();
        banks.iter_mut().for_each(|bank| bank.torn = true);
        let hidden = self.run(&pass, &ids, [1, ids.len()], &mut banks, false)?;
        for (part, timeline) in parts.iter_mut().zip(timelines) {
            let bank = &mut *part.bank;
            bank.torn = false;
            let Some(timeline) = timeline else {
                bank.timeline.advance(part.ids.len(), chunk);
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

    /// Places anchors among the next tokens of a text, for all layers. `memory` is that of the first layer.
    fn place(
        &self,
        weights: &Weights,
        ids: &[u32],
        policy: &Policy,
        timeline: &mut Timeline,
        memory: Option<&mut dyn Memory>,
    ) -> Result<Vec<usize>> {
        let (Placement::Adaptive(_), Some(block), Some(memory)) =
            (policy.placement, self.blocks.first(), memory)
        else {
            return Ok(policy.periodic(timeline.position, ids.len()));
        };
        // No gradient flows through the placement of anchors.
        let constants = weights.iter().map(Tensor::detach).collect();
        let pass = self.pass(&constants, Vec::new(), Vec::new());
        let input = |range: std::ops::Range<usize>| {
            let text = pass.weight(self.embeddings).embedding(&ids[range.clone()], &[1, range.len()])?;
            Ok(text.rms_norm(pass.weight(block.attn_norm), pass.norm_eps())?)
        };
        adaptive::place(&*block.mixer, &pass, ids.len(), &input, policy, timeline, memory)
    }

    /// Computes the logits from the last hidden layer, [.., vocab_size].
    pub fn logits(&self, weights: &Weights, hidden: &Tensor) -> Result<Tensor> {
        Ok(hidden.linear(&weights[self.head.0])?)
    }

    /// Σ −ln p(target) / normaliser from the last hidden layer; by default the normaliser is the number of targets.
    pub fn loss(
        &self,
        weights: &Weights,
        hidden: &Tensor,
        targets: &[u32],
        normaliser: Option<f64>,
    ) -> Result<Tensor> {
        Ok(hidden.linear_cross_entropy(&weights[self.head.0], targets, normaliser)?)
    }

    /// −ln p of each target from the last hidden layer, and the most probable token at each position.
    pub fn token_losses(&self, weights: &Weights, hidden: &Tensor, targets: &[u32]) -> Result<TokenLosses> {
        Ok(hidden.token_losses(&weights[self.head.0], targets)?)
    }

    fn check_batch(&self, batch: &Batch<'_>) -> Result<()> {
        let Batch { ids, rows } = *batch;
        if rows == 0 || ids.is_empty() || !ids.len().is_multiple_of(rows) {
            let message = format!(
                "got {} token ids for {rows} sequences; each needs the same number, at least one",
                ids.len()
            );
            return Err(Error::Request(message));
        }
        if let Some(at) = ids.iter().position(|&id| id as usize >= self.config.vocab_size) {
            let message = format!(
                "token id {} at position {at} is out of range for the model's vocabulary of {} ids",
                ids[at], self.config.vocab_size
            );
            return Err(Error::Request(message));
        }
        Ok(())
    }

    fn pass(&self, weights: &Weights, rows: Vec<RowPlan>, traces: Vec<Option<TraceCell>>) -> Pass {
        let (weights, norm_eps) = (Arc::clone(weights), self.config.norm_eps);
        Pass(Arc::new(Context { weights, rows, norm_eps, traces }))
    }

    fn run(
        &self,
        pass: &Pass,
        ids: &[u32],
        shape: [usize; 2],
        banks: &mut [&mut StateBank],
        recompute: bool,
    ) -> Result<Tensor> {
        let text = pass.weight(self.embeddings).embedding(ids, &shape)?;
        let anchors = match self.anchor_embedding {
            Some(embedding) if pass.new_anchors() > 0 => {
                Some(pass.weight(embedding).reshape(&[1, self.config.hidden_size])?)
            }
            _ => None,
        };
        let mut streams = Streams { text, anchors };
        for (index, block) in self.blocks.iter().enumerate() {
            streams = if recompute && banks.is_empty() {
                block.forward_recomputed(pass, &streams)?
            } else {
                let mut memory: Vec<&mut dyn Memory> =
                    banks.iter_mut().map(|bank| &mut *bank.layers[index]).collect();
                block.forward(pass, &streams, &mut memory)?
            };
        }
        Ok(streams.text.rms_norm(pass.weight(self.norm), self.config.norm_eps)?)
    }
}

/// Converts a parameter for inference: packed if it is a matrix and the precision is not f32.
pub(crate) fn rounded(spec: &ParameterSpec, tensor: Tensor, weights: Precision) -> Result<Tensor> {
    if weights == Precision::F32 || !spec.is_matrix() {
        return Ok(tensor);
    }
    tensor.pack(weights).map_err(|error| unpackable(spec, &error))
}

/// The error of a parameter that a precision cannot hold.
pub(crate) fn unpackable(spec: &ParameterSpec, error: &march_engine::Error) -> Error {
    Error::Request(format!("`{}`: {error}", spec.name))
}

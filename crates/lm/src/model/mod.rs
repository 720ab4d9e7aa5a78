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

use march_engine::ops::cross_entropy::{LinearCrossEntropy, TokenLosses};
use march_engine::ops::embedding::Embedding;
use march_engine::ops::rms_norm::RmsNorm;
use march_engine::{Engine, Precision, Tape, Var, Weight};

use crate::anchors::{AnchorPlan, Placement, Policy, Recording, Timeline};
use crate::error::{Error, Result};
use crate::memory::{BankFile, BankTag, Memory, StateBank};
use block::Block;
use mixer::{AnyMixer, Layer, Streams};

pub use config::ModelConfig;
pub use parameters::{Builder, Init, Parameter, ParameterSpec};
pub use pass::{MixerOutput, Pass, Row, Weights};
pub use trace::{MeanRouting, Trace};

use pass::{Context, RowPlan};

/// The parameters of a model, in the order of [`Model::layout`].
pub type Parameters<E> = Vec<<E as Engine>::Tensor>;

/// The parameters of a model for inference, in the order of [`Model::layout`]; matrices may be packed in fewer bits.
pub type InferenceParameters<E> = Vec<Weight<<E as Engine>::Tensor, <E as Engine>::Packed>>;

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
}

/// Where calls record the routing weights of one sequence; see [`Trace`].
pub type TraceCell<E> = Arc<Mutex<Trace<E>>>;

/// One sequence's part of a call that continues sequences: its next tokens and its bank.
pub struct Part<'a, E: Engine> {
    /// The next tokens, at least one.
    pub ids: &'a [u32],
    /// What is kept of the tokens before them; the call updates it.
    pub bank: &'a mut StateBank<E>,
    /// Where routing weights are recorded, if anywhere.
    pub trace: Option<&'a TraceCell<E>>,
}

impl<'a, E: Engine> Part<'a, E> {
    /// Creates the part for the next tokens of a sequence, without a trace.
    pub fn new(ids: &'a [u32], bank: &'a mut StateBank<E>) -> Self {
        Self { ids, bank, trace: None }
    }
}

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
    /// Creates the model that a configuration describes.
    pub fn new(config: &ModelConfig) -> Self {
        Self::with_mixer(config, |layer, builder| config.mixer.build(config.hidden_size, layer, builder))
    }

    /// Creates a model from a configuration, but with mixers of another kind.
    pub fn with_mixer(
        config: &ModelConfig,
        mut mixer: impl FnMut(Layer, &mut Builder<'_>) -> Box<dyn AnyMixer<E>>,
    ) -> Self {
        let (width, vocabulary) = (config.hidden_size, config.vocab_size);
        let mut layout = Vec::new();
        let mut builder = Builder::new(&mut layout, "model.");
        let embeddings = builder.linear("embeddings", vocabulary, width);
        let stream = config.mixer.has_anchor_stream();
        let anchor_embedding = stream.then(|| builder.add("anchor_embedding", &[width], Init::Normal));
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
        let along: f64 = self.blocks.iter().map(|block| block.work(tokens, policy)).sum();
        2.0 * numbers as f64 * tokens as f64 + along
    }

    /// Size of what decoding keeps after `tokens` tokens, in bytes.
    pub fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        self.blocks.iter().map(|block| block.memory_bytes(tokens, policy)).sum()
    }

    /// Of [`Model::memory_bytes`], those that only a rollback uses: the anchors' convolution tails, which no token reads.
    pub fn rollback_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        self.blocks.iter().map(|block| block.rollback_bytes(tokens, policy)).sum()
    }

    /// Size of one anchor in all layers together, in bytes.
    pub fn anchor_bytes(&self, policy: &Policy) -> usize {
        self.blocks.iter().map(|block| block.anchor_bytes(policy.storage)).sum()
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

    /// Initial parameters: identical for the same seed, on any engine and with any number of threads.
    pub fn init(&self, engine: &E, seed: u64) -> Result<Parameters<E>> {
        let count = self.layout.len();
        (0..count).map(|i| Ok(engine.from_f32(&self.initial(i, seed), &self.layout[i].shape)?)).collect()
    }

    /// The initial values of one parameter.
    pub fn initial(&self, index: usize, seed: u64) -> Vec<f32> {
        init::values(&self.layout[index], index, self.config.initializer_range, seed)
    }

    /// Converts parameters for inference to fewer bits: the matrices used in products and embeddings. Norms,
    /// convolutions and the gates' vectors stay in f32. Such weights cannot be trained: no gradient passes through
    /// them.
    pub fn quantize(
        &self,
        engine: &E,
        parameters: Parameters<E>,
        weights: Precision,
    ) -> Result<InferenceParameters<E>> {
        let both = self.layout.iter().zip(parameters);
        both.map(|(spec, tensor)| rounded(engine, spec, tensor, weights)).collect()
    }

    /// Size of all parameters with weights in the given precision, in bytes.
    pub fn parameter_bytes(&self, weights: Precision) -> usize {
        self.layout.iter().map(|spec| spec.bytes(weights)).sum()
    }

    /// Puts the parameters, [`Parameters`] or [`InferenceParameters`], on a tape. For inference, once is enough for
    /// many calls.
    pub fn bind(
        &self,
        tape: &Tape<'_, E>,
        parameters: &[impl Clone + Into<Weight<E::Tensor, E::Packed>>],
    ) -> Weights<E> {
        let weights = parameters.iter().map(|parameter| parameter.clone().into());
        weights.enumerate().map(|(key, weight)| weight.map(|tensor| tape.parameter(key, tensor))).collect()
    }

    /// Creates the bank of an empty text.
    pub fn bank(&self, policy: Policy) -> Result<StateBank<E>> {
        self.check_policy(&policy)?;
        Ok(StateBank::new(policy, self.blocks.iter().map(Block::new_memory).collect()))
    }

    /// Loads the bank of a file that was written for the same model and tokenizer. A `policy` replaces the file's; it
    /// may differ only in top-K and retention.
    pub fn load_bank(
        &self,
        engine: &E,
        file: &BankFile,
        tag: &BankTag,
        policy: Option<&Policy>,
    ) -> Result<StateBank<E>> {
        file.check_tag(tag)?;
        file.load(engine, self.bank(policy.unwrap_or(file.policy()).clone())?, tag)
    }

    /// The last hidden layer, normalised, [rows, tokens, hidden_size], for sequences from their beginning. States are
    /// exact, whatever the policy's storage.
    pub fn forward<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E>,
        batch: Batch<'_>,
        settings: &Settings,
        trace: Option<&TraceCell<E>>,
    ) -> Result<Var<E::Tensor>> {
        self.check_policy(&settings.policy)?;
        self.check_batch(&batch)?;
        let policy = &settings.policy;
        if policy.budget().is_some() {
            return Err(Error::Request(format!(
                "retention {} is decided per layer while a bank reads the text, and the forward pass can \
                 only replay it from a recording; train with all, fenwick or recent:N",
                policy.retention
            )));
        }
        let plan = match policy.placement {
            Placement::Periodic => AnchorPlan::fresh(policy, batch.rows, batch.tokens()),
            Placement::Adaptive(_) => {
                let rows = batch.ids.chunks(batch.tokens()).map(|ids| {
                    let mut timeline = Timeline::default();
                    let memory = &mut self.blocks.first().map(Block::new_memory);
                    let memory = memory.as_deref_mut();
                    let boundaries =
                        self.place(tape.engine(), weights, ids, policy, &mut timeline, memory)?;
                    Ok(Recording { boundaries, evictions: Vec::new() })
                });
                let rows = rows.collect::<Result<Vec<_>>>()?;
                AnchorPlan::replayed(policy, &rows, batch.tokens(), self.blocks.len())?
            }
        };
        self.run_fresh(tape, weights, batch, plan, settings.recompute, trace)
    }

    /// The last hidden layer of sequences from their beginning, as in [`Model::forward`], but with the anchors that
    /// banks recorded, one recording per sequence.
    pub fn replay<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E>,
        batch: Batch<'_>,
        settings: &Settings,
        recordings: &[Recording],
        trace: Option<&TraceCell<E>>,
    ) -> Result<Var<E::Tensor>> {
        self.check_policy(&settings.policy)?;
        self.check_batch(&batch)?;
        if recordings.len() != batch.rows {
            let message =
                format!("got {} recordings, expected {} (one per sequence)", recordings.len(), batch.rows);
            return Err(Error::Request(message));
        }
        let plan = AnchorPlan::replayed(&settings.policy, recordings, batch.tokens(), self.blocks.len())?;
        self.run_fresh(tape, weights, batch, plan, settings.recompute, trace)
    }

    /// Same as [`Model::step`] for sequences with equal numbers of tokens: [rows, tokens, hidden_size].
    pub fn extend<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E>,
        batch: Batch<'_>,
        banks: &mut [&mut StateBank<E>],
        trace: Option<&TraceCell<E>>,
    ) -> Result<Var<E::Tensor>> {
        self.check_batch(&batch)?;
        if banks.len() != batch.rows {
            let message = format!("got {} banks, expected {} (one per sequence)", banks.len(), batch.rows);
            return Err(Error::Request(message));
        }
        let rows = batch.ids.chunks(batch.tokens()).zip(banks);
        let mut parts: Vec<_> = rows.map(|(ids, bank)| Part { ids, bank, trace }).collect();
        let hidden = self.step(tape, weights, &mut parts)?;
        Ok(tape.reshape(&hidden, &[batch.rows, batch.tokens(), self.config.hidden_size])?)
    }

    /// The last hidden layer, normalised, for the next tokens of any number of sequences, each with any number of
    /// tokens: concatenated, [1, tokens of all, hidden_size]. The banks are updated. The result of a sequence is
    /// bit-identical whatever else is in the call.
    pub fn step<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E>,
        parts: &mut [Part<'_, E>],
    ) -> Result<Var<E::Tensor>> {
        for part in parts.iter() {
            self.check_batch(&Batch::one(part.ids))?;
            part.bank.check_whole()?;
        }
        let mut boundaries = Vec::with_capacity(parts.len());
        for part in parts.iter_mut() {
            let StateBank { policy, timeline, layers, .. } = &mut *part.bank;
            let memory = layers.first_mut().map(|layer| &mut **layer);
            boundaries.push(self.place(tape.engine(), weights, part.ids, policy, timeline, memory)?);
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
            return self.step_once(tape, weights, parts, &boundaries);
        }
        let mut hidden: Vec<Vec<Var<E::Tensor>>> = parts.iter().map(|_| Vec::new()).collect();
        for round in 0..rounds {
            let (mut now, mut here, mut owners) = (Vec::new(), Vec::new(), Vec::new());
            for (i, part) in parts.iter_mut().enumerate() {
                let Some(&end) = ends[i].get(round) else { continue };
                let start = if round == 0 { 0 } else { ends[i][round - 1] };
                owners.push((i, end - start));
                here.push(boundaries[i].clone());
                now.push(Part { ids: &part.ids[start..end], bank: part.bank, trace: part.trace });
            }
            let all = self.step_once(tape, weights, &mut now, &here)?;
            let mut at = 0;
            for (owner, tokens) in owners {
                hidden[owner].push(tape.slice(&all, 1, at..at + tokens)?);
                at += tokens;
            }
        }
        Ok(tape.concat(&hidden.iter().flatten().collect::<Vec<_>>(), 1)?)
    }

    /// One call of [`Model::step`]; its anchors are at those of `boundaries` that lie within it.
    fn step_once<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E>,
        parts: &mut [Part<'_, E>],
        boundaries: &[Vec<usize>],
    ) -> Result<Var<E::Tensor>> {
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
                let chunk = E::CHUNK_TOKENS;
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
        let context = self.context(weights, rows, traces);
        let mut banks: Vec<&mut StateBank<E>> = parts.iter_mut().map(|part| &mut *part.bank).collect();
        banks.iter_mut().for_each(|bank| bank.torn = true);
        let hidden = self.run(tape, context, &ids, [1, ids.len()], &mut banks, false)?;
        for (part, timeline) in parts.iter_mut().zip(timelines) {
            let bank = &mut *part.bank;
            bank.torn = false;
            let Some(timeline) = timeline else {
                bank.timeline.advance(part.ids.len(), E::CHUNK_TOKENS);
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

    /// Places anchors among the next tokens of a text, for all layers; the first layer decides.
    fn place(
        &self,
        engine: &E,
        weights: &Weights<E>,
        ids: &[u32],
        policy: &Policy,
        timeline: &mut Timeline,
        memory: Option<&mut dyn Memory<E>>,
    ) -> Result<Vec<usize>> {
        let (Placement::Adaptive(_), Some(block), Some(memory)) =
            (policy.placement, self.blocks.first(), memory)
        else {
            return Ok(policy.periodic(timeline.position, ids.len()));
        };
        let tape = Tape::inference(engine);
        // No gradient flows through the placement of anchors.
        let constants = weights.iter().map(|weight| weight.clone().map(|var| var.detach())).collect();
        let pass = Pass { tape: &tape, context: self.context(&constants, Vec::new(), Vec::new()) };
        let input = |range: std::ops::Range<usize>| {
            let (ids, shape) = (&ids[range.clone()], [1, range.len()]);
            Ok(tape.embedding(Embedding { table: pass.matrix(self.embeddings), ids, shape: &shape })?)
        };
        block.place(&pass, ids.len(), &input, policy, timeline, memory)
    }

    /// Computes the logits from the last hidden layer, [.., vocab_size].
    pub fn logits(
        &self,
        tape: &Tape<'_, E>,
        weights: &Weights<E>,
        hidden: &Var<E::Tensor>,
    ) -> Result<Var<E::Tensor>> {
        let weight = weights[self.head.0].as_ref();
        Ok(tape.linear(march_engine::ops::linear::Linear { x: hidden, weight, bias: None })?)
    }

    /// Σ −ln p(target) / normaliser from the last hidden layer; by default the normaliser is the number of targets.
    pub fn loss(
        &self,
        tape: &Tape<'_, E>,
        weights: &Weights<E>,
        hidden: &Var<E::Tensor>,
        targets: &[u32],
        normaliser: Option<f64>,
    ) -> Result<Var<E::Tensor>> {
        let input = LinearCrossEntropy { x: hidden, weight: weights[self.head.0].as_ref() };
        Ok(tape.linear_cross_entropy(input, targets, normaliser)?)
    }

    /// −ln p of each target from the last hidden layer, and the most probable token at each position.
    pub fn token_losses(
        &self,
        tape: &Tape<'_, E>,
        weights: &Weights<E>,
        hidden: &Var<E::Tensor>,
        targets: &[u32],
    ) -> Result<TokenLosses> {
        Ok(tape.engine().token_losses(
            hidden.value(),
            weights[self.head.0].as_ref().map(Var::value),
            targets,
        )?)
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

    fn context(
        &self,
        weights: &Weights<E>,
        rows: Vec<RowPlan>,
        traces: Vec<Option<TraceCell<E>>>,
    ) -> Arc<Context<E>> {
        Arc::new(Context { weights: Arc::clone(weights), rows, norm_eps: self.config.norm_eps, traces })
    }

    /// Runs a call on sequences from their beginning.
    fn run_fresh<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        weights: &Weights<E>,
        batch: Batch<'_>,
        anchors: AnchorPlan,
        recompute: bool,
        trace: Option<&TraceCell<E>>,
    ) -> Result<Var<E::Tensor>> {
        let row = RowPlan { position: 0, tokens: batch.tokens(), anchors };
        let context = self.context(
            weights,
            vec![row],
            trace.map(|trace| vec![Some(trace.clone())]).unwrap_or_default(),
        );
        self.run(tape, context, batch.ids, [batch.rows, batch.tokens()], &mut [], recompute)
    }

    fn run<'e>(
        &'e self,
        tape: &Tape<'e, E>,
        context: Arc<Context<E>>,
        ids: &[u32],
        shape: [usize; 2],
        banks: &mut [&mut StateBank<E>],
        recompute: bool,
    ) -> Result<Var<E::Tensor>> {
        let pass = Pass { tape, context: Arc::clone(&context) };
        let text = tape.embedding(Embedding { table: pass.matrix(self.embeddings), ids, shape: &shape })?;
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
                let mut memory: Vec<&mut dyn Memory<E>> =
                    banks.iter_mut().map(|bank| &mut *bank.layers[index]).collect();
                block.forward(&pass, streams, &mut memory)?
            };
        }
        let input = RmsNorm { x: &streams.text, weight: pass.weight(self.norm) };
        Ok(tape.rms_norm(input, self.config.norm_eps)?)
    }
}

/// Converts a parameter for inference: packed if it is a matrix and the precision is not f32.
pub(crate) fn rounded<E: Engine>(
    engine: &E,
    spec: &ParameterSpec,
    tensor: E::Tensor,
    weights: Precision,
) -> Result<Weight<E::Tensor, E::Packed>> {
    if weights == Precision::F32 || !spec.is_matrix() {
        return Ok(Weight::Full(tensor));
    }
    let packed = engine.pack(&tensor, weights);
    packed.map(Weight::Packed).map_err(|error| Error::Request(format!("`{}`: {error}", spec.name)))
}

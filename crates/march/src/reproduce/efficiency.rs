//! The paper's figure "Training efficiency": how the cost of training grows with the length of the sequence.
//!
//! Two kinds of measurement, at lengths from 1K to 128K tokens, for attention, Gated DeltaNet (GDN), MARCH that reads
//! all anchors and MARCH that reads the best four:
//!
//! - [`Kind::Core`]: the operation that mixes along the sequence, forward and backward, on random inputs of one
//!   sequence. For MARCH that is the gated delta rule with its boundary states, the anchor reader, and the sum of both.
//! - [`Kind::EndToEnd`]: steps of [`Trainer`] on random tokens: forward, backward and update.
//!
//! All arms are measured at one length before the next length begins, so that what else the machine does affects all
//! arms alike. [`peers`] measures the core of attention and of GDN in PyTorch at the same shapes.
//!
//! What was scaled down in [`EfficiencyPlan::laptop`]: the paper's models are 1536 wide (attention of 16 heads × 96;
//! GDN of 6 heads with d_k 192 and d_v 384), which would take hours at 128K tokens on two cores. The plan's width D is
//! 128 with the paper's proportions: GDN has d_k 0.75 D and d_v 1.5 D over all heads, here two. The interval of 512
//! tokens is the paper's, and so is the number of anchors at every length. States shrink with D² but attention's keys
//! and values with D, so that attention costs more, in proportion, than in the paper; [`EfficiencyPlan::paper`] has the
//! paper's own shapes for the core.

use std::io::{BufRead, BufReader, Read, Write};
use std::ops::ControlFlow;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions, ReadPlan};
use march_engine::ops::attention::Attention;
use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaGradient, GatedDeltaOptions};
use march_engine::{Cpu, CpuOptions, Engine, Tensor};
use serde::{Deserialize, Serialize};

use crate::data::{Loader, TextSource};
use crate::error::{Error, Result};
use crate::model::{Model, ModelConfig, Settings};
use crate::train::{Schedule, TrainConfig, Trainer, machine_memory};

/// Number of anchors that a token reads in the arm "MARCH top-4".
const TOP_K: usize = 4;

/// Lengths are multiples of this: PyTorch's gated delta rule works on chunks of so many tokens.
const CHUNK: usize = 64;

/// The largest length; longer ones are mistakes.
const LONGEST: usize = 1 << 22;

/// What one thread does on an ordinary machine, in FLOP/s, for [`EfficiencyPlan::estimate_seconds`]: attention, the
/// other cores, a training step, and the chunked gated delta rule in PyTorch.
const RATES: [f64; 4] = [70e9, 45e9, 38e9, 5e9];

/// Sizes of the operations that mix along the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoreShape {
    /// Heads of GDN and MARCH.
    pub heads: usize,
    /// d_k, the width of a query or key of GDN and MARCH.
    pub head_dim_k: usize,
    /// d_v, the width of a value of GDN and MARCH.
    pub head_dim_v: usize,
    /// d_r, the width of a routing query or key of MARCH.
    pub routing_dim: usize,
    /// C, the number of tokens between two anchors of MARCH.
    pub interval: usize,
    /// Heads of attention.
    pub attention_heads: usize,
    /// The width of a head of attention.
    pub attention_head_dim: usize,
}

/// Sizes of the models of [`Kind::EndToEnd`] that are not those of [`CoreShape`]. The models' width is attention's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Number of layers.
    pub layers: usize,
    /// Inner width of the feed-forward network.
    pub feed_forward: usize,
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// Tokens of a step: as many sequences as fit, computed at once; one sequence where it is longer than that.
    pub tokens_per_step: usize,
}

/// What to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct EfficiencyPlan {
    /// What to compare, in the order of measuring.
    pub arms: Vec<Arm>,
    /// Sequence lengths, ascending; multiples of 64.
    pub lengths: Vec<usize>,
    /// A measurement is repeated until it has taken this many seconds.
    pub core_seconds: f64,
    /// Sizes of the operations.
    pub core: CoreShape,
    /// Whether to measure training steps too.
    pub end_to_end: bool,
    /// Sizes of the models.
    pub model: ModelShape,
    /// A measurement whose single run would take longer, as predicted from the length before, is skipped.
    pub limit_seconds: f64,
    /// The same limit for [`peers`].
    pub peer_limit_seconds: f64,
    /// Number of threads; 0 uses all that the machine has.
    pub threads: usize,
}

/// What was measured.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The operation that mixes along the sequence, forward and backward.
    Core,
    /// A training step.
    EndToEnd,
}

/// One point of the figure.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Timing {
    /// The name of the arm, as [`Arm::name`] gives it, or "PyTorch attention", "PyTorch GDN".
    pub arm: String,
    /// What was measured.
    pub kind: Kind,
    /// T, the number of tokens in a sequence.
    pub length: usize,
    /// Seconds of a run or a step, the best of all repeats. If skipped, the prediction.
    pub seconds: f64,
    /// Tokens per second: those of one sequence for [`Kind::Core`], those of a step for [`Kind::EndToEnd`].
    pub tokens_per_second: f64,
    /// Floating-point operations of a run or a step; a multiply-add counts as two.
    pub flop: f64,
    /// Number of runs that were timed; 0 if the measurement was skipped.
    pub repeats: usize,
}

impl Timing {
    fn new(
        arm: &str,
        kind: Kind,
        [length, tokens]: [usize; 2],
        flop: f64,
        (seconds, repeats): (f64, usize),
    ) -> Self {
        let tokens_per_second = tokens as f64 / seconds;
        Self { arm: arm.into(), kind, length, seconds, tokens_per_second, flop, repeats }
    }

    /// Whether the measurement was skipped, and `seconds` is only a prediction.
    pub fn is_skipped(&self) -> bool {
        self.repeats == 0
    }
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// Softmax attention: the Transformer.
    Attention,
    /// Gated DeltaNet.
    Gdn,
    /// MARCH; every token reads all anchors before it.
    Dense,
    /// MARCH; every token reads the best four.
    TopFour,
}

impl Arm {
    /// All arms, in the order in which they are measured.
    pub const ALL: [Self; 4] = [Self::Attention, Self::Gdn, Self::Dense, Self::TopFour];

    /// The arm's name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Gdn => "GDN",
            Self::Dense => "MARCH dense",
            Self::TopFour => "MARCH top-4",
        }
    }

    fn top_k(self) -> Option<usize> {
        (self == Self::TopFour).then_some(TOP_K)
    }

    /// Whether the arm has anchors.
    fn anchored(self) -> bool {
        matches!(self, Self::Dense | Self::TopFour)
    }
}

/// The name of an arm in PyTorch.
fn peer_name(arm: Arm) -> String {
    format!("PyTorch {}", arm.name())
}

impl EfficiencyPlan {
    /// Tiny shapes and lengths, to see that everything runs: about a second.
    pub fn quick() -> Self {
        Self {
            arms: Arm::ALL.to_vec(),
            lengths: vec![256, 512, 1024],
            core_seconds: 0.01,
            core: CoreShape {
                heads: 2,
                head_dim_k: 16,
                head_dim_v: 32,
                routing_dim: 16,
                interval: 64,
                attention_heads: 2,
                attention_head_dim: 16,
            },
            end_to_end: true,
            model: ModelShape { layers: 2, feed_forward: 96, vocabulary: 256, tokens_per_step: 1024 },
            limit_seconds: 30.0,
            peer_limit_seconds: 30.0,
            threads: 0,
        }
    }

    /// 1K to 128K tokens at a twelfth of the paper's width: see the module's description. Models have two layers of the
    /// paper's 21, a feed-forward network of 8/3 of the width and 256 tokens in the vocabulary. Of MARCH's layers the
    /// first is special (its top-4 are the newest four, by definition): here it is one of two. PyTorch's attention is
    /// not measured at 128K tokens, where it would take minutes; its time there is predicted.
    pub fn laptop() -> Self {
        Self {
            arms: Arm::ALL.to_vec(),
            lengths: (10..=17).map(|power| 1 << power).collect(),
            core_seconds: 1.0,
            core: CoreShape {
                heads: 2,
                head_dim_k: 48,
                head_dim_v: 96,
                routing_dim: 64,
                interval: 512,
                attention_heads: 2,
                attention_head_dim: 64,
            },
            end_to_end: true,
            model: ModelShape { layers: 2, feed_forward: 352, vocabulary: 256, tokens_per_step: 16_384 },
            limit_seconds: 400.0,
            peer_limit_seconds: 90.0,
            threads: 0,
        }
    }

    /// The core at the paper's shapes. At 128K tokens attention takes about half an hour on two cores, so that it is
    /// skipped there.
    pub fn paper() -> Self {
        Self {
            core: CoreShape {
                heads: 6,
                head_dim_k: 192,
                head_dim_v: 384,
                routing_dim: 64,
                interval: 512,
                attention_heads: 16,
                attention_head_dim: 96,
            },
            end_to_end: false,
            limit_seconds: 600.0,
            peer_limit_seconds: 600.0,
            ..Self::laptop()
        }
    }

    /// Measures all arms at all lengths. `watch` is called after each measurement; when it breaks, the result holds
    /// what was measured until then.
    pub fn run(&self, watch: &mut dyn FnMut(&Timing) -> ControlFlow<()>) -> Result<Vec<Timing>> {
        self.check()?;
        let engine = Cpu::new(CpuOptions { threads: self.threads, ..Default::default() })?;
        let mut all: Vec<Timing> = Vec::new();
        for &length in &self.lengths {
            for kind in [Kind::Core, Kind::EndToEnd] {
                if kind == Kind::EndToEnd && !self.end_to_end {
                    continue;
                }
                for &arm in &self.arms {
                    let timing = self.measure(&engine, arm, kind, length, &all)?;
                    // Buffers of this length are of no use to the next arm.
                    engine.trim();
                    let flow = watch(&timing);
                    all.push(timing);
                    if flow.is_break() {
                        return Ok(all);
                    }
                }
            }
        }
        Ok(all)
    }

    /// One measurement, or its prediction from those `before` where that exceeds the limit.
    fn measure(
        &self,
        engine: &Cpu,
        arm: Arm,
        kind: Kind,
        length: usize,
        before: &[Timing],
    ) -> Result<Timing> {
        let flop = self.flop(arm, kind, length)?;
        let rows = match kind {
            Kind::Core => 1,
            Kind::EndToEnd => self.rows(length),
        };
        let last = before.iter().rev().find(|timing| timing.arm == arm.name() && timing.kind == kind);
        let predicted = last.map_or(0.0, |last| last.seconds / last.flop * flop);
        let found = if predicted > self.limit_seconds {
            (predicted, 0)
        } else {
            match kind {
                Kind::Core => self.core_time(engine, arm, length)?,
                Kind::EndToEnd => self.step_time(engine, arm, length)?,
            }
        };
        Ok(Timing::new(arm.name(), kind, [length, rows * length], flop, found))
    }

    /// Seconds that [`EfficiencyPlan::run`] takes, from the work and the speed of an ordinary machine.
    pub fn estimate_seconds(&self) -> f64 {
        let own = self.arms.iter().flat_map(|&arm| [(arm, Kind::Core), (arm, Kind::EndToEnd)]);
        let wanted = own.filter(|(_, kind)| *kind == Kind::Core || self.end_to_end);
        wanted
            .map(|(arm, kind)| {
                let rate = match (kind, arm) {
                    (Kind::EndToEnd, Arm::Attention) => RATES[0],
                    (Kind::EndToEnd, _) => RATES[2],
                    (Kind::Core, Arm::Attention) => RATES[0],
                    (Kind::Core, _) => RATES[1],
                };
                self.estimate(arm, kind, rate, self.limit_seconds)
            })
            .sum()
    }

    /// Seconds that [`peers`] takes, in the same way.
    pub fn estimate_peer_seconds(&self) -> f64 {
        let of = |arm, rate| self.estimate(arm, Kind::Core, rate, self.peer_limit_seconds);
        of(Arm::Attention, RATES[0]) + of(Arm::Gdn, RATES[3])
    }

    fn estimate(&self, arm: Arm, kind: Kind, rate: f64, limit: f64) -> f64 {
        let threads = self.thread_count();
        let run = |&length: &usize| self.flop(arm, kind, length).unwrap_or(0.0) / (rate * threads as f64);
        let of_runs = |seconds: f64| {
            let repeats = (1..).find(|&repeats| self.enough(repeats, repeats as f64 * seconds));
            if seconds > limit { 0.0 } else { repeats.map_or(0.0, |n| n as f64 * seconds) }
        };
        self.lengths.iter().map(run).map(of_runs).sum()
    }

    /// Whether a measurement has been repeated often enough: for [`EfficiencyPlan::core_seconds`], and at least twice,
    /// because the first run also takes the memory; once if a run is so long that this hardly matters.
    fn enough(&self, repeats: usize, seconds: f64) -> bool {
        let long = 20.0 * self.core_seconds;
        repeats > 0 && (seconds >= long || repeats > 1 && seconds >= self.core_seconds || repeats >= 1000)
    }

    /// The best time of several runs, and their number.
    fn best(&self, mut run: impl FnMut() -> Result<()>) -> Result<(f64, usize)> {
        let (mut best, mut sum, mut repeats) = (f64::INFINITY, 0.0, 0);
        while !self.enough(repeats, sum) {
            let start = Instant::now();
            run()?;
            // A clock may be coarse; a time is never 0.
            let seconds = start.elapsed().as_secs_f64().max(1e-9);
            best = best.min(seconds);
            sum += seconds;
            repeats += 1;
        }
        Ok((best, repeats))
    }

    /// Rejects plans that cannot be measured.
    fn check(&self) -> Result<()> {
        let CoreShape {
            heads,
            head_dim_k,
            head_dim_v,
            routing_dim,
            interval,
            attention_heads,
            attention_head_dim,
        } = self.core;
        let ModelShape { layers, feed_forward, vocabulary, tokens_per_step } = self.model;
        let sizes = [
            ("heads", heads),
            ("head_dim_k", head_dim_k),
            ("head_dim_v", head_dim_v),
            ("routing_dim", routing_dim),
            ("interval", interval),
            ("attention_heads", attention_heads),
            ("attention_head_dim", attention_head_dim),
            ("layers", layers),
            ("feed_forward", feed_forward),
            ("vocabulary", vocabulary),
            ("tokens_per_step", tokens_per_step),
        ];
        let refuse = |message: String| Err(Error::Request(message));
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return refuse(format!("`{name}` of the measurement is 0; it must be at least 1"));
        }
        for (name, seconds) in [
            ("core_seconds", self.core_seconds),
            ("limit_seconds", self.limit_seconds),
            ("peer_limit_seconds", self.peer_limit_seconds),
        ] {
            if !(seconds.is_finite() && seconds >= 0.0) {
                return refuse(format!("`{name}` is {seconds}; it must be a number of at least 0"));
            }
        }
        if self.lengths.is_empty() {
            return refuse("no sequence length was given; give at least one, such as 1024".into());
        }
        if let Some(length) = self.lengths.iter().find(|&&t| t == 0 || t % CHUNK != 0 || t > LONGEST) {
            return refuse(format!(
                "a sequence length is {length}; it must be a multiple of {CHUNK}, from {CHUNK} to {LONGEST}"
            ));
        }
        if !self.lengths.is_sorted_by(|a, b| a < b) {
            return refuse(
                "the sequence lengths must ascend, since a time is predicted from the one before".into(),
            );
        }
        Ok(())
    }

    /// Operations of a run. They are those of the products: of attention three and a half times the forward pass,
    /// because its backward pass computes the weights again; else three times.
    fn flop(&self, arm: Arm, kind: Kind, length: usize) -> Result<f64> {
        if kind == Kind::EndToEnd {
            let config = self.model_config(arm)?;
            let model: Model<Cpu> = Model::new(&config);
            let forward = model.work(length, &config.policy().unwrap_or_default());
            return Ok(3.0 * forward * self.rows(length) as f64);
        }
        let CoreShape {
            heads, head_dim_k, head_dim_v, routing_dim, attention_heads, attention_head_dim, ..
        } = self.core;
        if arm == Arm::Attention {
            return Ok(7.0 * (length * attention_heads * attention_head_dim) as f64 * length as f64);
        }
        let (mut read, mut scored) = (0.0, 0.0);
        if arm.anchored() {
            for segment in &self.read_plan(length).1.segments {
                let seen = segment.visible.len();
                read += (segment.len * seen.min(arm.top_k().unwrap_or(seen))) as f64;
                // The backward pass of top-K needs no score of an anchor that was not chosen.
                scored += (segment.len * seen) as f64 * if arm == Arm::Dense { 3.0 } else { 1.0 };
            }
        }
        let state = (head_dim_k * head_dim_v) as f64;
        let recurrence = 18.0 * state * length as f64;
        Ok(heads as f64 * (recurrence + 6.0 * state * read + 2.0 * routing_dim as f64 * scored))
    }

    fn thread_count(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        }
    }

    /// Sequences of a training step.
    fn rows(&self, length: usize) -> usize {
        (self.model.tokens_per_step / length).max(1)
    }

    /// The boundaries of a sequence, and which anchors each token sees.
    fn read_plan(&self, length: usize) -> (Vec<usize>, ReadPlan) {
        let boundaries: Vec<usize> =
            (1..length.div_ceil(self.core.interval)).map(|m| m * self.core.interval).collect();
        let plan = ReadPlan::from_boundaries(length, std::slice::from_ref(&boundaries));
        (boundaries, plan)
    }
}

/// Random numbers; the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// A tensor of numbers between ±scale around a mean.
    fn tensor(&mut self, engine: &Cpu, shape: &[usize], mean: f32, scale: f32) -> Result<Tensor<f32>> {
        let count = shape.iter().product();
        let unit = |bits: u64| bits as f32 / (1u64 << 30) as f32 - 1.0;
        let data: Vec<f32> = (0..count).map(|_| mean + scale * unit(self.next())).collect();
        Ok(engine.from_f32(&data, shape)?)
    }
}

impl EfficiencyPlan {
    /// The time of an arm's operations, forward and backward, on one sequence.
    fn core_time(&self, engine: &Cpu, arm: Arm, length: usize) -> Result<(f64, usize)> {
        if arm == Arm::Attention {
            return self.attention_time(engine, length);
        }
        let core = &self.core;
        let (heads, random) = (core.heads, &mut Random(length as u64));
        let mut wide = |width: usize, mean: f32, scale: f32| {
            random.tensor(engine, &[1, length, heads * width], mean, scale)
        };
        let (query, key) = (wide(core.head_dim_k, 0.0, 1.0)?, wide(core.head_dim_k, 0.0, 1.0)?);
        let (value, gradient) = (wide(core.head_dim_v, 0.0, 1.0)?, wide(core.head_dim_v, 0.0, 1.0)?);
        let (retention_input, write_input) = (wide(1, 0.0, 0.5)?, wide(1, 0.0, 1.0)?);
        let (routing_query, null_score) = (wide(core.routing_dim, 0.0, 0.5)?, wide(1, 0.0, 1.0)?);
        // Decays as a new layer has them: α = exp(−4 · softplus(−4.6)) ≈ 0.96.
        let a_log = random.tensor(engine, &[heads], 1.4, 0.5)?;
        let dt_bias = random.tensor(engine, &[heads], -4.6, 0.5)?;
        let (boundaries, plan) = if arm.anchored() { self.read_plan(length) } else { Default::default() };
        let routing_keys = random.tensor(engine, &[boundaries.len(), heads * core.routing_dim], 0.0, 0.5)?;
        let input = GatedDelta {
            query: &query,
            key: &key,
            value: &value,
            retention_input: &retention_input,
            write_input: &write_input,
            a_log: &a_log,
            dt_bias: &dt_bias,
            initial_state: None,
        };
        let options = GatedDeltaOptions {
            key_heads: heads,
            value_heads: heads,
            allow_neg_eigval: false,
            boundaries: Arc::new(vec![boundaries]),
            final_state: false,
            chunk_offset: 0,
        };
        let read_options = AnchorReadOptions {
            key_heads: heads,
            value_heads: heads,
            top_k: arm.top_k(),
            routing_scale: 1.0,
            plan: Arc::new(plan),
        };
        self.best(|| {
            let (mut out, kept) = engine.gated_delta(input, &options, true)?;
            let upstream =
                GatedDeltaGradient { readout: Some(&gradient), final_state: None, boundary_states: None };
            if read_options.plan.segments.is_empty() {
                engine.gated_delta_backward(input, &options, &kept, upstream)?;
                return Ok(());
            }
            let read = AnchorRead {
                query: &query,
                routing_query: &routing_query,
                routing_keys: &routing_keys,
                anchor_states: &out.boundary_states,
                null_score: Some(&null_score),
            };
            let (history, read_kept) = engine.anchor_read(read, &read_options, true)?;
            engine.accumulate(&mut out.readout, &history)?;
            let d_read =
                engine.anchor_read_backward(read, &read_options, &history, read_kept.as_ref(), &gradient)?;
            drop((history, read_kept));
            let upstream = GatedDeltaGradient { boundary_states: Some(&d_read.anchor_states), ..upstream };
            let mut d = engine.gated_delta_backward(input, &options, &kept, upstream)?;
            engine.accumulate(&mut d.query, &d_read.query)?;
            Ok(())
        })
    }

    fn attention_time(&self, engine: &Cpu, length: usize) -> Result<(f64, usize)> {
        let (heads, random) = (self.core.attention_heads, &mut Random(length as u64));
        let mut wide = || random.tensor(engine, &[1, length, heads * self.core.attention_head_dim], 0.0, 1.0);
        let (query, key, value, gradient) = (wide()?, wide()?, wide()?, wide()?);
        let input = Attention { query: &query, key: &key, value: &value };
        self.best(|| {
            let (_, saved) = engine.attention(input, heads, true)?;
            engine.attention_backward(input, heads, &saved, &gradient)?;
            Ok(())
        })
    }

    /// The time of a training step.
    fn step_time(&self, engine: &Cpu, arm: Arm, length: usize) -> Result<(f64, usize)> {
        let rows = self.rows(length);
        let random = &mut Random(length as u64);
        let tokens =
            (0..=rows * length).map(|_| (random.next() % self.model.vocabulary as u64) as u32).collect();
        let mut loader = Loader::new(Box::new(TextSource::new(tokens, length)?), None)?;
        let model: Model<Cpu> = Model::new(&self.model_config(arm)?);
        let parameters = model.init(engine, 1)?;
        let settings = Settings { policy: model.policy(), recompute: false };
        let config = TrainConfig {
            tokens_per_step: rows * length,
            micro_batch: rows,
            learning_rate: 1e-4,
            schedule: Schedule::Constant,
            warmup: 0.0,
            ..TrainConfig::default()
        };
        let mut trainer = Trainer::new(engine, model, parameters, settings, config, length)?;
        // Recomputes activations where the memory is short.
        trainer.plan_memory(engine, machine_memory().map(|[_, available]| available))?;
        engine.trim();
        self.best(|| trainer.advance(&mut loader).map(drop))
    }

    /// The model of an arm.
    fn model_config(&self, arm: Arm) -> Result<ModelConfig> {
        let core = &self.core;
        let mut keys = serde_json::json!({
            "vocab_size": self.model.vocabulary,
            "hidden_size": core.attention_heads * core.attention_head_dim,
            "num_hidden_layers": self.model.layers,
            "intermediate_size": self.model.feed_forward,
            "norm_eps": 1e-6,
            "tie_word_embeddings": false,
            "initializer_range": 0.02,
        });
        let own = if arm == Arm::Attention {
            serde_json::json!({
                "model_type": "transformer",
                "num_heads": core.attention_heads,
                "rope_theta": 500_000.0,
            })
        } else {
            serde_json::json!({
                "model_type": if arm == Arm::Gdn { "gated_deltanet" } else { "march" },
                "num_heads": core.heads,
                "head_dim": core.head_dim_k,
                "expand_v": core.head_dim_v as f64 / core.head_dim_k as f64,
                "conv_size": 4,
            })
        };
        let routing = serde_json::json!({
            "anchor_interval": core.interval,
            "routing_dim": core.routing_dim,
            "routing_top_k": arm.top_k(),
        });
        for more in [Some(own), arm.anchored().then_some(routing)].into_iter().flatten() {
            if let (Some(keys), Some(more)) = (keys.as_object_mut(), more.as_object()) {
                keys.extend(more.clone());
            }
        }
        ModelConfig::from_json(&keys.to_string(), arm.name())
    }
}

/// The measurement in PyTorch; also a program of its own.
const PEER_SCRIPT: &str = include_str!("../../../../bench/peers/efficiency.py");

/// One line of what the script prints.
#[derive(Deserialize)]
struct PeerLine {
    /// "attention" or "GDN".
    arm: String,
    length: usize,
    seconds: f64,
    repeats: usize,
}

/// The Python that has PyTorch: the one that the environment variable PEERS_PYTHON names, or `python3`.
pub fn find_python() -> Option<String> {
    let named = std::env::var("PEERS_PYTHON").ok().filter(|name| !name.is_empty());
    let python = named.unwrap_or_else(|| "python3".into());
    let mut probe = Command::new(&python);
    probe.args(["-c", "import torch"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    probe.status().is_ok_and(|status| status.success()).then_some(python)
}

/// Measures the core of attention and of GDN in PyTorch, as "PyTorch attention" and "PyTorch GDN". `None` if no Python
/// with PyTorch was found ([`find_python`]). When `watch` breaks, the result holds what was measured until then.
pub fn peers(
    plan: &EfficiencyPlan,
    watch: &mut dyn FnMut(&Timing) -> ControlFlow<()>,
) -> Result<Option<Vec<Timing>>> {
    plan.check()?;
    match find_python() {
        Some(python) => Ok(Some(plan.peers_with(&python, PEER_SCRIPT, watch)?)),
        None => Ok(None),
    }
}

impl EfficiencyPlan {
    /// Runs the script with a Python, and reads its lines as they come.
    fn peers_with(
        &self,
        python: &str,
        script: &str,
        watch: &mut dyn FnMut(&Timing) -> ControlFlow<()>,
    ) -> Result<Vec<Timing>> {
        let io = |action| Error::io(python.as_ref(), action);
        let mut command = Command::new(python);
        command.args(["-W", "ignore", "-"]).args(self.peer_arguments());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(io("start"))?;
        if let Some(mut input) = child.stdin.take() {
            // If the program ended before it had read all, its exit status says so.
            let _ = input.write_all(script.as_bytes());
        }
        // Read meanwhile, so that a full pipe cannot stop the program.
        let errors = child.stderr.take().map(|mut errors| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                errors.read_to_end(&mut text).map(|_| text)
            })
        });
        let mut all = Vec::new();
        let mut outcome = Ok(ControlFlow::Continue(()));
        if let Some(output) = child.stdout.take() {
            for line in BufReader::new(output).lines() {
                outcome =
                    line.map_err(io("read from")).and_then(|line| self.peer_timing(&line)).map(|timing| {
                        let flow = watch(&timing);
                        all.push(timing);
                        flow
                    });
                if !matches!(outcome, Ok(ControlFlow::Continue(()))) {
                    // It may have ended by itself meanwhile.
                    let _ = child.kill();
                    break;
                }
            }
        }
        let status = child.wait().map_err(io("wait for"))?;
        if outcome?.is_continue() && !status.success() {
            let said = errors.and_then(|errors| errors.join().ok()?.ok()).unwrap_or_default();
            let said = String::from_utf8_lossy(&said);
            let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
            return Err(Error::Request(format!(
                "{python}: the measurement in PyTorch failed ({status}): {last}"
            )));
        }
        Ok(all)
    }

    fn peer_arguments(&self) -> Vec<String> {
        let core = &self.core;
        let lengths: Vec<String> = self.lengths.iter().map(usize::to_string).collect();
        let mut arguments = Vec::new();
        for (name, value) in [
            ("lengths", lengths.join(",")),
            ("heads", core.heads.to_string()),
            ("head-dim-k", core.head_dim_k.to_string()),
            ("head-dim-v", core.head_dim_v.to_string()),
            ("attention-heads", core.attention_heads.to_string()),
            ("attention-head-dim", core.attention_head_dim.to_string()),
            ("seconds", self.core_seconds.to_string()),
            ("limit", self.peer_limit_seconds.to_string()),
            ("threads", self.thread_count().to_string()),
        ] {
            arguments.extend([format!("--{name}"), value]);
        }
        arguments
    }

    /// A line of the script's output.
    fn peer_timing(&self, line: &str) -> Result<Timing> {
        let refuse =
            |why: String| Error::Request(format!("the measurement in PyTorch printed {line:?}: {why}"));
        let PeerLine { arm, length, seconds, repeats } =
            serde_json::from_str(line).map_err(|error| refuse(error.to_string()))?;
        let arm = Arm::ALL.into_iter().find(|known| known.name() == arm);
        let arm = arm.ok_or_else(|| refuse("that arm is unknown".into()))?;
        if !(seconds.is_finite() && seconds > 0.0) {
            return Err(refuse("a time must be a number above 0".into()));
        }
        let flop = self.flop(arm, Kind::Core, length)?;
        Ok(Timing::new(&peer_name(arm), Kind::Core, [length, length], flop, (seconds, repeats)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> EfficiencyPlan {
        EfficiencyPlan { lengths: vec![128, 256], core_seconds: 0.0, threads: 1, ..EfficiencyPlan::quick() }
    }

    #[test]
    fn a_quick_plan_measures_every_arm() {
        let plan = tiny();
        let mut watched = Vec::new();
        let mut watch = |timing: &Timing| {
            watched.push(timing.clone());
            ControlFlow::Continue(())
        };
        let all = plan.run(&mut watch).unwrap();
        assert_eq!(all, watched);
        let found: Vec<_> = all.iter().map(|t| (t.length, t.kind, t.arm.as_str())).collect();
        let mut expected = Vec::new();
        for length in [128, 256] {
            for kind in [Kind::Core, Kind::EndToEnd] {
                expected.extend(Arm::ALL.map(|arm| (length, kind, arm.name())));
            }
        }
        assert_eq!(found, expected);
        for timing in &all {
            let numbers = [timing.seconds, timing.tokens_per_second, timing.flop];
            assert!(numbers.iter().all(|n| n.is_finite() && *n > 0.0) && !timing.is_skipped(), "{timing:?}");
        }
        let text = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Timing>>(&text).unwrap(), all);
        assert!(plan.estimate_seconds() > 0.0 && plan.estimate_peer_seconds() > 0.0);
    }

    #[test]
    fn what_would_take_too_long_is_skipped() {
        let plan = EfficiencyPlan { limit_seconds: 0.0, ..tiny() };
        let all = plan.run(&mut |_| ControlFlow::Continue(())).unwrap();
        for timing in &all {
            // The first length is measured: nothing predicts it.
            assert_eq!(timing.is_skipped(), timing.length > 128, "{timing:?}");
            assert!(timing.seconds > 0.0);
        }
        let core = |length| all.iter().find(|t| t.length == length && t.kind == Kind::Core).unwrap();
        let ratio = core(256).seconds / core(128).seconds;
        assert!((ratio - 4.0).abs() < 1e-9, "attention is quadratic, not {ratio}");
    }

    #[test]
    fn breaking_keeps_what_was_measured() {
        let plan = EfficiencyPlan { arms: vec![Arm::TopFour, Arm::Gdn], end_to_end: false, ..tiny() };
        let all = plan
            .run(&mut |t| if t.arm == "GDN" { ControlFlow::Break(()) } else { ControlFlow::Continue(()) });
        let arms: Vec<_> = all.unwrap().into_iter().map(|t| t.arm).collect();
        assert_eq!(arms, ["MARCH top-4", "GDN"]);
    }

    #[test]
    fn plans_that_cannot_be_measured_are_refused() {
        let refused = |plan: EfficiencyPlan| {
            plan.run(&mut |_| ControlFlow::Continue(())).map(drop).unwrap_err().to_string()
        };
        assert!(refused(EfficiencyPlan { lengths: vec![], ..tiny() }).contains("no sequence length"));
        assert!(refused(EfficiencyPlan { lengths: vec![100], ..tiny() }).contains("multiple of 64"));
        assert!(refused(EfficiencyPlan { lengths: vec![128, 64], ..tiny() }).contains("ascend"));
        assert!(refused(EfficiencyPlan { limit_seconds: f64::NAN, ..tiny() }).contains("limit_seconds"));
        let core = CoreShape { interval: 0, ..tiny().core };
        assert!(refused(EfficiencyPlan { core, ..tiny() }).contains("`interval`"));
    }

    #[test]
    fn lines_of_the_peers_are_read() {
        let plan = tiny();
        let timing =
            plan.peer_timing(r#"{"arm": "GDN", "length": 128, "seconds": 0.5, "repeats": 3}"#).unwrap();
        assert_eq!((timing.arm.as_str(), timing.kind, timing.repeats), ("PyTorch GDN", Kind::Core, 3));
        assert_eq!(timing.tokens_per_second, 256.0);
        assert_eq!(timing.flop, plan.flop(Arm::Gdn, Kind::Core, 128).unwrap());
        for line in [
            "Traceback (most recent call last):",
            r#"{"arm": "RNN", "length": 128, "seconds": 0.5, "repeats": 3}"#,
            r#"{"arm": "GDN", "length": 128, "seconds": 0, "repeats": 3}"#,
        ] {
            assert!(plan.peer_timing(line).unwrap_err().to_string().contains("PyTorch printed"), "{line}");
        }
    }

    /// The shell stands in for Python: it ignores the arguments after `-s` and runs what it reads.
    #[cfg(unix)]
    #[test]
    fn a_peer_that_fails_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let python = folder.path().join("python");
        std::fs::write(&python, "#!/bin/sh\nexec sh -s\n").unwrap();
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&python, permissions).unwrap();
        let python = python.to_str().unwrap();
        let line =
            |arm: &str| format!(r#"echo '{{"arm": "{arm}", "length": 128, "seconds": 1, "repeats": 1}}'"#);
        let script = format!("{}\n{}\n", line("attention"), line("GDN"));
        let go = &mut |_: &Timing| ControlFlow::Continue(());
        let arms = |all: Vec<Timing>| all.into_iter().map(|t| t.arm).collect::<Vec<_>>();
        let all = tiny().peers_with(python, &script, go).unwrap();
        assert_eq!(arms(all), ["PyTorch attention", "PyTorch GDN"]);
        let all = tiny().peers_with(python, &script, &mut |_| ControlFlow::Break(())).unwrap();
        assert_eq!(arms(all), ["PyTorch attention"]);
        let error =
            tiny().peers_with(python, "echo 'out of memory' >&2; exit 3", go).unwrap_err().to_string();
        assert!(error.contains("out of memory") && error.contains('3'), "{error}");
    }
}

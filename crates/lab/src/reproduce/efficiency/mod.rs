//! The paper's figure "Training efficiency": how the cost of training grows with the length of the sequence.
//!
//! Two kinds of measurement, at lengths from 1K to 128K tokens, for attention, Gated DeltaNet (GDN), MARCH that reads
//! all anchors and MARCH that reads the best four:
//!
//! - [`Kind::Core`]: the operation that mixes along the sequence, forward and backward, on random inputs of one
//!   sequence. For MARCH that is the gated delta rule with its boundary states, the anchor reader, and the sum of both.
//! - [`Kind::EndToEnd`]: steps of [`Trainer`](march_lm::train::Trainer) on random tokens: forward, backward and update.
//!
//! At the paper's width a training step at 128K tokens does not fit into the memory and the patience that two cores
//! have. [`Kind::OneLayer`] and [`Kind::TwoLayers`] are steps of short sequences, from which [`composed`] computes the
//! time of a step of all layers at any length whose core was measured.
//!
//! All arms are measured at one length before the next length begins, so that what else the machine does affects all
//! arms alike. [`peers`] measures the core of attention and of GDN in PyTorch at the same shapes.
//!
//! What was scaled down in [`EfficiencyPlan::laptop`]: the paper's models are 1536 wide (attention of 16 heads × 96;
//! GDN of 6 heads with d_k 192 and d_v 384), which would take hours at 128K tokens on two cores. The plan's width D is
//! 128 with the paper's proportions: GDN has d_k 0.75 D and d_v 1.5 D over all heads, here two. The interval of 512
//! tokens is the paper's, and so is the number of anchors at every length. States shrink with D² but attention's keys
//! and values with D, so that attention costs more, in proportion, than in the paper; [`EfficiencyPlan::paper_shapes`]
//! has the paper's own shapes.

mod peers;
mod timings;

use std::ops::ControlFlow;
use std::time::Instant;

use march_engine::ops::anchor_read::ReadPlan;
use march_engine::{CpuOptions, Device};
use serde::{Deserialize, Serialize};

pub use self::peers::{find_python, peers};
use march_lm::model::Model;
use march_lm::{Error, Result};

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
    /// Tokens of the sequence of [`Kind::OneLayer`] and [`Kind::TwoLayers`]; 0 measures neither.
    pub layer_tokens: usize,
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
    /// A training step of a model with one layer.
    OneLayer,
    /// A training step of a model with two layers.
    TwoLayers,
}

impl Kind {
    /// Number of layers of a model with `all` of them; `None` for the operation alone.
    fn layers(self, all: usize) -> Option<usize> {
        match self {
            Self::Core => None,
            Self::EndToEnd => Some(all),
            Self::OneLayer => Some(1),
            Self::TwoLayers => Some(2),
        }
    }
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

impl EfficiencyPlan {
    /// Tiny shapes and lengths, to see that everything runs: about a second.
    pub fn quick() -> Self {
        let laptop = Self::laptop();
        Self {
            lengths: vec![256, 512, 1024],
            core_seconds: 0.01,
            core: CoreShape {
                head_dim_k: 16,
                head_dim_v: 32,
                routing_dim: 16,
                interval: 64,
                attention_head_dim: 16,
                ..laptop.core
            },
            model: ModelShape { feed_forward: 96, tokens_per_step: 1024, ..laptop.model },
            limit_seconds: 30.0,
            peer_limit_seconds: 30.0,
            ..laptop
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
            layer_tokens: 0,
            model: ModelShape { layers: 2, feed_forward: 352, vocabulary: 256, tokens_per_step: 16_384 },
            limit_seconds: 400.0,
            peer_limit_seconds: 90.0,
            threads: 0,
        }
    }

    /// The core at the paper's shapes up to 128K tokens, and steps of one and of two layers of the paper's models, from
    /// which [`composed`] computes steps of all 21. Nothing is skipped: the core of attention at 128K tokens takes a
    /// quarter of an hour or more on two cores.
    pub fn paper_shapes() -> Self {
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
            layer_tokens: 4096,
            model: ModelShape { layers: 21, feed_forward: 4096, vocabulary: 32_000, tokens_per_step: 4096 },
            limit_seconds: f64::MAX,
            ..Self::laptop()
        }
    }

    /// What `march reproduce efficiency --size paper-shapes` measures, in tiny.
    pub fn quick_shapes() -> Self {
        let quick = Self::quick();
        Self { end_to_end: false, layer_tokens: 256, limit_seconds: f64::MAX, ..quick }
    }

    /// Measures all arms at all lengths, but for what is `known` from a run that was stopped; those come first in the
    /// result. `watch` is called after each measurement; when it breaks, the result holds what was measured until then.
    pub fn run(
        &self,
        known: Vec<Timing>,
        watch: &mut dyn FnMut(&Timing) -> ControlFlow<()>,
    ) -> Result<Vec<Timing>> {
        self.check()?;
        let device = Device::cpu(CpuOptions { threads: self.threads, ..Default::default() })?;
        let mut all = known;
        for (arm, kind, length) in self.measurements() {
            let same =
                |timing: &&Timing| timing.arm == arm.name() && (timing.kind, timing.length) == (kind, length);
            if all.iter().any(|timing| same(&timing)) {
                continue;
            }
            let timing = self.measure(&device, arm, kind, length, &all)?;
            // Buffers of this length are of no use to the next arm.
            device.trim();
            let flow = watch(&timing);
            all.push(timing);
            if flow.is_break() {
                return Ok(all);
            }
        }
        Ok(all)
    }

    /// What is measured, in order.
    fn measurements(&self) -> Vec<(Arm, Kind, usize)> {
        let mut all = Vec::new();
        let mut add = |kind, length| all.extend(self.arms.iter().map(|&arm| (arm, kind, length)));
        if self.layer_tokens > 0 {
            add(Kind::OneLayer, self.layer_tokens);
            add(Kind::TwoLayers, self.layer_tokens);
        }
        for &length in &self.lengths {
            add(Kind::Core, length);
            if self.end_to_end {
                add(Kind::EndToEnd, length);
            }
        }
        all
    }

    /// One measurement, or its prediction from those `before` where that exceeds the limit.
    fn measure(
        &self,
        device: &Device,
        arm: Arm,
        kind: Kind,
        length: usize,
        before: &[Timing],
    ) -> Result<Timing> {
        let flop = self.flop(arm, kind, length)?;
        let last = before.iter().rev().find(|timing| timing.arm == arm.name() && timing.kind == kind);
        let predicted = last.map_or(0.0, |last| last.seconds / last.flop * flop);
        let rows = kind.layers(1).map_or(1, |_| self.rows(length));
        let found = match kind.layers(self.model.layers) {
            _ if predicted > self.limit_seconds => (predicted, 0),
            None => self.core_time(device, arm, length)?,
            Some(layers) => self.step_time(device, arm, layers, length)?,
        };
        Ok(Timing::new(arm.name(), kind, [length, rows * length], flop, found))
    }

    /// Seconds that [`EfficiencyPlan::run`] takes, from the work and the speed of an ordinary machine.
    pub fn estimate_seconds(&self) -> f64 {
        let time = |(arm, kind, length): (Arm, Kind, usize)| {
            let rate = match (arm, kind) {
                (_, Kind::OneLayer | Kind::TwoLayers) => RATES[2],
                (Arm::Attention, _) => RATES[0],
                (_, Kind::Core) => RATES[1],
                (_, Kind::EndToEnd) => RATES[2],
            };
            self.estimate(arm, kind, length, rate, self.limit_seconds)
        };
        self.measurements().into_iter().map(time).sum()
    }

    /// Seconds that [`peers`] takes, in the same way.
    pub fn estimate_peer_seconds(&self) -> f64 {
        let peers = [(Arm::Attention, RATES[0]), (Arm::Gdn, RATES[3])];
        let all = peers.iter().flat_map(|&peer| self.lengths.iter().map(move |&length| (peer, length)));
        let limit = self.peer_limit_seconds;
        all.map(|((arm, rate), length)| self.estimate(arm, Kind::Core, length, rate, limit)).sum()
    }

    fn estimate(&self, arm: Arm, kind: Kind, length: usize, rate: f64, limit: f64) -> f64 {
        let flop = self.flop(arm, kind, length).unwrap_or(0.0);
        let seconds = flop / (rate * self.thread_count() as f64);
        let repeats = (1..).find(|&repeats| self.enough(repeats, repeats as f64 * seconds));
        if seconds > limit { 0.0 } else { repeats.map_or(0.0, |n| n as f64 * seconds) }
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
        let (core, model) = (&self.core, &self.model);
        let sizes = [
            ("heads", core.heads),
            ("head_dim_k", core.head_dim_k),
            ("head_dim_v", core.head_dim_v),
            ("routing_dim", core.routing_dim),
            ("interval", core.interval),
            ("attention_heads", core.attention_heads),
            ("attention_head_dim", core.attention_head_dim),
            ("layers", model.layers),
            ("feed_forward", model.feed_forward),
            ("vocabulary", model.vocabulary),
            ("tokens_per_step", model.tokens_per_step),
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
    pub fn flop(&self, arm: Arm, kind: Kind, length: usize) -> Result<f64> {
        if let Some(layers) = kind.layers(self.model.layers) {
            let config = self.model_config(arm, layers)?;
            let model = Model::new(&config);
            let forward = model.work(length, &config.policy().unwrap_or_default());
            return Ok(3.0 * forward * self.rows(length) as f64);
        }
        let core = &self.core;
        if arm == Arm::Attention {
            return Ok(7.0
                * (length * core.attention_heads * core.attention_head_dim) as f64
                * length as f64);
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
        let state = (core.head_dim_k * core.head_dim_v) as f64;
        let recurrence = 18.0 * state * length as f64;
        Ok(core.heads as f64 * (recurrence + 6.0 * state * read + 2.0 * core.routing_dim as f64 * scored))
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

/// Seconds per token of a training step of the paper's 21 layers at a length whose core was measured, computed from
/// that core and from steps of one and of two layers; `None` if one of them was not measured.
///
/// ```text
/// layer = two layers − one layer;   outside = one layer − layer        per token, both at layer_tokens
/// step(T) = outside + layers · (layer − core(layer_tokens) + core(T))
/// ```
/// All but the core costs the same for each token at any length.
pub fn composed(timings: &[Timing], arm: &str, length: usize) -> Option<f64> {
    let layers = EfficiencyPlan::paper_shapes().model.layers as f64;
    let of = |kind: Kind, length: Option<usize>| {
        let mut own = timings.iter().filter(|timing| timing.arm == arm && timing.kind == kind);
        own.find(|timing| length.is_none_or(|length| timing.length == length) && !timing.is_skipped())
    };
    let per_token = |timing: &Timing| 1.0 / timing.tokens_per_second;
    let (one, two) = (of(Kind::OneLayer, None)?, of(Kind::TwoLayers, None)?);
    let layer = per_token(two) - per_token(one);
    let outside = per_token(one) - layer;
    let short = per_token(of(Kind::Core, Some(one.length))?);
    let core = per_token(of(Kind::Core, Some(length))?);
    Some(outside + layers * (layer - short + core))
}

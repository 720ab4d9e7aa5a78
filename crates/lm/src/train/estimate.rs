//! Estimates of the memory and the work of a training step.

use march_engine::{Cpu, CpuOptions, Device, Tape, Tensor};

use super::{Only, Trainer, trained};
use crate::error::Result;
use crate::model::{Batch, Model, ModelConfig, Settings};

/// The machine's memory and the memory available to a program, in bytes; `None` if unknown.
pub fn machine_memory() -> Option<[usize; 2]> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<usize>().ok().map(|kib| kib * 1024)
    };
    Some([field("MemTotal:")?, field("MemAvailable:")?])
}

/// Bytes of a model's weights, and of the gradients and both moments of those that are trained.
pub fn training_bytes(model: &Model, only: Only) -> usize {
    let specs = model.layout().iter().zip(trained(model, only));
    let numbers: usize = specs.map(|(spec, trained)| spec.count() * if trained { 4 } else { 1 }).sum();
    size_of::<f32>() * numbers
}

/// The memory that a step takes in bytes, estimated before the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepMemory {
    /// Weights; gradients and both moments of those that are trained; with several processes also the buffers that these
    /// gradients are sent from and received in.
    pub parameters: usize,
    /// What the backward pass needs for the tokens of one call.
    pub activations: usize,
    /// What the backward pass needs for these tokens with activation recomputation.
    pub recomputed: usize,
}

impl StepMemory {
    /// Runs the model forward on a short text with a few of its layers, and scales what it keeps to all layers of a
    /// single process that computes one sequence at a time. This happens on a device of its own, with as many threads as
    /// `cpu`, so that its buffers are returned to the system.
    pub fn measure(
        cpu: &Device,
        config: &ModelConfig,
        settings: &Settings,
        sequence_length: usize,
        only: Only,
    ) -> Result<Self> {
        let threads = cpu.backend::<Cpu>().map_or(0, Cpu::threads);
        let cpu = &Device::cpu(CpuOptions { threads, ..CpuOptions::default() })?;
        // Long enough for several anchors, unless they are far apart and therefore few.
        let short = sequence_length.min((4 * settings.policy.interval.unwrap_or(0)).clamp(512, 1024));
        let layers = config.num_hidden_layers;
        let kept = |layers: usize, recompute: bool| -> Result<usize> {
            let config = ModelConfig { num_hidden_layers: layers, ..config.clone() };
            let model = Model::new(&config);
            let zeros = model.layout().iter().map(|spec| Ok(Tensor::full(&spec.shape, 0.0, cpu)?));
            let parameters = zeros.collect::<Result<Vec<_>>>()?;
            let settings = Settings { recompute, ..settings.clone() };
            let before = cpu.live_bytes();
            let tape = Tape::new();
            let weights = model.bind_some(&tape, &parameters, &trained(&model, only));
            let _hidden = model.forward(&weights, Batch::one(&vec![0; short]), &settings, None)?;
            Ok(cpu.live_bytes().saturating_sub(before))
        };
        // The first and the last layer differ from those in between; in a stack of several mixers, a pattern repeats.
        let period = config.mixer.period();
        let few = period.max(2);
        let all = |recompute: bool| -> Result<usize> {
            let bytes = if layers <= few + period {
                kept(layers, recompute)?
            } else {
                let (some, more) = (kept(few, recompute)?, kept(few + period, recompute)?);
                some + (layers - few) * more.saturating_sub(some) / period
            };
            Ok((bytes as f64 / short as f64 * sequence_length as f64) as usize)
        };
        let whole = all(false)?;
        Ok(Self {
            parameters: training_bytes(&Model::new(config), only),
            // The gradients of one block are added.
            activations: whole + whole / layers,
            recomputed: all(true)? + 2 * whole / layers,
        })
    }

    /// The memory of a step with `rows` sequences at a time, in each of `processes` processes.
    pub fn of(self, rows: usize, processes: usize) -> Self {
        let Self { parameters, activations, recomputed } = self;
        Self {
            parameters: if processes > 1 { parameters / 4 * 6 } else { parameters },
            activations: activations.saturating_mul(rows),
            recomputed: recomputed.saturating_mul(rows),
        }
    }
}

/// How a trainer uses the machine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The memory that a step of this process takes.
    pub step: StepMemory,
    /// Bytes available to the device; `None` if unknown.
    pub available: Option<usize>,
    /// Whether blocks are recomputed in the backward pass.
    pub recompute: bool,
}

impl Trainer {
    /// Estimates the memory of a step by measuring on a processor like `cpu`, unless it was `measured` before, and turns recomputation on or off according to `recompute`
    /// in `[train]` and the bytes that are available to the trainer's device, if known. This is where `auto` is
    /// resolved; until then recomputation is off. Call it before the first step.
    pub fn plan_memory(
        &mut self,
        cpu: &Device,
        measured: Option<StepMemory>,
        available: Option<usize>,
    ) -> Result<MemoryPlan> {
        let (length, only) = (self.config.tokens_per_step / self.rows, self.config.only);
        let measure = || StepMemory::measure(cpu, self.model.config(), &self.settings, length, only);
        let measured = measured.map_or_else(measure, Ok)?;
        let step = measured.of(self.rows_at_once(), self.rank().1);
        let recompute = self.config.recompute.resolve(step.parameters + step.activations, available);
        self.settings.recompute = recompute;
        Ok(MemoryPlan { step, available, recompute })
    }
}

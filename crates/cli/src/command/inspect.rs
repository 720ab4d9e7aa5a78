//! `march inspect`: the parts of a model and what it does with a text, or the contents of a state bank.

use std::path::Path;

use anyhow::bail;
use clap::{Args, Subcommand};
use march_lm::Config;
use march_lm::anchors::{Placement, Policy};
use march_lm::checkpoint::{Checkpoint, is_gguf};
use march_lm::model::{Model, ModelConfig, ParameterSpec};

use super::inspect_bank::InspectBank;
use super::inspect_policies::InspectPolicies;
use super::inspect_precision::InspectPrecision;
use super::inspect_routing::InspectRouting;
use super::inspect_training::InspectTraining;
use super::open::newest;
use super::policy::PolicyArgs;
use crate::display::out::say;
use crate::display::{bytes, thousands};

/// Inspect a model, or the file of a state bank.
#[derive(Args)]
pub struct Inspect {
    #[command(subcommand)]
    command: InspectCommand,
}

#[derive(Subcommand)]
enum InspectCommand {
    Bank(InspectBank),
    Model(InspectModel),
    Routing(InspectRouting),
    Training(InspectTraining),
    Precision(InspectPrecision),
    Policies(InspectPolicies),
}

/// Parameters by part, and the memory that decoding keeps, compared with a Transformer's cache.
#[derive(Args)]
#[command(after_help = "Examples:
  march inspect model paper/march
  march inspect model models/tiny-march --interval 128 --retention fenwick
  march inspect model --list")]
struct InspectModel {
    /// The name of a preset, a TOML file, a checkpoint folder, or the folder of a run, whose newest checkpoint is used
    #[arg(value_name = "PRESET|FILE|DIR", required_unless_present = "list")]
    model: Option<String>,
    /// List the presets instead
    #[arg(long, conflicts_with = "model")]
    list: bool,
    #[command(flatten)]
    policy: PolicyArgs,
}

impl Inspect {
    /// Runs the subcommand.
    pub fn run(self) -> anyhow::Result<()> {
        match self.command {
            InspectCommand::Bank(bank) => bank.run(),
            InspectCommand::Model(InspectModel { list: true, .. }) => list(),
            InspectCommand::Model(InspectModel { model: Some(model), policy, .. }) => {
                inspect(&model, &policy)
            }
            InspectCommand::Routing(routing) => routing.run(),
            InspectCommand::Training(training) => training.run(),
            InspectCommand::Precision(precision) => precision.run(),
            InspectCommand::Policies(policies) => policies.run(),
            InspectCommand::Model(_) => bail!("name a preset, a TOML file or a checkpoint folder"),
        }
    }
}

/// Lists the presets with their sizes.
fn list() -> anyhow::Result<()> {
    for name in Config::presets() {
        let config = Config::load(name)?.model;
        let count = Model::new(&config).parameter_count();
        say!("{name:<28} {:>12} parameters  {}", thousands(count), config.mixer.model_type());
    }
    Ok(())
}

fn inspect(name: &str, policy: &PolicyArgs) -> anyhow::Result<()> {
    let config = read(name)?;
    let model = Model::new(&config);
    let policy = policy.over(model.policy());
    model.check_policy(&policy)?;
    let count = model.parameter_count();
    say!("{name}: {}", config.mixer.model_type());
    say!("  layers {}, width {}", config.num_hidden_layers, config.hidden_size);
    say!("\n{:<28} {:>15}", "parameters", "");
    for (part, count) in parts(model.layout()) {
        say!("  {part:<26} {:>15}", thousands(count));
    }
    say!("  {:<26} {:>15}   {} as f32", "total", thousands(count), bytes(4 * count));
    let lengths = [4 * 1024, 16 * 1024, 128 * 1024];
    let precision = format!("memory of one text ({})", policy.storage);
    let row = |label: String, cells: [String; 3]| {
        say!("{label:<28}{}", cells.map(|cell| format!(" {cell:>15}")).concat());
    };
    let line = |label: &str, cells: [String; 3]| row(format!("  {label}"), cells);
    say!();
    row(precision, lengths.map(|n| format!("{} tokens", thousands(n))));
    line("this model", lengths.map(|n| bytes(model.memory_bytes(n, &policy))));
    if policy.interval.is_some() {
        line("of it only for rollback", lengths.map(|n| bytes(model.rollback_bytes(n, &policy))));
    }
    let cache = |n: usize| 2 * 4 * config.num_hidden_layers * config.hidden_size * n;
    line("a Transformer's cache", lengths.map(|n| bytes(cache(n))));
    line("share of that", lengths.map(|n| share(model.memory_bytes(n, &policy), cache(n))));
    if let Some(interval) = policy.interval {
        line("anchors", lengths.map(|n| thousands(policy.kept_after(n, model.anchor_bytes(&policy)))));
        let routing = policy.top_k.map_or("dense".into(), |k| format!("top-{k}"));
        let Policy { retention, placement, .. } = policy;
        let every = match placement {
            Placement::Periodic => format!("one anchor every {interval} tokens"),
            Placement::Adaptive(min) => {
                format!("about one anchor every {interval} tokens, {min} apart or more")
            }
        };
        say!("\n  {every}, {routing} routing, retention {retention}");
    }
    say!("  a Transformer's cache: keys and values of as many layers of the same width");
    Ok(())
}

fn share(part: usize, whole: usize) -> String {
    format!("{:.2} %", 100.0 * part as f64 / whole as f64)
}

/// Reads the model of a preset, a TOML file or a checkpoint.
fn read(name: &str) -> anyhow::Result<ModelConfig> {
    let path = Path::new(name);
    if (path.is_dir() || is_gguf(path)) && !Config::presets().any(|preset| preset == name) {
        // Rejects the same checkpoints as loading does.
        let checkpoint = Checkpoint::open(&newest(path))?;
        let config = checkpoint.config().clone();
        checkpoint.check(Model::new(&config).layout())?;
        checkpoint.verify()?;
        return Ok(config);
    }
    Ok(Config::load(name)?.model)
}

/// The parameters by part, in the order of the computation.
fn parts(layout: &[ParameterSpec]) -> Vec<(&'static str, usize)> {
    let mut parts: Vec<(&'static str, usize)> = Vec::new();
    for spec in layout {
        let name = spec.name.as_str();
        let part = match name {
            "model.embeddings.weight" => "embeddings",
            "model.anchor_embedding" => "anchor embedding",
            "lm_head.weight" => "head",
            _ if name.contains(".mlp.") => "feed-forward",
            _ if name.contains(".attn.routing_") || name.contains(".attn.null_proj") => "routing",
            _ if name.contains(".attn.l_proj") || name.ends_with(".attn.L") => "level weights",
            _ if name.contains(".attn.") => "mixers",
            _ => "norms",
        };
        match parts.iter_mut().find(|(known, _)| *known == part) {
            Some((_, count)) => *count += spec.count(),
            None => parts.push((part, spec.count())),
        }
    }
    parts
}

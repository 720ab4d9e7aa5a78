//! `march reproduce efficiency`: training speed by length of the text, and the same in PyTorch if it is there.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use march_lab::report::efficiency::{page, verdict};
use march_lab::reproduce::PaperExperiment;
use march_lab::reproduce::efficiency::{EfficiencyPlan, Kind, Timing, find_python, peers};
use serde::{Deserialize, Serialize};

use super::reproduce::{facts, print_table, write};
use crate::display::lines::duration;
use crate::display::out::{note, say};
use crate::{interrupt, machine};

/// The line of the list of experiments.
pub const QUESTION: &str = "Efficiency: time by length of the text, for attention, GDN and MARCH";

/// What the page says of any shapes.
const NOTES: [&str; 2] = [
    "A CPU instead of a GPU, in f32.",
    "Attention is this project's streaming attention on the CPU, not FlashAttention-2.",
];

/// What the page says of small shapes.
const SMALL: [&str; 1] = [
    "A width of 128 instead of 1536, with the paper's proportions: d_k 0.75 and d_v 1.5 of the width over all heads; the \
     interval of 512 tokens and so the number of anchors are the paper's. States shrink with the square of the width, but \
     attention's keys and values only linearly, so attention costs more here, in proportion, than in the paper.",
];

/// What the page says of the paper's shapes.
const PAPER: [&str; 2] = [
    "The shapes are the paper's: width 1536, six heads with d_k 192 and d_v 384, an interval of 512.",
    "Whole training steps at these shapes were not measured, but computed from the core and from steps of models with one \
     and with two layers of 4,096 tokens, the vocabulary of 32,000 included.",
];

/// The paper's own experiment, as `--size paper` prints it.
pub fn full() -> PaperExperiment {
    let train = ["paper/transformer-21", "paper/gdn", "paper/march", "ablation/top-4"];
    let eval = "march inspect training MODEL --processes 1 # memory and work of a step".to_string();
    PaperExperiment { train: train.map(String::from).to_vec(), eval: vec![eval] }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shapes {
    /// Tiny shapes, to see that everything runs.
    Quick,
    /// A twelfth of the paper's width.
    Laptop,
    /// The paper's width.
    Paper,
}

impl Shapes {
    /// The value of `--size` and the folder of the results.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Quick => (" --size quick", "efficiency"),
            Self::Laptop => ("", "efficiency"),
            Self::Paper => (" --size paper-shapes", "efficiency-paper-shapes"),
        }
    }
}

/// The measurements of a run that was stopped, the machine that made them, and the seconds that they took.
#[derive(Serialize, Deserialize)]
struct Partial {
    machine: String,
    timings: Vec<Timing>,
    #[serde(default)]
    seconds: f64,
}

impl Partial {
    /// What is known of this machine. Times of another one cannot be compared with those of this one.
    fn open(path: &Path) -> anyhow::Result<Self> {
        let machine = machine::summary();
        let empty = Self { machine: machine.clone(), timings: Vec::new(), seconds: 0.0 };
        if !path.exists() {
            return Ok(empty);
        }
        let text = fs::read_to_string(path).with_context(|| format!("{}: could not read", path.display()))?;
        let known: Self = serde_json::from_str(&text).with_context(|| {
            format!("{}: is damaged; delete it, and all is measured again", path.display())
        })?;
        if known.machine != machine {
            note!("{}: was measured on another machine; all is measured again", path.display());
            return Ok(empty);
        }
        Ok(known)
    }
}

/// Measures and writes the pages.
pub fn run(shapes: Shapes, output: &Path, only_plan: bool) -> anyhow::Result<()> {
    let plan = match shapes {
        Shapes::Quick => EfficiencyPlan::quick(),
        Shapes::Laptop => EfficiencyPlan::laptop(),
        Shapes::Paper => EfficiencyPlan::paper_shapes(),
    };
    // At the paper's shapes PyTorch's chunked rule takes hours.
    let python = find_python().filter(|_| shapes != Shapes::Paper);
    let mut seconds = plan.estimate_seconds();
    if python.is_some() {
        seconds += plan.estimate_peer_seconds();
    }
    say!("{QUESTION}\n");
    say!("lengths   {:?} tokens", plan.lengths);
    if shapes != Shapes::Paper {
        let found = "found";
        let missing = "not found; name a Python that has it with PEERS_PYTHON";
        say!("PyTorch   {}", if python.is_some() { found } else { missing });
    }
    say!("time      about {}; nothing else should run meanwhile\n", duration(seconds));
    if only_plan {
        return Ok(());
    }
    let (size, name) = shapes.names();
    let folder = output.join(name);
    fs::create_dir_all(&folder).with_context(|| format!("{}: could not create", folder.display()))?;
    interrupt::listen("stopping after this measurement")?;
    let began = Instant::now();
    let path = folder.join("timings.json");
    let mut known =
        if shapes == Shapes::Paper { Partial::open(&path)? } else { Partial::open(Path::new(""))? };
    let before = known.seconds;
    let mut failed = Ok(());
    let mut timings = plan.run(known.timings.clone(), &mut |timing| {
        show(timing);
        known.timings.push(timing.clone());
        known.seconds = before + began.elapsed().as_secs_f64();
        failed = save(&path, &known);
        if interrupt::asked() || failed.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    failed?;
    let mut watch = |timing: &Timing| {
        show(timing);
        if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let found = match python {
        Some(_) if !interrupt::asked() => peers(&plan, &mut watch)?,
        _ => None,
    };
    if interrupt::asked() {
        if shapes == Shapes::Paper {
            note!("stopped; the same command goes on from {}", path.display());
        }
        interrupt::leave();
    }
    let own: &[&str] = if shapes == Shapes::Paper { &PAPER } else { &SMALL };
    let mut notes: Vec<String> = NOTES.iter().chain(own).map(|note| note.to_string()).collect();
    match found {
        Some(found) => timings.extend(found),
        None if shapes == Shapes::Paper => {}
        None => notes.push("PyTorch was not found on this machine; its rows are missing.".into()),
    }
    let command = format!("march reproduce efficiency{size}");
    known.seconds = before + began.elapsed().as_secs_f64();
    let mut facts = facts(&command, &duration(known.seconds), 1);
    if let Some(fact) = facts.iter_mut().find(|fact| fact.0 == "side by side") {
        *fact = ("threads".into(), machine::cores().to_string());
    }
    let page = page(&timings, facts, &notes);
    known.timings.clone_from(&timings);
    save(&path, &known)?;
    page.sections.iter().flat_map(|section| &section.tables).for_each(print_table);
    verdict(&timings).iter().for_each(|line| say!("\n{}", line.replace("**", "")));
    write(&page, &folder)
}

fn save(path: &Path, all: &Partial) -> anyhow::Result<()> {
    Ok(march_lm::disk::replace(path, &serde_json::to_vec_pretty(all)?)?)
}

fn show(timing: &Timing) {
    let kind = match timing.kind {
        Kind::Core => "core",
        Kind::EndToEnd => "training",
        Kind::OneLayer => "one layer",
        Kind::TwoLayers => "two layers",
    };
    if timing.is_skipped() {
        say!(
            "{kind:<10} {:>7} tokens  {:<18} skipped: about {}",
            timing.length,
            timing.arm,
            duration(timing.seconds)
        );
        return;
    }
    say!(
        "{kind:<10} {:>7} tokens  {:<18} {:>10.1} ms  {:>9.0} tokens/s  {:>6.1} GFLOP/s",
        timing.length,
        timing.arm,
        1e3 * timing.seconds,
        timing.tokens_per_second,
        timing.flop / timing.seconds / 1e9
    );
}

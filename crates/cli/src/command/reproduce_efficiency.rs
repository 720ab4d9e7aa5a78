//! `march reproduce efficiency`: training speed by length of the text, and the same in PyTorch if it is there.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use march_lab::report::efficiency::{page, verdict};
use march_lab::reproduce::efficiency::{EfficiencyPlan, Kind, Timing, find_python, peers};
use march_lab::reproduce::{PaperExperiment, Size};

use super::reproduce::{facts, print_table, write};
use crate::display::lines::duration;
use crate::display::out::say;
use crate::{interrupt, machine};

/// The line of the list of experiments.
pub const QUESTION: &str = "Efficiency: time by length of the text, for attention, GDN and MARCH";

/// What the page says of its shapes.
const NOTES: [&str; 3] = [
    "A CPU instead of a GPU, in f32.",
    "A width of 128 instead of 1536, with the paper's proportions: d_k 0.75 and d_v 1.5 of the width over all heads; the \
     interval of 512 tokens and so the number of anchors are the paper's. States shrink with the square of the width, but \
     attention's keys and values only linearly, so attention costs more here, in proportion, than in the paper.",
    "Attention is this project's streaming attention on the CPU, not FlashAttention-2.",
];

/// The paper's own experiment, as `--size paper` prints it.
pub fn full() -> PaperExperiment {
    let train = ["paper/transformer-21", "paper/gdn", "paper/march", "ablation/top-4"];
    let eval = "march inspect training MODEL --processes 1 # memory and work of a step".to_string();
    PaperExperiment { train: train.map(String::from).to_vec(), eval: vec![eval] }
}

/// Measures and writes the pages.
pub fn run(size: Size, output: &Path, only_plan: bool) -> anyhow::Result<()> {
    let plan = if size == Size::Quick { EfficiencyPlan::quick() } else { EfficiencyPlan::laptop() };
    let python = find_python();
    let mut seconds = plan.estimate_seconds();
    if python.is_some() {
        seconds += plan.estimate_peer_seconds();
    }
    say!("{QUESTION}\n");
    say!("lengths   {:?} tokens", plan.lengths);
    say!(
        "PyTorch   {}",
        if python.is_some() { "found" } else { "not found; name a Python that has it with PEERS_PYTHON" }
    );
    say!("time      about {}; nothing else should run meanwhile\n", duration(seconds));
    if only_plan {
        return Ok(());
    }
    let folder = output.join("efficiency");
    fs::create_dir_all(&folder).with_context(|| format!("{}: could not create", folder.display()))?;
    interrupt::listen("stopping after this measurement")?;
    let began = Instant::now();
    let mut watch = |timing: &Timing| {
        show(timing);
        if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let mut timings = plan.run(&mut watch)?;
    let found = if interrupt::asked() { None } else { peers(&plan, &mut watch)? };
    if interrupt::asked() {
        interrupt::leave();
    }
    let mut notes = NOTES.map(String::from).to_vec();
    match found {
        Some(found) => timings.extend(found),
        None => notes.push("PyTorch was not found on this machine; its rows are missing.".into()),
    }
    let command = if size == Size::Quick {
        "march reproduce efficiency --size quick"
    } else {
        "march reproduce efficiency"
    };
    let mut facts = facts(command, &duration(began.elapsed().as_secs_f64()), 1);
    if let Some(fact) = facts.iter_mut().find(|fact| fact.0 == "side by side") {
        *fact = ("threads".into(), machine::cores().to_string());
    }
    let page = page(&timings, facts, &notes);
    march_lm::disk::replace(&folder.join("timings.json"), &serde_json::to_vec_pretty(&timings)?)?;
    page.sections.iter().flat_map(|section| &section.tables).for_each(print_table);
    verdict(&timings).iter().for_each(|line| say!("\n{}", line.replace("**", "")));
    write(&page, &folder)
}

fn show(timing: &Timing) {
    let kind = match timing.kind {
        Kind::Core => "core",
        Kind::EndToEnd => "training",
    };
    if timing.is_skipped() {
        say!(
            "{kind:<9} {:>7} tokens  {:<18} skipped: about {}",
            timing.length,
            timing.arm,
            duration(timing.seconds)
        );
        return;
    }
    say!(
        "{kind:<9} {:>7} tokens  {:<18} {:>10.1} ms  {:>9.0} tokens/s  {:>6.1} GFLOP/s",
        timing.length,
        timing.arm,
        1e3 * timing.seconds,
        timing.tokens_per_second,
        timing.flop / timing.seconds / 1e9
    );
}

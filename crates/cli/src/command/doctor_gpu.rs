//! `march doctor` for GPUs: the list of them, and the test of one.

use anyhow::{Context, bail};
use march_gpu::AdapterSummary;
use march_gpu::doctor::{Line, Report};
use serde_json::{Value, json};

use super::doctor_dispatches::{self, PerLayer};
use crate::compare::{self, Difference};
use crate::device::gpu::OnGpu;
use crate::display::bytes;
use crate::display::out::say;

/// Prints a line for each GPU.
pub fn list() {
    let adapters = march_gpu::adapters();
    if adapters.is_empty() {
        say!("GPU           none found");
    }
    for AdapterSummary { index, name, backend, kind, driver, memory_limit, usable } in adapters {
        let driver = if driver.is_empty() { String::new() } else { format!(", {driver}") };
        let state = match usable {
            Ok(()) => format!("largest tensor {}", bytes(memory_limit as usize)),
            Err(why) => format!("cannot be used: {why}"),
        };
        say!("{:<13} {name} on {backend}, {kind}{driver}; {state}", format!("gpu:{index}"));
    }
}

/// Tests a GPU against the processor; fails if it does not pass.
pub fn test(engine: &OnGpu, as_json: bool) -> anyhow::Result<()> {
    let mut show = |line: &Line| {
        if !as_json {
            show_line(line);
        }
    };
    if !as_json {
        say!("device        {}", engine.device.description());
        say!("\n{:<28} {:>10} {:>10}", "operation", "forward", "gradients");
    }
    let report = march_gpu::doctor::run(&engine.device, &mut show)?;
    if !as_json {
        say!("\n{:<28} {:>10} {:>10} {:>10} {:>10}", "model", "logits", "loss", "gradients", "training");
    }
    let models = compare::all(engine, &engine.rest, &mut |difference| {
        if !as_json {
            show_model(difference);
        }
    })?;
    let dispatches = doctor_dispatches::count(engine)?;
    let passed = report.passed && models.iter().all(|model| model.failures().is_empty());
    if as_json {
        say!("{}", serde_json::to_string_pretty(&to_json(&report, &models, &dispatches, passed)?)?);
    } else {
        say!("\n{:<28} {:>10} {:>10}", "dispatches per layer", "training", "decoding");
        for PerLayer { model, training, decoding } in &dispatches {
            say!("{model:<28} {training:>10} {decoding:>10}");
        }
        say!();
        for (name, value, unit) in &report.peaks {
            say!("{name:<28} {value:>10.1} {unit}");
        }
        models.iter().flat_map(Difference::failures).for_each(|failure| say!("failed: {failure}"));
    }
    if !passed {
        bail!("{} does not compute what the processor computes; do not use it", engine.device.description());
    }
    if !as_json {
        say!("passed: the device computes what the processor computes");
    }
    Ok(())
}

fn show_line(line: &Line) {
    let Line { operation, forward_error, gradient_error, passed, note } = line;
    let end = if *passed { "" } else { "  FAILED" };
    let note = if note.is_empty() { String::new() } else { format!("  {note}") };
    say!("{operation:<28} {forward_error:>10.1e} {gradient_error:>10.1e}{end}{note}");
}

fn show_model(difference: &Difference) {
    let Difference { model, logits, loss, gradient, training, .. } = difference;
    let end = if difference.failures().is_empty() { "" } else { "  FAILED" };
    say!("{model:<28} {logits:>10.1e} {loss:>10.1e} {gradient:>10.1e} {training:>10.1e}{end}");
}

/// The report of the operations, with the models and the numbers of dispatches.
fn to_json(
    report: &Report,
    models: &[Difference],
    dispatches: &[PerLayer],
    passed: bool,
) -> anyhow::Result<Value> {
    let mut value: Value =
        serde_json::from_str(&report.to_json()).context("the report of the GPU's operations is not JSON")?;
    let models = models.iter().map(|model| {
        let Difference { model: name, logits, loss, gradient, parameter, training } = model;
        json!({
            "model": name, "logits": logits, "loss": loss, "gradient": gradient, "parameter": parameter,
            "training": training, "failures": model.failures(),
        })
    });
    value["models"] = models.collect();
    let dispatches = dispatches.iter().map(|PerLayer { model, training, decoding }| {
        json!({ "model": model, "training": training, "decoding": decoding })
    });
    value["dispatches_per_layer"] = dispatches.collect();
    value["passed"] = json!(passed);
    Ok(value)
}

//! `march doctor` for GPUs: the list of them, and the test of one.

use anyhow::bail;
use march_gpu::doctor::{self, Line, Peaks, Speed};
use march_gpu::{AdapterSummary, Gpu};
use march_lm::engine::Device;
use serde_json::{Value, json};

use super::doctor_dispatches::{self, PerLayer};
use crate::device_test::{DeviceTest, ModelTest, PassedRecord, TestResult};
use crate::display::bytes;
use crate::display::out::say;
use crate::machine;

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

/// Tests a GPU and measures it; fails if it does not pass.
pub fn test(device: &Device, gpu: &Gpu, as_json: bool) -> anyhow::Result<()> {
    let report = Report::of(device, gpu, as_json)?;
    if as_json {
        say!("{}", serde_json::to_string_pretty(&report.to_json())?);
    }
    let passed = PassedRecord::of(gpu);
    if !report.failures.is_empty() {
        if let Some(passed) = passed {
            passed.forget();
        }
        bail!(
            "{device} does not compute what it should, and `march train` refuses it; {} failed",
            report.failures.len()
        );
    }
    if let Some(passed) = passed {
        passed.note();
    }
    if !as_json {
        say!("\npassed: {device} computes what it should");
    }
    Ok(())
}

/// All that is known of a device.
struct Report {
    identity: String,
    test: DeviceTest,
    dispatches: Vec<PerLayer>,
    peaks: Option<Peaks>,
    speeds: Vec<Speed>,
    failures: Vec<String>,
}

impl Report {
    /// Tests and measures; prints what is found, unless it is `quiet`.
    fn of(device: &Device, gpu: &Gpu, quiet: bool) -> anyhow::Result<Self> {
        let identity = gpu.identity().to_string();
        if !quiet {
            say!("device        {identity}");
            say!("\n{:<28} {:>10} {:>10}", "operation", "forward", "gradients");
        }
        let mut models = 0;
        let test = DeviceTest::run(device, &mut |shown| match shown {
            _ if quiet => {}
            TestResult::Operation(line) => show_operation(line),
            TestResult::Model(tested) => {
                show_model(tested, models == 0);
                models += 1;
            }
        })?;
        let failures = test.failures();
        let mut report =
            Self { identity, test, dispatches: Vec::new(), peaks: None, speeds: Vec::new(), failures };
        // Whatever happens here, the report of the test is kept.
        if let Err(error) = report.measure(device, gpu, quiet) {
            report.failures.push(format!("speed: {error:#}"));
        }
        if !quiet {
            say!();
            report.failures.iter().for_each(|failure| say!("failed: {failure}"));
        }
        Ok(report)
    }

    fn measure(&mut self, device: &Device, gpu: &Gpu, quiet: bool) -> anyhow::Result<()> {
        self.dispatches = doctor_dispatches::count(device, gpu)?;
        let peaks = Peaks::measure(gpu)?;
        self.peaks = Some(peaks);
        if !quiet {
            say!("\n{:<28} {:>10} {:>10}", "dispatches per layer", "training", "decoding");
            for PerLayer { model, training, decoding } in &self.dispatches {
                say!("{model:<28} {training:>10} {decoding:>10}");
            }
            say!("\n{:<28} {:>10.1} GFLOP/s", "peak: multiply-adds", peaks.gflops);
            say!("{:<28} {:>10.1} GB/s read and written", "peak: copy", peaks.copy_gbs);
            say!("{:<28} {:>10.1} GB/s read and written", "peak: a + b", peaks.add_gbs);
            say!(
                "\n{:<22} {:<9} {:>6} {:>10} {:>8} {:>10} {:>8}",
                "operation",
                "pass",
                "size",
                "GFLOP/s",
                "of peak",
                "GB/s",
                "of peak"
            );
        }
        self.speeds = doctor::speeds(device, &peaks, &mut |speed| {
            if !quiet {
                show_speed(speed);
            }
        })?;
        Ok(())
    }

    fn to_json(&self) -> Value {
        let operations = self.test.operations.iter().map(|line| {
            let Line { operation, forward_error, gradient_error, passed, note } = line;
            json!({
                "operation": operation, "forward_error": forward_error, "gradient_error": gradient_error,
                "passed": passed, "note": note,
            })
        });
        let models = self.test.models.iter().map(|tested| {
            let checks = tested.checks.iter().flatten().map(|check| {
                json!({
                    "kind": check.kind, "error": check.error, "allowed": check.allowed, "largest": check.what,
                })
            });
            json!({
                "model": tested.model, "checks": checks.collect::<Value>(), "failures": tested.failures(),
            })
        });
        let dispatches = self.dispatches.iter().map(|PerLayer { model, training, decoding }| {
            json!({ "model": model, "training": training, "decoding": decoding })
        });
        let peaks = self.peaks.map(|Peaks { gflops, copy_gbs, add_gbs }| {
            json!({ "gflops": gflops, "copy_gbs": copy_gbs, "add_gbs": add_gbs })
        });
        let speeds = self.speeds.iter().map(|speed| {
            json!({
                "operation": speed.operation, "pass": pass(speed), "size": speed.size,
                "gflops": speed.gflops, "gflops_share": speed.gflops_share,
                "gbs": speed.gbs, "gbs_share": speed.gbs_share,
            })
        });
        json!({
            "march": format!("{} ({})", env!("CARGO_PKG_VERSION"), machine::profile()),
            "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            "device": self.identity,
            "passed": self.failures.is_empty(),
            "failures": self.failures,
            "allowed": { "forward_error": doctor::FORWARD, "gradient_error": doctor::GRADIENT },
            "operations": operations.collect::<Value>(),
            "models": models.collect::<Value>(),
            "dispatches_per_layer": dispatches.collect::<Value>(),
            "peaks": peaks,
            "speeds": speeds.collect::<Value>(),
        })
    }
}

fn end(passed: bool) -> &'static str {
    if passed { "" } else { "  FAILED" }
}

fn show_operation(line: &Line) {
    let Line { operation, forward_error, gradient_error, passed, note } = line;
    let note = if note.is_empty() { String::new() } else { format!("  {note}") };
    say!("{operation:<28} {forward_error:>10.1e} {gradient_error:>10.1e}{}{note}", end(*passed));
}

fn show_model(tested: &ModelTest, first: bool) {
    let checks = tested.checks.as_deref().unwrap_or_default();
    if first {
        let kinds: String = checks.iter().map(|check| format!(" {:>9}", check.kind)).collect();
        say!("\n{:<18}{kinds}", "model");
    }
    let errors: String = checks.iter().map(|check| format!(" {:>9.1e}", check.error)).collect();
    say!("{:<18}{errors}{}", tested.model, end(tested.failures().is_empty()));
}

fn pass(speed: &Speed) -> &'static str {
    if speed.backward { "training" } else { "forward" }
}

fn show_speed(speed: &Speed) {
    let Speed { operation, size, gflops, gflops_share, gbs, gbs_share, .. } = speed;
    let percent = |share: &f64| format!("{:.1} %", 100.0 * share);
    let [arithmetic, share] = match *gflops > 0.0 {
        true => [format!("{gflops:.2}"), percent(gflops_share)],
        false => ["-".into(), "-".into()],
    };
    say!(
        "{operation:<22} {:<9} {size:>6} {arithmetic:>10} {share:>8} {gbs:>10.3} {:>8}",
        pass(speed),
        percent(gbs_share)
    );
}

//! Checks a device: every operation of the engine, forward and backward, against the f64 references on random and
//! extreme inputs; and what the device reaches in products and memory traffic.
//!
//! An operation that the engine leaves to another one is noted and is no failure.

mod cases;
mod peaks;
mod programs;

use march_engine::{Engine, Error, Reference, Result};

use self::cases::Case;
use self::programs::{Outcome, outcome};
use crate::gpu::Gpu;

/// Agreement of outputs, relative to the largest number of each.
const FORWARD: f64 = 1e-5;

/// Agreement of gradients, relative to the largest number of each.
const GRADIENT: f64 = 1e-4;

/// One operation: how far the device is from the reference.
#[derive(Clone, Debug)]
pub struct Line {
    /// Name of the operation.
    pub operation: String,
    /// Largest error of an output, relative to the largest number of that output.
    pub forward_error: f64,
    /// Largest error of a gradient, relative to the largest number of that gradient; 0 if there is none.
    pub gradient_error: f64,
    /// Whether both errors are within their tolerances, and a second run gave the same bits.
    pub passed: bool,
    /// What failed and where, or what the engine leaves to another one; empty if there is nothing to say.
    pub note: String,
}

/// All operations of a device, and its measured speeds.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of the device and the interface that it is reached by.
    pub device: String,
    /// One line for each operation.
    pub lines: Vec<Line>,
    /// Speeds: what was measured, the number, and its unit.
    pub peaks: Vec<(String, f64, String)>,
    /// Whether every line passed.
    pub passed: bool,
}

impl Report {
    /// The report as JSON. Errors that are not finite become null.
    pub fn to_json(&self) -> String {
        let lines: Vec<String> = self
            .lines
            .iter()
            .map(|line| {
                format!(
                    "{{\"operation\":{},\"forward_error\":{},\"gradient_error\":{},\"passed\":{},\"note\":{}}}",
                    text(&line.operation),
                    number(line.forward_error),
                    number(line.gradient_error),
                    line.passed,
                    text(&line.note)
                )
            })
            .collect();
        let peaks: Vec<String> = self
            .peaks
            .iter()
            .map(|(what, value, unit)| {
                format!("{{\"what\":{},\"value\":{},\"unit\":{}}}", text(what), number(*value), text(unit))
            })
            .collect();
        format!(
            "{{\"device\":{},\"passed\":{},\"lines\":[{}],\"peaks\":[{}]}}",
            text(&self.device),
            self.passed,
            lines.join(","),
            peaks.join(",")
        )
    }
}

/// A JSON number.
fn number(value: f64) -> String {
    if value.is_finite() { format!("{value:e}") } else { "null".into() }
}

/// A JSON string.
fn text(value: &str) -> String {
    let mut found = String::from("\"");
    for c in value.chars() {
        match c {
            '"' => found.push_str("\\\""),
            '\\' => found.push_str("\\\\"),
            c if c < ' ' => found.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => found.push(c),
        }
    }
    found.push('"');
    found
}

/// Checks every operation and measures the device; `progress` gets each line as soon as it is known. Returns an error
/// only if the references themselves fail.
pub fn run(gpu: &Gpu, progress: &mut dyn FnMut(&Line)) -> Result<Report> {
    let lines = check_all(gpu, progress)?;
    let passed = lines.iter().all(|line| line.passed);
    let peaks = peaks::measure(gpu);
    Ok(Report { device: gpu.description(), lines, peaks, passed })
}

fn check_all<E: Engine>(engine: &E, progress: &mut dyn FnMut(&Line)) -> Result<Vec<Line>> {
    let mut lines: Vec<Line> = Vec::new();
    for (operation, cases) in cases::all() {
        let mut line = Line {
            operation: operation.into(),
            forward_error: 0.0,
            gradient_error: 0.0,
            passed: true,
            note: String::new(),
        };
        for case in &cases {
            check(engine, case, &mut line)?;
        }
        progress(&line);
        lines.push(line);
    }
    Ok(lines)
}

/// Runs one case on the device and on the reference, and adds its errors to the line.
fn check<E: Engine>(engine: &E, case: &Case, line: &mut Line) -> Result<()> {
    let want = outcome(&Reference, case)?;
    let want_gradients = want.gradients?;
    let found = match outcome(engine, case) {
        Ok(found) => found,
        Err(Error::Unsupported { operation }) => {
            line.note = format!("{operation} is left to another engine");
            return Ok(());
        }
        Err(error) => {
            fail(line, case, &error.to_string());
            return Ok(());
        }
    };
    for (i, (found, want)) in found.outputs.iter().zip(&want.outputs).enumerate() {
        let error = difference(found, want, 1e-6);
        line.forward_error = line.forward_error.max(error);
        if error > FORWARD {
            fail(line, case, &format!("output {i} is off by {error:.1e} of its largest number"));
        }
    }
    match &found.gradients {
        Ok(gradients) => {
            // A gradient that is zero but for rounding is measured by the others.
            let floor = 0.1 * want_gradients.iter().flatten().map(|g| largest(g)).fold(1e-4, f64::max);
            for (i, (found, want)) in gradients.iter().zip(&want_gradients).enumerate() {
                let error = match (found, want) {
                    (Some(found), Some(want)) => difference(found, want, floor),
                    (None, None) => 0.0,
                    _ => f64::INFINITY,
                };
                line.gradient_error = line.gradient_error.max(error);
                if error > GRADIENT {
                    let name = case.inputs[i].name;
                    fail(
                        line,
                        case,
                        &format!("the gradient of {name} is off by {error:.1e} of its largest number"),
                    );
                }
            }
        }
        Err(Error::Unsupported { operation }) => {
            line.note = format!("{operation} is left to another engine");
        }
        Err(error) => fail(line, case, &error.to_string()),
    }
    if let Ok(again) = outcome(engine, case)
        && !same(&again, &found)
    {
        fail(line, case, "a second run gave other bits");
    }
    Ok(())
}

/// Marks a line as failed; the first failure is the one that is noted.
fn fail(line: &mut Line, case: &Case, what: &str) {
    if line.passed {
        line.note = format!("{}: {what}", case.label);
    }
    line.passed = false;
}

fn same(a: &Outcome, b: &Outcome) -> bool {
    a.outputs == b.outputs
        && match (&a.gradients, &b.gradients) {
            (Ok(a), Ok(b)) => a == b,
            (a, b) => a.is_err() == b.is_err(),
        }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m: f64, v| m.max(v.abs()))
}

/// The largest difference, relative to the largest number of `want`, or to `floor` if that is smaller.
fn difference(found: &[f64], want: &[f64], floor: f64) -> f64 {
    if found.len() != want.len() || found.iter().any(|v| !v.is_finite()) {
        return f64::INFINITY;
    }
    let off = found.iter().zip(want).fold(0.0, |m: f64, (f, w)| m.max((f - w).abs()));
    off / largest(want).max(floor)
}

#[cfg(test)]
mod tests {
    use march_engine::{Cpu, CpuOptions};

    use super::*;

    /// An engine that has every operation passes: the cases are valid, and the tolerances suit f32.
    #[test]
    fn the_cpu_passes() {
        let cpu = Cpu::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
        let lines = check_all(&cpu, &mut |_| {}).unwrap();
        let failed: Vec<&Line> = lines.iter().filter(|line| !line.passed || !line.note.is_empty()).collect();
        assert!(failed.is_empty(), "{failed:#?}");
        let exact = ["slice and place", "concat", "permute", "expand", "append"];
        for line in lines.iter().filter(|line| !exact.contains(&line.operation.as_str())) {
            assert!(line.forward_error > 0.0 || line.gradient_error > 0.0, "{line:?}");
        }
    }

    #[test]
    fn json_is_escaped() {
        let line = Line {
            operation: "sum".into(),
            forward_error: 1.5e-7,
            gradient_error: f64::INFINITY,
            passed: false,
            note: "a \"b\"\n".into(),
        };
        let peaks = vec![("copy".into(), 2.0, "GB/s".into())];
        let report = Report { device: "x\\y".into(), lines: vec![line], peaks, passed: false };
        assert_eq!(
            report.to_json(),
            "{\"device\":\"x\\\\y\",\"passed\":false,\"lines\":[{\"operation\":\"sum\",\"forward_error\":1.5e-7,\
             \"gradient_error\":null,\"passed\":false,\"note\":\"a \\\"b\\\"\\u000a\"}],\
             \"peaks\":[{\"what\":\"copy\",\"value\":2e0,\"unit\":\"GB/s\"}]}"
        );
    }

    #[test]
    fn differences() {
        assert_eq!(difference(&[1.0, 2.5], &[1.0, 2.0], 1e-6), 0.25);
        assert_eq!(difference(&[f64::NAN], &[1.0], 1e-6), f64::INFINITY);
        assert_eq!(difference(&[], &[1.0], 1e-6), f64::INFINITY);
        assert_eq!(difference(&[1e-3], &[0.0], 1.0), 1e-3);
    }
}

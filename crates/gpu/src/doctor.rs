//! Checks a device: every operation of the engine, forward and backward, against the f64 references on random and
//! extreme inputs; and measures its peaks and the speed of every operation.

mod cases;
mod peaks;
mod programs;
mod speeds;

use march_engine::{Device, Result};

use self::cases::Case;
pub use self::peaks::Peaks;
pub(crate) use self::peaks::kernel;
use self::programs::outcome;
pub use self::speeds::{Speed, speeds};

/// Agreement of outputs, relative to the largest number of each.
pub const FORWARD: f64 = 1e-5;

/// Agreement of gradients, relative to the largest number of each.
pub const GRADIENT: f64 = 1e-4;

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
    /// What failed and where; empty if nothing did.
    pub note: String,
}

/// Checks every operation; `progress` gets each line as soon as it is known. Returns an error only if the references
/// themselves fail.
pub fn operations(device: &Device, progress: &mut dyn FnMut(&Line)) -> Result<Vec<Line>> {
    let reference = Device::reference();
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
            check(device, &reference, case, &mut line)?;
        }
        progress(&line);
        lines.push(line);
    }
    Ok(lines)
}

/// Runs one case on the device and on the reference, and adds its errors to the line.
fn check(device: &Device, reference: &Device, case: &Case, line: &mut Line) -> Result<()> {
    let want = outcome(reference, case)?;
    let found = match outcome(device, case) {
        Ok(found) => found,
        Err(error) => {
            fail(line, case, &error.to_string());
            return Ok(());
        }
    };
    for (i, (found, want)) in found.outputs.iter().zip(&want.outputs).enumerate() {
        let error = difference(found, want, 1e-6);
        line.forward_error = line.forward_error.max(error);
        if error > FORWARD {
            fail(line, case, &off(&format!("output {i}"), error, FORWARD));
        }
    }
    // A gradient that is zero but for rounding is measured by the others.
    let floor = 0.1 * want.gradients.iter().flatten().map(|g| largest(g)).fold(1e-4, f64::max);
    for (i, (gradient, want)) in found.gradients.iter().zip(&want.gradients).enumerate() {
        let error = match (gradient, want) {
            (Some(found), Some(want)) => difference(found, want, floor),
            (None, None) => 0.0,
            _ => f64::INFINITY,
        };
        line.gradient_error = line.gradient_error.max(error);
        if error > GRADIENT {
            let name = case.inputs[i].name;
            fail(line, case, &off(&format!("the gradient of {name}"), error, GRADIENT));
        }
    }
    if outcome(device, case).is_ok_and(|again| again != found) {
        fail(line, case, "a second run gave other bits");
    }
    Ok(())
}

fn off(what: &str, error: f64, allowed: f64) -> String {
    format!("{what} is off by {error:.1e} of its largest number, and {allowed:.0e} is allowed")
}

/// Marks a line as failed; the first failure is the one that is noted.
fn fail(line: &mut Line, case: &Case, what: &str) {
    if line.passed {
        line.note = format!("{}: {what}", case.label);
    }
    line.passed = false;
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
    use march_engine::CpuOptions;

    use super::*;

    /// The cases are valid, and the tolerances suit f32.
    #[test]
    fn the_cpu_passes() {
        let cpu = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
        let lines = operations(&cpu, &mut |_| {}).unwrap();
        let failed: Vec<&Line> = lines.iter().filter(|line| !line.passed || !line.note.is_empty()).collect();
        assert!(failed.is_empty(), "{failed:#?}");
        let exact = ["slice and place", "concat", "permute", "expand", "append"];
        for line in lines.iter().filter(|line| !exact.contains(&line.operation.as_str())) {
            assert!(line.forward_error > 0.0 || line.gradient_error > 0.0, "{line:?}");
        }
    }

    #[test]
    fn differences() {
        assert_eq!(difference(&[1.0, 2.5], &[1.0, 2.0], 1e-6), 0.25);
        assert_eq!(difference(&[f64::NAN], &[1.0], 1e-6), f64::INFINITY);
        assert_eq!(difference(&[], &[1.0], 1e-6), f64::INFINITY);
        assert_eq!(difference(&[1e-3], &[0.0], 1.0), 1e-3);
    }
}

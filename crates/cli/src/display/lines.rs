//! A run as plain lines.

use march_lm::run::{Event, StepLine};
use march_lm::train::Validation;

use super::out::{self, note};
use super::{bytes, thousands};
use crate::machine;

/// Prints an event as a line.
pub fn show(event: Event) {
    match event {
        Event::SetAside(..) => note!("{}", line(&event)),
        _ => say(&line(&event)),
    }
}

/// Prints a line. If it goes to a closed pipe, the run continues.
pub fn say(line: &str) {
    out::line(format_args!("{line}"));
}

/// Formats an event as a line.
pub fn line(event: &Event) -> String {
    match event {
        Event::Step(line) => step(line),
        Event::Validated(step, Validation { loss, accuracy }, lowest) => {
            let lowest = if *lowest { " (lowest)" } else { "" };
            let right = 100.0 * accuracy;
            format!("validation    step {step}: {loss:.4} nats per token{lowest}, {right:.1} % right")
        }
        Event::Sampled(step, prompt, text) => {
            format!("sample        step {step}: {:?}", prompt.clone() + text)
        }
        Event::Saved(folder) => format!("saved         {}", folder.display()),
        Event::SetAside(folder, why) => format!("set aside     {}: {why}", folder.display()),
        Event::Resumed(folder) => format!("resumed       from {}", folder.display()),
    }
}

fn step(line: &StepLine) -> String {
    let StepLine { step, steps, report, tokens_per_second, seconds_left } = line;
    let hidden = report.overlap.map(|overlap| format!("  summing {:.0} % hidden", 100.0 * overlap.hidden()));
    format!(
        "step {step:>6}/{steps} {:>3.0} %  loss {:.4}  norm {:.3}  rate {:.2e}  {:>7} tokens/s  {:>8}  {} left{}",
        100.0 * *step as f64 / *steps as f64,
        report.loss,
        report.gradient_norm,
        report.rate,
        thousands(*tokens_per_second as usize),
        machine::resident().map_or(String::new(), bytes),
        duration(*seconds_left),
        hidden.unwrap_or_default()
    )
}

/// Formats a duration: 3725 seconds as 1 h 02 m.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} m {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} m"),
    }
}

//! A progress line for long work: rewritten in place on a terminal, printed occasionally elsewhere.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use super::thousands;

/// The progress of some work.
pub struct Progress {
    what: &'static str,
    unit: &'static str,
    total: usize,
    started: Instant,
    shown: Option<Instant>,
    terminal: bool,
}

impl Progress {
    /// Starts the progress of work with `total` units.
    pub fn new(what: &'static str, unit: &'static str, total: usize) -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self { what, unit, total, started: Instant::now(), shown: None, terminal }
    }

    /// Shows that `done` units are finished, if enough time has passed since the last update.
    pub fn at(&mut self, done: usize) {
        let (what, unit, total) = (self.what, self.unit, self.total);
        self.show(|seconds| {
            let rate = done as f64 / seconds;
            format!(
                "{what} {} of {} {unit} ({}), {} per second",
                thousands(done),
                thousands(total),
                left(done as f64 / total.max(1) as f64, seconds),
                thousands(rate as usize),
            )
        });
    }

    /// Shows a line, if enough time has passed since the last update; `line` receives the seconds since the start.
    pub fn show(&mut self, line: impl FnOnce(f64) -> String) {
        let pause = Duration::from_millis(if self.terminal { 100 } else { 10_000 });
        if self.shown.unwrap_or(self.started).elapsed() < pause {
            return;
        }
        self.shown = Some(Instant::now());
        let line = line(self.started.elapsed().as_secs_f64());
        // If the line cannot be written, there is nothing to do about it.
        let _ = if self.terminal {
            write!(std::io::stderr(), "\r\x1b[K{line}")
        } else {
            writeln!(std::io::stderr(), "{line}")
        };
    }

    /// Clears the line, so that something else can be printed in its place.
    pub fn clear(&self) {
        if self.terminal && self.shown.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }

    /// Clears the line; returns the time since the start.
    pub fn finish(self) -> Duration {
        self.clear();
        self.started.elapsed()
    }
}

/// "34 %, 12 s left", for a fraction of the work that took this many seconds.
pub fn left(share: f64, seconds: f64) -> String {
    let share = share.clamp(0.0, 1.0);
    let left = seconds * (1.0 - share) / share.max(1e-9);
    format!("{:.0} %, {left:.0} s left", 100.0 * share)
}

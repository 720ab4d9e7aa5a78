//! One line that tells how far long work has come: rewritten on a terminal, now and then a new one elsewhere.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use super::thousands;

/// How far some work has come.
pub struct Progress {
    what: &'static str,
    unit: &'static str,
    total: usize,
    started: Instant,
    shown: Option<Instant>,
    terminal: bool,
}

impl Progress {
    /// Work of `total` units that has just begun.
    pub fn new(what: &'static str, unit: &'static str, total: usize) -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self { what, unit, total, started: Instant::now(), shown: None, terminal }
    }

    /// Shows that `done` units are finished, if enough time has passed since the last time.
    pub fn at(&mut self, done: usize) {
        let pause = Duration::from_millis(if self.terminal { 100 } else { 10_000 });
        if self.shown.unwrap_or(self.started).elapsed() < pause {
            return;
        }
        self.shown = Some(Instant::now());
        let seconds = self.started.elapsed().as_secs_f64();
        let rate = done as f64 / seconds;
        let left = (self.total.saturating_sub(done)) as f64 / rate.max(1e-9);
        let line = format!(
            "{} {} of {} {} ({:.0} %), {} a second, {:.0} s left",
            self.what,
            thousands(done),
            thousands(self.total),
            self.unit,
            100.0 * done as f64 / self.total.max(1) as f64,
            thousands(rate as usize),
            left
        );
        // Nothing can be done where the line cannot be written.
        let _ = if self.terminal {
            write!(std::io::stderr(), "\r\x1b[K{line}")
        } else {
            writeln!(std::io::stderr(), "{line}")
        };
    }

    /// Takes the line away again; gives the time since the beginning.
    pub fn finish(self) -> Duration {
        if self.terminal && self.shown.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
        self.started.elapsed()
    }
}

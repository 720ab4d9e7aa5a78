//! Ctrl-C, for work that can stop cleanly.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;

use crate::display::out::{self, note};
use crate::display::screen;

static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C or a termination signal only requests a stop and prints `say`; a second one exits immediately.
pub fn listen(say: &'static str) -> anyhow::Result<&'static AtomicBool> {
    ctrlc::set_handler(move || {
        ask();
        if !screen::taken() {
            note!("\n{say}; interrupt again to exit immediately");
        }
    })
    .context("could not listen for Ctrl-C")?;
    Ok(&ASKED)
}

/// Requests a stop; the second request exits immediately.
pub fn ask() {
    if ASKED.swap(true, Ordering::Relaxed) {
        screen::give_back();
        // Not `leave`: the work may be blocked by the very output that it would wait for.
        std::process::exit(EXIT);
    }
}

/// Exits with the code for an interrupted command, after flushing its output.
pub fn leave() -> ! {
    if let Some(error) = out::finish() {
        note!("error: standard output: could not write: {error}");
    }
    std::process::exit(EXIT)
}

/// Whether a stop was requested.
pub fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Clears the request, for work that continues with something else.
pub fn forget() {
    ASKED.store(false, Ordering::Relaxed);
}

/// The exit code of an interrupted command.
pub const EXIT: i32 = 130;

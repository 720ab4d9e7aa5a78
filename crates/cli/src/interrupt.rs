//! Ctrl-C, for work that ends well when it is asked to.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;

use crate::display::out::{self, note};
use crate::display::screen;

static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C, or a request to end the process, only asks, and `say` is said; a second one ends it at once.
pub fn listen(say: &'static str) -> anyhow::Result<&'static AtomicBool> {
    ctrlc::set_handler(move || {
        ask();
        if !screen::taken() {
            note!("\n{say}; once more to end at once");
        }
    })
    .context("could not listen for Ctrl-C")?;
    Ok(&ASKED)
}

/// Asks the work to end; the second time the process ends at once.
pub fn ask() {
    if ASKED.swap(true, Ordering::Relaxed) {
        screen::give_back();
        // Not `leave`: the work may be held up by the very output that it would wait for.
        std::process::exit(EXIT);
    }
}

/// Ends the process as one that was asked to, after what it printed is written out.
pub fn leave() -> ! {
    if let Some(error) = out::finish() {
        note!("error: standard output: could not write: {error}");
    }
    std::process::exit(EXIT)
}

/// Whether the work is asked to end.
pub fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Takes the request back, for work that goes on with something else.
pub fn forget() {
    ASKED.store(false, Ordering::Relaxed);
}

/// The exit code of a command that was asked to end.
pub const EXIT: i32 = 130;

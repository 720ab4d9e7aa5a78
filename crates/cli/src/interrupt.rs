//! Ctrl-C, for work that ends well when it is asked to.

use anyhow::Context;
use std::sync::atomic::{AtomicBool, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C, or a request to end the process, only asks, and `say` is said; a second one ends it at once.
pub fn listen(say: &'static str) -> anyhow::Result<&'static AtomicBool> {
    ctrlc::set_handler(move || {
        if ASKED.swap(true, Ordering::Relaxed) {
            std::process::exit(EXIT);
        }
        eprintln!("\n{say}; once more to end at once");
    })
    .context("could not listen for Ctrl-C")?;
    Ok(&ASKED)
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

//! Ctrl-C, for work that ends well when it is asked to.

use std::sync::atomic::{AtomicBool, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C, or a request to end the process, only asks; a second one ends it at once.
pub fn listen() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if ASKED.swap(true, Ordering::Relaxed) {
            std::process::exit(EXIT);
        }
    })?;
    Ok(())
}

/// Whether the work is asked to end.
pub fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// The exit code of a command that was asked to end.
pub const EXIT: i32 = 130;

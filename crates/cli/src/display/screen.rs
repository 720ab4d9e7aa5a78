//! The full-screen mode of the terminal, which is always restored: at the end, after an error, in a panic, and before
//! the process exits on a second interrupt.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

static TAKEN: AtomicBool = AtomicBool::new(false);
/// Locked while drawing.
static DRAWING: Mutex<()> = Mutex::new(());
/// Text for standard error that is held back in the meantime.
static ASIDE: Mutex<String> = Mutex::new(String::new());

/// Takes over the terminal: keys arrive one by one, and the previous contents are kept.
pub fn take() -> io::Result<()> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            before(panic);
        }));
    });
    enable_raw_mode()?;
    TAKEN.store(true, Ordering::SeqCst);
    // Clear explicitly, because not every terminal has an alternate screen, which starts empty.
    execute!(io::stdout(), EnterAlternateScreen, Clear(ClearType::All), Hide).inspect_err(|_| give_back())
}

/// Whether the terminal is taken over.
pub fn taken() -> bool {
    TAKEN.load(Ordering::SeqCst)
}

/// Draws, unless the terminal was restored; returns whether it did.
pub fn draw(draw: impl FnOnce() -> io::Result<()>) -> io::Result<bool> {
    let _drawing = lock(&DRAWING);
    if !taken() {
        return Ok(false);
    }
    draw().map(|()| true)
}

/// Restores the terminal and prints what was held back. Does nothing if the terminal was not taken over.
pub fn give_back() {
    // Wait for the current frame to finish, but not indefinitely: this may run in a panic of that very frame.
    let mut drawing = DRAWING.try_lock();
    for _ in 0..100 {
        if drawing.is_ok() || !taken() {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
        drawing = DRAWING.try_lock();
    }
    if TAKEN.swap(false, Ordering::SeqCst) {
        // A terminal that is gone need not be restored.
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
        let aside = std::mem::take(&mut *lock(&ASIDE));
        let _ = io::stderr().write_all(aside.as_bytes());
    }
}

/// The lines that were held back so far.
pub fn held_back() -> Vec<String> {
    lock(&ASIDE).lines().map(String::from).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Standard error for messages that can occur at any time: held back while the terminal is taken over. Writing never
/// fails, because the logger would report that on standard error, and panic if that is closed or full.
pub struct HeldStderr;

impl Write for HeldStderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut aside = lock(&ASIDE);
        if taken() && io::stderr().is_terminal() {
            aside.push_str(&String::from_utf8_lossy(bytes));
            return Ok(bytes.len());
        }
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

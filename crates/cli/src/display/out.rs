//! What a command prints. Printing never stops the work: a pipe whose reader has gone away is ignored from then on, and
//! any other failure, such as a full disk, is kept and ends the command with an error once its work is done.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::Mutex;

/// The first failure of standard output.
static FAILED: Mutex<Option<io::Error>> = Mutex::new(None);

/// Prints to standard output, as `println!` does.
macro_rules! say {
    () => { $crate::display::out::line(format_args!("")) };
    ($($text:tt)*) => { $crate::display::out::line(format_args!($($text)*)) };
}

/// Prints to standard error, as `eprintln!` does; where that is closed or full, the text is lost.
macro_rules! note {
    () => { $crate::display::out::aside(format_args!("")) };
    ($($text:tt)*) => { $crate::display::out::aside(format_args!($($text)*)) };
}

pub(crate) use {note, say};

/// A line on standard output.
pub fn line(text: Arguments<'_>) {
    write(|out| writeln!(out, "{text}"));
}

/// Text on standard output, shown at once.
pub fn piece(text: &str) {
    write(|out| out.write_all(text.as_bytes()).and_then(|()| out.flush()));
}

/// A line on standard error.
pub fn aside(text: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Keeps the failure of something that wrote to standard output by itself.
pub fn keep(written: io::Result<()>) {
    write(|_| written);
}

/// Whether standard output still takes what is printed.
pub fn is_open() -> bool {
    failure().is_none()
}

/// Whether whoever read standard output has gone away.
pub fn is_closed() -> bool {
    failure().as_ref().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// Writes out what is still held back; the error that the command should end with, if there is one.
pub fn finish() -> Option<io::Error> {
    write(|out| out.flush());
    failure().take().filter(|error| error.kind() != ErrorKind::BrokenPipe)
}

fn failure() -> std::sync::MutexGuard<'static, Option<io::Error>> {
    FAILED.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn write(write: impl FnOnce(&mut io::StdoutLock<'static>) -> io::Result<()>) {
    let mut failed = failure();
    if failed.is_none()
        && let Err(error) = write(&mut io::stdout().lock())
    {
        *failed = Some(error);
    }
}

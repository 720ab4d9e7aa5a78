//! The output of a command. Printing never stops the work: once a pipe's reader is gone, output is ignored; any other
//! failure, such as a full disk, is remembered and ends the command with an error once its work is done.

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

/// Prints to standard error, as `eprintln!` does; if that is closed or full, the text is lost.
macro_rules! note {
    () => { $crate::display::out::aside(format_args!("")) };
    ($($text:tt)*) => { $crate::display::out::aside(format_args!($($text)*)) };
}

pub(crate) use {note, say};

/// Prints a line to standard output.
pub fn line(text: Arguments<'_>) {
    write(|out| writeln!(out, "{text}"));
}

/// Prints text to standard output and flushes it.
pub fn piece(text: &str) {
    write(|out| out.write_all(text.as_bytes()).and_then(|()| out.flush()));
}

/// Prints a line to standard error.
pub fn aside(text: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Records the failure of code that wrote to standard output directly.
pub fn keep(written: io::Result<()>) {
    write(|_| written);
}

/// Whether standard output still accepts text.
pub fn is_open() -> bool {
    failure().is_none()
}

/// Whether the reader of standard output is gone.
pub fn is_closed() -> bool {
    failure().as_ref().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// Flushes the output; returns the error that the command should end with, if there is one.
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

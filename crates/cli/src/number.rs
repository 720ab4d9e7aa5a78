//! Numeric flag values: which ones are valid, and the messages about others.

use std::str::FromStr;

use clap::Command;

/// More threads than any machine can use; the system would fail long before a larger number.
const MOST_THREADS: u64 = 4096;
/// The maximum of any count: a larger number is a mistake.
const MOST: u64 = 1_000_000_000_000;
/// The maximum length of a task's sequence. Several are read at a time, and their tokens are kept.
const MOST_LENGTH: u64 = 1 << 24;

/// Adds rules for the flags that many subcommands share, and allows negative numbers as values, so that the message is
/// about the number and not about an unknown flag `-1`.
pub fn tuned(command: Command) -> Command {
    let command = command.mut_args(|flag| {
        if flag.get_long().is_none() || !flag.get_action().takes_values() {
            return flag;
        }
        let flag = flag.allow_negative_numbers(true);
        match flag.get_id().as_str() {
            "threads" => flag.value_parser(threads),
            "seed" => flag.value_parser(seed),
            _ => flag,
        }
    });
    command.mut_subcommands(tuned)
}

/// A number of threads; 0 means all cores.
pub fn threads(text: &str) -> Result<usize, String> {
    within(text, 0, MOST_THREADS)
}

/// A random seed.
pub fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("it must be a whole number from 0 to {} (2^64 - 1)", u64::MAX))
}

/// A whole number, including 0.
pub fn whole<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    within(text, 0, MOST)
}

/// A whole number of at least 1.
pub fn count<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    within(text, 1, MOST)
}

/// The length of a task's sequence, in tokens.
pub fn length(text: &str) -> Result<usize, String> {
    within(text, 1, MOST_LENGTH)
}

/// The number of seeds in a sweep, each of which is a separate training run.
pub fn seeds(text: &str) -> Result<u64, String> {
    within(text, 1, 1000)
}

/// A finite number above 0.
pub fn positive(text: &str) -> Result<f64, String> {
    match f64::from_str(text) {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("it must be a number above 0".into()),
    }
}

/// Any number; the caller decides which values are valid.
pub fn any(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "it must be a number".into())
}

/// A whole number from `least` to `most`.
pub fn within<T: TryFrom<u64>>(text: &str, least: u64, most: u64) -> Result<T, String> {
    let number = text.parse::<u64>().ok().filter(|number| (least..=most).contains(number));
    number
        .and_then(|number| T::try_from(number).ok())
        .ok_or_else(|| format!("it must be a whole number from {least} to {most}"))
}

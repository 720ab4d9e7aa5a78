//! The sizes of a task in text form: `name:size=number:…`.

use std::fmt;

use super::Kind;
use crate::config::choice;
use crate::error::{Error, Result};

/// A size that is drawn for each example; written `any`.
pub(super) const ANY: usize = usize::MAX;

/// A size of a task.
pub struct Size {
    /// Its name.
    pub name: &'static str,
    /// A short description.
    pub about: &'static str,
    /// The default value.
    pub default: usize,
    /// Omitted from the text form at its default. The text is part of what identifies data and results, and a size
    /// that was added later must not change it.
    pub(super) later: bool,
}

impl Size {
    /// A size that every task of its kind has had from the start.
    pub(super) const fn new(name: &'static str, about: &'static str, default: usize) -> Self {
        Self { name, about, default, later: false }
    }

    /// A size that was added later, 0 by default.
    pub(super) const fn later(name: &'static str, about: &'static str) -> Self {
        Self { name, about, default: 0, later: true }
    }
}

/// The sizes of a task, given or default.
#[derive(Clone)]
pub struct Sizes {
    kind: &'static Kind,
    values: Vec<usize>,
}

impl Sizes {
    /// Parses the text after a task's name.
    pub(super) fn read(kind: &'static Kind, text: &str) -> Result<Self> {
        let mut values: Vec<usize> = kind.sizes.iter().map(|size| size.default).collect();
        for part in text.split(':').skip(1) {
            let refuse = |message: String| Error::Request(format!("task `{text}`: `{part}` {message}"));
            let Some((name, value)) = part.split_once('=') else {
                let first = &kind.sizes[0];
                let example = format!("{}:{}={}", kind.name, first.name, first.default);
                return Err(refuse(format!("is not a size; write `{example}`")));
            };
            let Some(at) = kind.sizes.iter().position(|size| size.name == name) else {
                let names = kind.sizes.iter().map(|size| size.name);
                return Err(refuse(format!("is unknown; {}", choice(name, "its sizes are", names))));
            };
            values[at] = match value {
                "any" if kind.sizes[at].default == ANY => ANY,
                value => value.parse().map_err(|_| refuse("must be a whole number".into()))?,
            };
        }
        Ok(Self { kind, values })
    }

    /// The task.
    pub fn kind(&self) -> &'static Kind {
        self.kind
    }

    /// Returns a size by its name.
    pub(super) fn get(&self, name: &str) -> usize {
        self.kind.sizes.iter().position(|size| size.name == name).map_or(0, |at| self.values[at])
    }

    /// Returns a size that must be at least 1.
    pub(super) fn positive(&self, name: &str) -> Result<usize> {
        match self.get(name) {
            0 => Err(self.refuse(format!("`{name}` is 0; it must be at least 1"))),
            value => Ok(value),
        }
    }

    /// An error that names the task.
    pub(super) fn refuse(&self, message: String) -> Error {
        Error::Request(format!("task `{self}`: {message}"))
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name)?;
        let shown = |(size, value): &(&Size, &usize)| !size.later || **value != size.default;
        self.kind.sizes.iter().zip(&self.values).filter(shown).try_for_each(|(size, value)| match *value {
            ANY => write!(f, ":{}=any", size.name),
            value => write!(f, ":{}={value}", size.name),
        })
    }
}

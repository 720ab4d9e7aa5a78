//! Errors of the library. Every message says what is wrong and what to do about it.

use std::path::{Path, PathBuf};

/// An error of the library.
#[derive(thiserror::Error)]
pub enum Error {
    /// A configuration that contradicts itself, lacks a required key, or has an unknown key.
    #[error("{origin}: `{key}` {message}")]
    Config {
        /// The file or preset.
        origin: String,
        /// The key.
        key: String,
        /// What is wrong and what to do.
        message: String,
    },
    /// A file whose contents are not as expected.
    #[error("{}: {message}", .path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong and what to do.
        message: String,
    },
    /// A file that is provably damaged: its checksum differs, it is truncated, or its structure is invalid.
    #[error("{}: {message}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found and what to do.
        message: String,
    },
    /// The operating system refused a read or a write.
    #[error("{}: could not {action}: {cause}", .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The action that failed, as a verb.
        action: &'static str,
        /// The system's error. It is already part of the message, so it is not exposed as the error's source, which
        /// would print it twice.
        cause: std::io::Error,
    },
    /// A loss or gradient that is not finite: where it occurred and what to try.
    #[error("{0}")]
    Diverged(String),
    /// A request that does not fit the model.
    #[error("{0}")]
    Request(String),
    /// An engine operation rejected its inputs.
    #[error(transparent)]
    Engine(#[from] march_engine::Error),
}

/// Prints the message, because that is what Rust prints if `main` returns an error.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// A result of the library.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates an [`Error::Config`].
    pub fn config(origin: &str, key: &str, message: impl Into<String>) -> Self {
        Self::Config { origin: origin.into(), key: key.into(), message: message.into() }
    }

    /// Creates an [`Error::File`].
    pub fn file(path: &Path, message: impl Into<String>) -> Self {
        Self::File { path: path.into(), message: message.into() }
    }

    /// Creates an [`Error::Damaged`].
    pub fn damaged(path: &Path, message: impl Into<String>) -> Self {
        Self::Damaged { path: path.into(), message: message.into() }
    }

    /// Whether the file is provably damaged or missing, so that reading it again cannot succeed.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } => true,
            Self::Io { cause, .. } => cause.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        }
    }

    /// Returns a function that turns a system error into an [`Error::Io`].
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| Self::Io { path, action, cause }
    }
}

/// For regions that are recomputed in the backward pass, whose errors pass through the engine.
impl From<Error> for march_engine::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Engine(error) => error,
            other => Self::Value { operation: "block", message: other.to_string() },
        }
    }
}

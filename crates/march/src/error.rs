//! What can go wrong, said so that it can be put right.

use std::path::{Path, PathBuf};

/// An error of the library.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A configuration that contradicts itself, lacks a key, or has one that nobody knows.
    #[error("{origin}: `{key}` {message}")]
    Config {
        /// The file or preset.
        origin: String,
        /// The key.
        key: String,
        /// What is wrong and what to do.
        message: String,
    },
    /// A file whose contents are not what they should be.
    #[error("{}: {message}", .path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong and what to do.
        message: String,
    },
    /// A file that is proven to be damaged: a checksum differs, it is cut short, or its structure is broken.
    #[error("{}: {message}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found and what to do.
        message: String,
    },
    /// The system refused to read or write.
    #[error("{}: could not {action}: {cause}", .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// What the system said; part of the message, so not given as the error's source, which would be shown again.
        cause: std::io::Error,
    },
    /// A loss or gradient that is not finite: where it came from and what to try.
    #[error("{0}")]
    Diverged(String),
    /// A request that does not fit the model.
    #[error("{0}")]
    Request(String),
    /// An operation refused its inputs.
    #[error(transparent)]
    Engine(#[from] march_engine::Error),
}

/// A result of the library.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An [`Error::Config`].
    pub fn config(origin: &str, key: &str, message: impl Into<String>) -> Self {
        Self::Config { origin: origin.into(), key: key.into(), message: message.into() }
    }

    /// An [`Error::File`].
    pub fn file(path: &Path, message: impl Into<String>) -> Self {
        Self::File { path: path.into(), message: message.into() }
    }

    /// An [`Error::Damaged`].
    pub fn damaged(path: &Path, message: impl Into<String>) -> Self {
        Self::Damaged { path: path.into(), message: message.into() }
    }

    /// Whether a file is proven to be damaged or is missing: another attempt will not read it either.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } => true,
            Self::Io { cause, .. } => cause.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        }
    }

    /// What turns a system error into an [`Error::Io`].
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| Self::Io { path, action, cause }
    }
}

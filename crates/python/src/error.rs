//! Errors of the library as Python exceptions with the same text, and work that Ctrl-C can stop.

use std::ops::ControlFlow;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

pyo3::create_exception!(
    march_lm,
    Error,
    PyValueError,
    "What the library refuses or cannot do: a configuration, a file, a request or the shape of an array that is not as it \
     must be.\n\nIt is a `ValueError`. Errors of the operating system are `OSError`, and arguments of a wrong type \
     `TypeError`."
);

/// Why a call failed.
pub enum Failure {
    /// The library refused it.
    Library(march_lm::Error),
    /// Python did, or what it called.
    Python(PyErr),
}

/// The result of a call.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl From<march_lm::Error> for Failure {
    fn from(error: march_lm::Error) -> Self {
        Self::Library(error)
    }
}

impl From<march_engine::Error> for Failure {
    fn from(error: march_engine::Error) -> Self {
        Self::Library(error.into())
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Python(error) => error,
            // As Python's own functions fail: FileNotFoundError, PermissionError, ….
            Failure::Library(march_lm::Error::Io { path, action, cause }) => {
                let kind = cause.kind();
                let text = march_lm::Error::Io { path, action, cause }.to_string();
                std::io::Error::new(kind, text).into()
            }
            Failure::Library(error) => Error::new_err(error.to_string()),
        }
    }
}

/// A request that does not fit.
pub fn refuse<T>(message: impl Into<String>) -> Result<T> {
    Err(march_lm::Error::Request(message.into()).into())
}

/// Called between calls of the model; says whether to stop.
pub type Watch<'a> = dyn FnMut() -> ControlFlow<()> + 'a;

/// Runs `work` without the GIL. Between calls of the model, `work` asks its argument whether to stop: it does if the
/// user pressed Ctrl-C, and then the result is a `KeyboardInterrupt`.
pub fn run<T, E>(py: Python<'_>, work: impl FnOnce(&mut Watch<'_>) -> Result<T, E> + Send) -> Result<T>
where
    T: Send,
    E: Into<Failure> + Send,
{
    let mut raised = None;
    let result = py.detach(|| {
        work(&mut || match Python::attach(|py| py.check_signals()) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                raised = Some(error);
                ControlFlow::Break(())
            }
        })
    });
    match raised {
        Some(error) => Err(error.into()),
        None => result.map_err(Into::into),
    }
}

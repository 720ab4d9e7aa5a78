//! What can be wrong with a call, said so that the caller can mend it.

/// An operation was called with arguments that it cannot take.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A tensor's shape does not fit the operation.
    #[error("{operation}: `{argument}` has shape {found:?}, expected {expected}")]
    Shape {
        /// The operation that was called.
        operation: &'static str,
        /// Which of its arguments does not fit.
        argument: &'static str,
        /// The shape that came.
        found: Vec<usize>,
        /// The shape that was expected, with the names of its dimensions.
        expected: String,
    },
    /// A value (an index, a size, a setting) does not fit the operation.
    #[error("{operation}: {message}")]
    Value {
        /// The operation that was called.
        operation: &'static str,
        /// What is wrong and what to do.
        message: String,
    },
    /// The engine does not implement the operation.
    #[error("{operation}: this engine does not implement it; use `Fallback` with an engine that does")]
    Unsupported {
        /// The operation that was called.
        operation: &'static str,
    },
}

/// The result of every public function of the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Refuses `found` unless it equals `expected`; `names` labels the dimensions in the message.
pub(crate) fn expect_shape(
    operation: &'static str,
    argument: &'static str,
    found: &[usize],
    expected: &[usize],
    names: &str,
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Shape {
        operation,
        argument,
        found: found.to_vec(),
        expected: format!("{expected:?} ({names})"),
    })
}

/// A shape error whose expectation is words rather than numbers.
pub(crate) fn bad_shape<T>(
    operation: &'static str,
    argument: &'static str,
    found: &[usize],
    expected: impl Into<String>,
) -> Result<T> {
    Err(Error::Shape { operation, argument, found: found.to_vec(), expected: expected.into() })
}

/// A value error.
pub(crate) fn bad_value<T>(operation: &'static str, message: impl Into<String>) -> Result<T> {
    Err(Error::Value { operation, message: message.into() })
}

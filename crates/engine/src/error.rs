//! Errors for invalid calls and failing devices, with messages that tell the caller what to fix.

use crate::tensor::DType;

/// An operation was called with invalid arguments, or could not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A tensor has a shape that the operation does not accept.
    #[error("{operation}: `{argument}` has shape {found:?}, expected {expected}")]
    Shape {
        /// Operation that was called.
        operation: &'static str,
        /// Argument with the wrong shape.
        argument: &'static str,
        /// Actual shape.
        found: Vec<usize>,
        /// Expected shape, with the names of its dimensions.
        expected: String,
    },
    /// A value (an index, a size, an option) that the operation does not accept.
    #[error("{operation}: {message}")]
    Value {
        /// Operation that was called.
        operation: &'static str,
        /// What is wrong and how to fix it.
        message: String,
    },
    /// The device does not implement the operation.
    #[error("{operation}: the device {device} does not implement it")]
    Unsupported {
        /// Operation that was called.
        operation: &'static str,
        /// Name of the device.
        device: String,
    },
    /// The tensors of a call are on different devices.
    #[error("{operation}: tensors are on two devices, {left} and {right}")]
    Devices {
        /// Operation that was called.
        operation: &'static str,
        /// Device of the first tensor.
        left: String,
        /// Device of another tensor.
        right: String,
    },
    /// The device is not there, does not support what is needed, or was lost.
    #[error("{message}")]
    Device {
        /// What is wrong and what to do.
        message: String,
    },
}

/// Result type of the engine's public functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns an error unless `found` equals `expected`; `names` labels the dimensions in the message.
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

/// Returns a shape error whose expected shape is described in words.
pub(crate) fn bad_shape<T>(
    operation: &'static str,
    argument: &'static str,
    found: &[usize],
    expected: impl Into<String>,
) -> Result<T> {
    Err(Error::Shape { operation, argument, found: found.to_vec(), expected: expected.into() })
}

/// Returns a value error.
pub(crate) fn bad_value<T>(operation: &'static str, message: impl Into<String>) -> Result<T> {
    Err(Error::Value { operation, message: message.into() })
}

/// Returns an error unless all lists that belong to another have its length.
pub(crate) fn expect_lengths(operation: &'static str, expected: usize, found: &[usize]) -> Result<()> {
    match found.iter().find(|&&found| found != expected) {
        Some(found) => {
            bad_value(operation, format!("got lists of {expected} and {found} that belong to each other"))
        }
        None => Ok(()),
    }
}

/// Error for a gradient of a packed weight.
pub(crate) fn no_gradient<T>(operation: &'static str, dtype: DType) -> Result<T> {
    bad_value(operation, format!("a weight in {dtype} has no gradient: train with f32 weights"))
}

//! Errors of the device, as errors of the engine.

use march_engine::{Error, Result};

/// Error that concerns the device itself, not the arguments of a call.
pub(crate) fn device<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::Device { message: message.into() })
}

/// A call that this engine leaves to another one.
pub(crate) fn unsupported<T>(operation: &'static str) -> Result<T> {
    Err(Error::Unsupported { operation })
}

//! Errors of the device, as errors of the engine.

use march_engine::{Error, Result};

/// Error that concerns the device itself, not the arguments of a call.
pub(crate) fn device<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::Device { message: message.into() })
}

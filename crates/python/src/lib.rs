//! The Python module `march_lm._march`: models, their memory, training and operations of march, for Python.
//!
//! Every function here converts arguments, runs a function of the library without the GIL, and converts the result. The
//! types that Python sees are described in `python/march_lm/_march.pyi`.

mod arrays;
mod bank;
mod error;
mod model;
mod ops;
mod routing;
mod sampling;
mod train;

/// The compiled part of `march_lm`.
#[pyo3::pymodule]
mod _march {
    #[pymodule_export]
    use crate::bank::{Bank, Pieces};
    #[pymodule_export]
    use crate::error::Error;
    #[pymodule_export]
    use crate::model::{Model, load, presets};
    #[pymodule_export]
    use crate::ops::{
        Backward, anchor_read_vjp, gated_delta_vjp, log_linear_delta_vjp, set_threads, threads,
    };
    #[pymodule_export]
    use crate::routing::Routing;
    #[pymodule_export]
    use crate::train::{metrics, train};

    /// A diary of 60 days to ask the model inside the package about.
    #[pymodule_export]
    const EXAMPLE: &str = march_lm::disk::EXAMPLE;
}

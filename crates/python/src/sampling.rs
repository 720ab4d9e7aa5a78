//! How a text is continued, from keyword arguments.

use march_lm::generate::{Limits, Sampling};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::error::Result;

/// Reads the keyword arguments that `generate` and `chat` have in common.
pub fn read(max_tokens: usize, given: Option<&Bound<'_, PyDict>>) -> Result<(Sampling, Limits)> {
    let (mut sampling, mut limits) = (Sampling::default(), Limits { max_tokens, stop: Vec::new() });
    for (name, value) in given.into_iter().flatten() {
        let name: String = name.extract()?;
        match name.as_str() {
            "temperature" => sampling.temperature = value.extract()?,
            "top_k" => sampling.top_k = value.extract()?,
            "top_p" => sampling.top_p = value.extract()?,
            "repetition_penalty" => sampling.repetition_penalty = value.extract()?,
            "penalty_window" => sampling.penalty_window = value.extract()?,
            "seed" => sampling.seed = value.extract()?,
            "stop" if value.is_instance_of::<PyString>() => limits.stop = vec![value.extract()?],
            "stop" => limits.stop = value.extract()?,
            _ => {
                let message = format!(
                    "`{name}` is not an argument; those of sampling are temperature, top_k, top_p, \
                     repetition_penalty, penalty_window, seed and stop"
                );
                return Err(PyTypeError::new_err(message).into());
            }
        }
    }
    sampling.check()?;
    Ok((sampling, limits))
}

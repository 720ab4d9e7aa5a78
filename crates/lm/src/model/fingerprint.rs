//! A model's fingerprint: a SHA-256 of its configuration, its parameters' names and shapes, and a sample of their
//! numbers. Hashing all numbers of a large model would take seconds. Training changes nearly all of them, so a few
//! thousand per tensor are enough to distinguish two models.

use march_engine::Tensor;

use super::{Model, ModelConfig, ParameterSpec};
use crate::error::Result;
use crate::tokenizer::sha256;

/// Number of rows sampled per tensor, and of numbers sampled per row.
const ROWS: usize = 16;
const COLUMNS: usize = 256;

/// `count` of the numbers below `size`, evenly spaced from the first to the last, or all of them.
fn spread(size: usize, count: usize) -> impl Iterator<Item = usize> {
    let taken = size.min(count);
    (0..taken).map(move |i| if taken == size { i } else { i * (size - 1) / (taken - 1) })
}

/// Number of rows and their width; a tensor of one dimension is one row.
fn rows_of(shape: &[usize]) -> (usize, usize) {
    match shape {
        [rows, rest @ ..] if !rest.is_empty() => (*rows, rest.iter().product()),
        _ => (1, shape.iter().product()),
    }
}

/// Computes the fingerprint. `row` returns numbers, given a parameter's index, one of its rows, and columns in it.
fn fingerprint(
    config: &ModelConfig,
    layout: &[ParameterSpec],
    mut row: impl FnMut(usize, usize, &[usize]) -> Result<Vec<f32>>,
) -> Result<String> {
    let mut bytes = config.identity().into_bytes();
    for (i, ParameterSpec { name, shape, .. }) in layout.iter().enumerate() {
        bytes.extend_from_slice(format!("{name} {shape:?}\n").as_bytes());
        let (rows, width) = rows_of(shape);
        let columns: Vec<usize> = spread(width, COLUMNS).collect();
        for r in spread(rows, ROWS) {
            bytes.extend(row(i, r, &columns)?.iter().flat_map(|number| number.to_le_bytes()));
        }
    }
    Ok(sha256(&bytes))
}

impl Model {
    /// Identifies this model with these parameters: a SHA-256, in hexadecimal, of the configuration, the parameters'
    /// names and shapes, and up to 4096 numbers of each.
    pub fn fingerprint(&self, parameters: &[Tensor]) -> Result<String> {
        fingerprint(&self.config, &self.layout, |i, r, columns| {
            let whole = self.layout[i].shape.len() < 2;
            let numbers = match whole {
                true => parameters[i].to_f32(),
                false => parameters[i].slice(0, r..r + 1)?.to_f32(),
            };
            Ok(columns.iter().map(|&c| numbers[c]).collect())
        })
    }

    /// The fingerprint of this model with parameters stored elsewhere: `numbers(i, places)` returns the numbers of
    /// parameter i at these places in row-major order.
    pub(crate) fn fingerprint_of(
        &self,
        mut numbers: impl FnMut(usize, &[usize]) -> Result<Vec<f32>>,
    ) -> Result<String> {
        fingerprint(&self.config, &self.layout, |i, r, columns| {
            let (_, width) = rows_of(&self.layout[i].shape);
            numbers(i, &columns.iter().map(|c| r * width + c).collect::<Vec<_>>())
        })
    }
}

//! The reference device: f64, computed directly from the equations. It is slow and serves as ground truth.

use crate::array::Array;
use crate::device::{Backend, Device, Table};
use crate::error::Result;
use crate::ops::{accumulate, gated_delta, layout, pack, rms_norm};
use crate::tensor::Data;

/// The reference device's backend. [`Device::reference`] makes a device of it.
pub struct Reference {
    table: Table,
}

fn table() -> Table {
    Table::of::<Reference>()
        .with(accumulate::reference::accumulate)
        .with(accumulate::reference::append)
        .with(pack::round)
        .with(pack::unround)
        .with(layout::reference::slice)
        .with(layout::reference::place)
        .with(layout::reference::concat)
        .with(layout::reference::permute)
        .with(layout::reference::reshape)
        .with(rms_norm::reference::forward)
        .with(rms_norm::reference::backward)
        .with(rms_norm::reference::gated_forward)
        .with(rms_norm::reference::gated_backward)
        .with(gated_delta::reference::forward)
        .with(gated_delta::reference::backward)
        .build()
}

impl Device {
    /// The reference device: every operation in f64, directly from its equation.
    pub fn reference() -> Self {
        Self::new(Reference { table: table() })
    }
}

impl Backend for Reference {
    fn name(&self) -> &str {
        "reference"
    }
    fn table(&self) -> &Table {
        &self.table
    }
    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<Data> {
        Ok(Array::detached(data.iter().map(|&v| f64::from(v)).collect(), shape).into())
    }
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<Data> {
        Ok(Array::detached(data.to_vec(), shape).into())
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<Data> {
        Ok(Array::detached(vec![value; shape.iter().product()], shape).into())
    }
    fn to_f32(&self, data: &Data) -> Vec<f32> {
        self.to_f64(data).into_iter().map(|v| v as f32).collect()
    }
    fn to_f64(&self, data: &Data) -> Vec<f64> {
        match data {
            Data::F64(array) => array.data().to_vec(),
            Data::Rounded(rounded) => rounded.numbers().data().to_vec(),
            _ => unreachable!("a device reads only its own plain tensors"),
        }
    }
    fn chunk_tokens(&self) -> usize {
        gated_delta::CHUNK_TOKENS
    }
}

//! The reference device: f64, computed directly from the equations. It is slow and serves as ground truth.

use crate::array::Array;
use crate::device::{Backend, Device, Table};
use crate::error::Result;
use crate::ops::{
    accumulate, adamw, anchor_read, attention, cross_entropy, elementwise, embedding, gated_delta, layout,
    linear, log_linear, matmul, pack, reduce, rms_norm, rotary, short_conv, softmax, state_read, swiglu,
};
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
        .with(elementwise::reference::map)
        .with(elementwise::reference::map_backward)
        .with(elementwise::reference::zip)
        .with(elementwise::reference::zip_backward)
        .with(reduce::reference::sum)
        .with(reduce::reference::mean)
        .with(reduce::reference::expand)
        .with(reduce::reference::sum_to)
        .with(softmax::reference::forward)
        .with(softmax::reference::backward)
        .with(matmul::reference::forward)
        .with(matmul::reference::backward)
        .with(rotary::reference::forward)
        .with(rotary::reference::backward)
        .with(embedding::reference::forward)
        .with(embedding::reference::backward)
        .with(swiglu::reference::forward)
        .with(swiglu::reference::backward)
        .with(adamw::reference::update)
        .with(adamw::reference::squared_norm)
        .with(rms_norm::reference::forward)
        .with(rms_norm::reference::backward)
        .with(rms_norm::reference::gated_forward)
        .with(rms_norm::reference::gated_backward)
        .with(gated_delta::reference::forward)
        .with(gated_delta::reference::backward)
        .with(log_linear::reference::forward)
        .with(log_linear::reference::backward)
        .with(state_read::reference::forward)
        .with(state_read::reference::backward)
        .with(anchor_read::reference::forward)
        .with(anchor_read::reference::backward)
        .with(anchor_read::reference::forward_stored)
        .with(anchor_read::reference::weights)
        .with(anchor_read::stored::store)
        .with(anchor_read::stored::to_host)
        .with(linear::reference::forward)
        .with(linear::reference::backward)
        .with(cross_entropy::reference::forward)
        .with(cross_entropy::reference::backward)
        .with(cross_entropy::reference::token_losses)
        .with(short_conv::reference::forward)
        .with(short_conv::reference::backward)
        .with(attention::reference::forward)
        .with(attention::reference::backward)
        .with(attention::reference::forward_blocks)
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

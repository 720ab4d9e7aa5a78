//! Weights in reduced precision on the device.

use march_engine::{Precision, Result};

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::tensor::Tensor;

/// Weight matrix [rows, width] in reduced precision on the device. Cloning copies a handle.
#[derive(Clone, Debug)]
pub struct Packed {
    shape: [usize; 2],
    precision: Precision,
}

impl Packed {
    pub(crate) fn new(_gpu: &Gpu, _weight: &Tensor, _precision: Precision) -> Result<Self> {
        unsupported("pack")
    }
    pub(crate) fn unpack(&self, _gpu: &Gpu) -> Result<Tensor> {
        unsupported("unpack")
    }
    pub(crate) fn shape(&self) -> &[usize; 2] {
        &self.shape
    }
    pub(crate) fn precision(&self) -> Precision {
        self.precision
    }
}

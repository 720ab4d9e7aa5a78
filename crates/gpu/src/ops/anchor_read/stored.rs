//! Anchor states in storage precision on the device.

use march_engine::Result;
use march_engine::ops::anchor_read::{Storage, StoredStates};

use crate::error::unsupported;
use crate::gpu::Gpu;
use crate::tensor::Tensor;

/// Anchor states [n, value_heads, d_k, d_v] in storage precision on the device. Cloning copies a handle.
#[derive(Clone, Debug)]
pub struct Stored {
    shape: [usize; 4],
    bytes: usize,
}

impl Stored {
    pub(crate) fn new(_gpu: &Gpu, _states: &Tensor, _storage: Storage) -> Result<Self> {
        unsupported("store_states")
    }
    pub(crate) fn to_host(&self, _gpu: &Gpu) -> Result<StoredStates> {
        unsupported("stored_to_host")
    }
    pub(crate) fn from_host(_gpu: &Gpu, _states: &StoredStates) -> Result<Self> {
        unsupported("stored_from_host")
    }
    pub(crate) fn shape(&self) -> [usize; 4] {
        self.shape
    }
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

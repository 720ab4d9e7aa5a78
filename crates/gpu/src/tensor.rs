//! Tensors on the device: contiguous, row-major f32, a handle on a buffer or on a part of one.

use std::fmt;
use std::sync::Arc;

use crate::buffer::Buffer;

/// Tensor on a GPU. Cloning copies a handle.
#[derive(Clone)]
pub struct Tensor {
    pub(crate) buffer: Arc<Buffer>,
    /// Where the numbers start in the buffer, in elements: a multiple of [`ALIGN`].
    start: usize,
    shape: Arc<[usize]>,
}

/// Elements that the start of a tensor is a multiple of: 256 bytes, which every device accepts.
pub(crate) const ALIGN: usize = 64;

impl Tensor {
    pub(crate) fn new(buffer: Buffer, shape: &[usize]) -> Self {
        Self { buffer: Arc::new(buffer), start: 0, shape: shape.into() }
    }

    /// Dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The last dimension; 1 for a scalar.
    pub(crate) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows of [`Tensor::width`] elements; 0 for an empty tensor.
    pub(crate) fn rows(&self) -> usize {
        self.len().checked_div(self.width()).unwrap_or(0)
    }

    /// The same numbers under another shape.
    pub(crate) fn reshaped(&self, shape: &[usize]) -> Self {
        Self { buffer: Arc::clone(&self.buffer), start: self.start, shape: shape.into() }
    }

    /// A tensor of its own within this one's buffer, `start` elements after this one's.
    pub(crate) fn part(&self, start: usize, shape: &[usize]) -> Self {
        debug_assert!(start.is_multiple_of(ALIGN), "a part starts at {start}");
        Self { buffer: Arc::clone(&self.buffer), start: self.start + start, shape: shape.into() }
    }

    /// Where the numbers start in the buffer, in elements.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Changes the shape; the buffer must have room for it.
    pub(crate) fn reshape(&mut self, shape: &[usize]) {
        self.shape = shape.into();
    }

    /// Number of elements that the buffer has room for; a tensor may use only the first of them.
    pub(crate) fn capacity(&self) -> usize {
        (self.buffer.raw().size() / 4) as usize - self.start
    }

    /// Whether no other tensor shares the buffer, so that it may be changed in place.
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpu tensor {:?}", self.shape)
    }
}

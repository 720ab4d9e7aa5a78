//! Arrays on the device: contiguous, row-major f32, a handle on a buffer or on a part of one. A plain tensor of this
//! device holds one.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use march_engine::{DType, Data, Foreign, Tensor};

use crate::buffer::Buffer;

/// Numbers on a GPU. Cloning copies a handle.
#[derive(Clone)]
pub(crate) struct GpuArray {
    pub buffer: Arc<Buffer>,
    /// Where the numbers start in the buffer, in elements: a multiple of [`ALIGN`].
    start: usize,
    shape: Arc<[usize]>,
}

/// Elements that the start of an array is a multiple of: 256 bytes, which every device accepts.
pub(crate) const ALIGN: usize = 64;

/// The array of a plain tensor.
pub(crate) fn array(tensor: &Tensor) -> &GpuArray {
    GpuArray::of(tensor.data())
}

/// The arrays of plain tensors.
pub(crate) fn arrays(tensors: &[Tensor]) -> Vec<&GpuArray> {
    tensors.iter().map(array).collect()
}

/// Takes the array of a plain tensor, to change it in place if it [is unique](GpuArray::is_unique).
pub(crate) fn into_array(tensor: Tensor) -> GpuArray {
    let Some(array) = tensor.into_foreign() else { unreachable!("{NOT_OURS}") };
    array
}

/// Tensors of the same device as `like`.
pub(crate) fn tensors(like: &Tensor, arrays: Vec<GpuArray>) -> Vec<Tensor> {
    arrays.into_iter().map(|array| like.like(array)).collect()
}

const NOT_OURS: &str = "a device is given only tensors of its own";

impl GpuArray {
    pub fn new(buffer: Buffer, shape: &[usize]) -> Self {
        Self { buffer: Arc::new(buffer), start: 0, shape: shape.into() }
    }

    /// The array of a plain tensor's data.
    pub fn of(data: &Data) -> &Self {
        let found = match data {
            Data::Foreign(data) => (&**data as &dyn Any).downcast_ref(),
            _ => None,
        };
        let Some(array) = found else { unreachable!("{NOT_OURS}") };
        array
    }

    /// Dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The last dimension; 1 for a scalar.
    pub fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows of [`GpuArray::width`] elements; 0 for an empty array.
    pub fn rows(&self) -> usize {
        self.len().checked_div(self.width()).unwrap_or(0)
    }

    /// The same numbers under another shape.
    pub fn reshaped(&self, shape: &[usize]) -> Self {
        Self { buffer: Arc::clone(&self.buffer), start: self.start, shape: shape.into() }
    }

    /// An array of its own within this one's buffer, `start` elements after this one's.
    pub fn part(&self, start: usize, shape: &[usize]) -> Self {
        debug_assert!(start.is_multiple_of(ALIGN), "a part starts at {start}");
        Self { buffer: Arc::clone(&self.buffer), start: self.start + start, shape: shape.into() }
    }

    /// Where the numbers start in the buffer, in elements.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Changes the shape; the buffer must have room for it.
    pub fn reshape(&mut self, shape: &[usize]) {
        self.shape = shape.into();
    }

    /// Number of elements that the buffer has room for; an array may use only the first of them.
    pub fn capacity(&self) -> usize {
        (self.buffer.raw().size() / 4) as usize - self.start
    }

    /// Whether no other array shares the buffer, so that it may be changed in place.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1
    }
}

impl Foreign for GpuArray {
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn is_plain(&self) -> bool {
        true
    }
    fn bytes(&self) -> usize {
        4 * self.len()
    }
}

impl From<GpuArray> for Data {
    fn from(array: GpuArray) -> Self {
        Self::Foreign(Arc::new(array))
    }
}

impl fmt::Debug for GpuArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpu array {:?}", self.shape)
    }
}

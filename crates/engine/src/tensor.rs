//! A tensor: elements on a device and, if it is recorded, a place on a tape. Cloning copies a handle.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::array::{Array, element_count};
use crate::device::Device;
use crate::error::{Result, bad_value};
use crate::ops::anchor_read::StoredStates;
use crate::ops::pack::{PackedWeight, RoundedWeight};
use crate::precision::Precision;
use crate::tape::Record;

/// Number type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// 64 bits: the reference device.
    F64,
    /// 32 bits.
    F32,
    /// 8 significant bits; for weights and stored states.
    Bf16,
    /// One byte and one scale per row; for weights and stored states.
    Int8,
}

impl From<Precision> for DType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::Bf16,
            Precision::Int8 => Self::Int8,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        })
    }
}

/// The elements of a tensor, in the form of its device.
#[derive(Clone, Debug)]
pub enum Data {
    /// Elements on the CPU.
    F32(Array<f32>),
    /// Elements on the reference device.
    F64(Array<f64>),
    /// A weight matrix packed by the CPU.
    Packed(PackedWeight),
    /// A weight matrix rounded by the reference device.
    Rounded(RoundedWeight),
    /// Anchor states in storage precision, in host memory or in a file.
    Stored(Arc<StoredStates>),
    /// Data of a device that another crate implements.
    Foreign(Arc<dyn Foreign>),
}

/// Data of a device that another crate implements.
pub trait Foreign: Any + fmt::Debug + Send + Sync {
    /// Dimensions.
    fn shape(&self) -> &[usize];
    /// Number type.
    fn dtype(&self) -> DType;
    /// Whether every operation can read it, unlike packed weights and stored states.
    fn is_plain(&self) -> bool;
    /// Size in bytes.
    fn bytes(&self) -> usize;
}

/// Elements on a device. Every operation computes its result immediately; if one of its inputs is recorded on a
/// [`crate::Tape`], so is the result.
#[derive(Clone)]
pub struct Tensor {
    data: Data,
    device: Device,
    record: Option<Record>,
}

impl Tensor {
    /// Wraps data of a device.
    pub fn new(data: impl Into<Data>, device: &Device) -> Self {
        Self { data: data.into(), device: device.clone(), record: None }
    }

    /// Creates a tensor from values in row-major order.
    pub fn from_slice(values: &[f32], shape: &[usize], device: &Device) -> Result<Self> {
        check_count(values.len(), shape)?;
        Ok(Self::new(device.from_f32(values, shape)?, device))
    }

    /// Creates a tensor from values in row-major order, rounded to the device's number type.
    pub fn from_f64(values: &[f64], shape: &[usize], device: &Device) -> Result<Self> {
        check_count(values.len(), shape)?;
        Ok(Self::new(device.from_f64(values, shape)?, device))
    }

    /// Creates a tensor filled with `value`.
    pub fn full(shape: &[usize], value: f64, device: &Device) -> Result<Self> {
        element_count("full", shape)?;
        Ok(Self::new(device.full(shape, value)?, device))
    }

    /// Wraps the result of a kernel: data of the same device as this tensor.
    pub fn like(&self, data: impl Into<Data>) -> Self {
        Self::new(data, &self.device)
    }

    /// Dimensions.
    pub fn shape(&self) -> &[usize] {
        match &self.data {
            Data::F32(array) => array.shape(),
            Data::F64(array) => array.shape(),
            Data::Packed(weight) => weight.shape(),
            Data::Rounded(weight) => weight.shape(),
            Data::Stored(states) => states.shape(),
            Data::Foreign(data) => data.shape(),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number type of the elements.
    pub fn dtype(&self) -> DType {
        match &self.data {
            Data::F32(_) => DType::F32,
            Data::F64(_) => DType::F64,
            Data::Packed(weight) => weight.precision().into(),
            Data::Rounded(weight) => weight.precision().into(),
            Data::Stored(states) => states.storage().into(),
            Data::Foreign(data) => data.dtype(),
        }
    }

    /// Whether every operation can read it, unlike packed weights ([`Tensor::pack`]) and stored states
    /// ([`Tensor::store`]).
    pub fn is_plain(&self) -> bool {
        match &self.data {
            Data::F32(_) | Data::F64(_) => true,
            Data::Packed(_) | Data::Rounded(_) | Data::Stored(_) => false,
            Data::Foreign(data) => data.is_plain(),
        }
    }

    /// Size in bytes. Elements of the reference device count as f32, so that sizes do not depend on the device.
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(_) | Data::F64(_) => self.len() * size_of::<f32>(),
            Data::Packed(weight) => weight.bytes(),
            Data::Rounded(weight) => weight.bytes(),
            Data::Stored(states) => states.bytes(),
            Data::Foreign(data) => data.bytes(),
        }
    }

    /// Bytes of memory that the elements take, with the spare room of a buffer that grows.
    pub fn held_bytes(&self) -> usize {
        match &self.data {
            Data::F32(array) => array.held_bytes(),
            Data::F64(array) => array.held_bytes(),
            _ => self.bytes(),
        }
    }

    /// A number that is equal for two tensors that share their elements, as clones do, as long as both exist.
    pub fn identity(&self) -> usize {
        match &self.data {
            Data::F32(array) => array.data().as_ptr().addr(),
            Data::F64(array) => array.data().as_ptr().addr(),
            Data::Packed(weight) => weight.address(),
            Data::Rounded(weight) => weight.numbers().data().as_ptr().addr(),
            Data::Stored(states) => Arc::as_ptr(states).addr(),
            Data::Foreign(data) => Arc::as_ptr(data).addr(),
        }
    }

    /// The device that holds the elements.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The elements, in the form of the device.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// Values of a plain tensor in row-major order, as f32.
    pub fn to_f32(&self) -> Vec<f32> {
        self.device.to_f32(&self.data)
    }

    /// Values of a plain tensor in row-major order, as f64.
    pub fn to_f64(&self) -> Vec<f64> {
        self.device.to_f64(&self.data)
    }

    /// The same elements without a place on a tape: no gradient flows through the result.
    pub fn detach(&self) -> Self {
        Self { record: None, ..self.clone() }
    }

    /// Whether a gradient flows through this tensor.
    pub fn is_recorded(&self) -> bool {
        self.record.is_some()
    }

    pub(crate) fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    pub(crate) fn recorded(self, record: Record) -> Self {
        Self { record: Some(record), ..self }
    }

    /// Elements of a plain tensor on the CPU.
    pub(crate) fn f32(&self) -> &Array<f32> {
        match &self.data {
            Data::F32(array) => array,
            _ => unreachable!("the CPU runs only operations on its own plain tensors"),
        }
    }

    /// Elements of a plain tensor on the reference device.
    pub(crate) fn f64(&self) -> &Array<f64> {
        match &self.data {
            Data::F64(array) => array,
            _ => unreachable!("the reference device runs only operations on its own plain tensors"),
        }
    }

    /// Takes the elements of a plain tensor on the CPU, to change them in place if no other tensor shares them.
    pub(crate) fn into_f32(self) -> Array<f32> {
        match self.data {
            Data::F32(array) => array,
            _ => unreachable!("the CPU runs only operations on its own plain tensors"),
        }
    }

    /// Data of type `T` of a device that another crate implements.
    pub fn foreign<T: Foreign>(&self) -> Option<&T> {
        match &self.data {
            Data::Foreign(data) => (&**data as &dyn Any).downcast_ref(),
            _ => None,
        }
    }

    /// Takes the data of a device that another crate implements. They are cloned only if another tensor shares them.
    pub fn into_foreign<T: Foreign + Clone>(self) -> Option<T> {
        let Data::Foreign(data) = self.data else { return None };
        let data: Arc<dyn Any + Send + Sync> = data;
        Some(Arc::unwrap_or_clone(data.downcast().ok()?))
    }
}

impl From<Array<f32>> for Data {
    fn from(array: Array<f32>) -> Self {
        Self::F32(array)
    }
}

impl From<Array<f64>> for Data {
    fn from(array: Array<f64>) -> Self {
        Self::F64(array)
    }
}

impl From<StoredStates> for Data {
    fn from(states: StoredStates) -> Self {
        Self::Stored(Arc::new(states))
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor{:?} in {} on {}", self.shape(), self.dtype(), self.device)
    }
}

/// Returns an error unless the number of values matches the shape.
fn check_count(found: usize, shape: &[usize]) -> Result<()> {
    let expected = element_count("tensor", shape)?;
    if found == expected {
        return Ok(());
    }
    bad_value("tensor", format!("got {found} values for shape {shape:?}, expected {expected}"))
}

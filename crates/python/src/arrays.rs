//! Arrays of Python as token ids and tensors, and the reverse.

use march_engine::{DType, Device, Tensor};
use march_lm::tokenizer::Tokenizer;
use numpy::{
    PyArray1, PyArrayDescrMethods, PyArrayDyn, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::{Result, refuse};

/// Anything that numpy can read: lists, `__array__`, or DLPack on the CPU. Without a copy where numpy needs none.
fn array<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyUntypedArray>> {
    let numpy = value.py().import("numpy")?;
    let only_dlpack = value.hasattr("__dlpack__")? && !value.hasattr("__array__")?;
    let read = if only_dlpack { "from_dlpack" } else { "asarray" };
    Ok(numpy.call_method1(read, (value,))?.cast_into()?)
}

/// Token ids: those of a text, or whole numbers in anything that numpy can read.
pub fn ids(value: &Bound<'_, PyAny>, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(tokenizer.encode(text.to_cow()?.as_ref())?);
    }
    let array = array(value)?;
    let dtype = array.dtype();
    if array.ndim() != 1 {
        return refuse(format!("token ids must have one dimension, but the shape is {:?}", array.shape()));
    }
    if !matches!(dtype.kind(), b'i' | b'u') && !array.is_empty() {
        let message = format!("token ids must be whole numbers or a text, but the array is of {dtype}");
        return Err(PyTypeError::new_err(message).into());
    }
    let numbers =
        array.call_method1("astype", ("int64",))?.cast_into::<PyArray1<i64>>().map_err(PyErr::from)?;
    let numbers = numbers.readonly();
    let id = |(at, &id): (usize, &i64)| match u32::try_from(id) {
        Ok(id) => Ok(id),
        Err(_) => refuse(format!("token id {id} at position {at} is not a number from 0 to {}", u32::MAX)),
    };
    numbers.as_array().iter().enumerate().map(id).collect()
}

/// An array of f32 or f64 and its shape.
pub struct Numbers<'py> {
    array: Bound<'py, PyUntypedArray>,
    /// Whether it is of f64.
    pub is_f64: bool,
    name: &'static str,
}

impl<'py> Numbers<'py> {
    /// Reads the argument `name`.
    pub fn new(name: &'static str, value: &Bound<'py, PyAny>) -> Result<Self> {
        let array = array(value)?;
        let dtype = array.dtype();
        let is_f64 = match (dtype.kind(), dtype.itemsize()) {
            (b'f', 4) => false,
            (b'f', 8) => true,
            _ => {
                let message = format!("`{name}` must be of float32 or float64, but is of {dtype}");
                return Err(PyTypeError::new_err(message).into());
            }
        };
        Ok(Self { array, is_f64, name })
    }

    /// Its dimensions.
    pub fn dims(&self) -> &[usize] {
        self.array.shape()
    }

    /// Its dimensions, of which there must be `N`; `what` names them.
    pub fn shape<const N: usize>(&self, what: &str) -> Result<[usize; N]> {
        let Ok(shape) = self.array.shape().try_into() else {
            let found = self.array.shape();
            return refuse(format!("`{}` has shape {found:?}, expected [{what}]", self.name));
        };
        Ok(shape)
    }

    /// A tensor of its numbers with another shape, on a device with the same type of numbers.
    pub fn tensor(&self, shape: &[usize], device: &Device) -> Result<Tensor> {
        let numpy = self.array.py().import("numpy")?;
        let flat = numpy.call_method1("ascontiguousarray", (&self.array,))?;
        let wrong = |_| PyTypeError::new_err(format!("`{}` is not an array of numbers", self.name));
        Ok(if self.is_f64 {
            let flat = flat.cast_into::<PyArrayDyn<f64>>().map_err(PyErr::from)?.readonly();
            Tensor::from_f64(flat.as_slice().map_err(wrong)?, shape, device)?
        } else {
            let flat = flat.cast_into::<PyArrayDyn<f32>>().map_err(PyErr::from)?.readonly();
            Tensor::from_slice(flat.as_slice().map_err(wrong)?, shape, device)?
        })
    }
}

/// Numbers as an array of numpy, which owns them.
pub fn of_f32<'py>(py: Python<'py>, numbers: Vec<f32>, shape: &[usize]) -> Result<Bound<'py, PyAny>> {
    Ok(PyArray1::from_vec(py, numbers).reshape(shape)?.into_any())
}

/// Whole numbers as an array of numpy.
pub fn of_i64<'py>(
    py: Python<'py>,
    numbers: impl Iterator<Item = usize>,
    shape: &[usize],
) -> Result<Bound<'py, PyAny>> {
    Ok(PyArray1::from_vec(py, numbers.map(|n| n as i64).collect()).reshape(shape)?.into_any())
}

/// A tensor as an array of numpy with another shape: float64 from the reference device, else float32.
pub fn of_tensor<'py>(py: Python<'py>, tensor: &Tensor, shape: &[usize]) -> Result<Bound<'py, PyAny>> {
    if tensor.dtype() == DType::F64 {
        let numbers = py.detach(|| tensor.to_f64());
        return Ok(PyArray1::from_vec(py, numbers).reshape(shape)?.into_any());
    }
    let numbers = py.detach(|| tensor.to_f32());
    of_f32(py, numbers, shape)
}

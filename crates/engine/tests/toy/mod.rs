//! A device that implements four operations, to prove that the rest of them can be left to another engine.
//!
//! It has a tensor type of its own and no checks: those come from `Engine`.
#![allow(dead_code)]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use march_engine::ops::elementwise::{Map, Zip};
use march_engine::ops::linear::Linear;
use march_engine::ops::rms_norm::RmsNormList;
use march_engine::{Error, Fallback, Kernels, Precision, Reference, Result, Weight, WeightOf};

/// A tensor of the device.
#[derive(Clone, Debug)]
pub struct ToyTensor {
    shape: Arc<[usize]>,
    data: Arc<[f64]>,
}

/// Counts how often each of its operations ran: linear, map, zip, rms_norm. With `CHUNK` above 0 it claims to run the
/// recurrence, with chunks of that length.
#[derive(Debug, Default)]
pub struct Device<const CHUNK: usize> {
    pub calls: [AtomicUsize; 4],
    pub lost: AtomicBool,
}

/// The device that claims no recurrence.
pub type Toy = Device<0>;

/// The device, with the reference engine for all that it does not implement.
pub fn engine() -> Fallback<Toy, Reference> {
    Fallback::new(Toy::default(), Reference)
}

impl<const CHUNK: usize> Device<CHUNK> {
    pub fn counts(&self) -> [usize; 4] {
        [0, 1, 2, 3].map(|i| self.calls[i].load(Ordering::Relaxed))
    }

    fn count(&self, operation: usize) {
        self.calls[operation].fetch_add(1, Ordering::Relaxed);
    }
}

fn tensor(data: Vec<f64>, shape: &[usize]) -> ToyTensor {
    ToyTensor { shape: shape.into(), data: data.into() }
}

impl<const CHUNK: usize> Kernels for Device<CHUNK> {
    type Tensor = ToyTensor;
    // The device neither packs weights nor stores states.
    type Packed = Infallible;
    type Stored = Infallible;

    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<ToyTensor> {
        Ok(tensor(data.iter().map(|&v| f64::from(v)).collect(), shape))
    }
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<ToyTensor> {
        Ok(tensor(data.to_vec(), shape))
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<ToyTensor> {
        Ok(tensor(vec![value; shape.iter().product()], shape))
    }
    fn shape<'a>(&self, tensor: &'a ToyTensor) -> &'a [usize] {
        &tensor.shape
    }
    fn to_f32(&self, tensor: &ToyTensor) -> Vec<f32> {
        tensor.data.iter().map(|&v| v as f32).collect()
    }
    fn to_f64(&self, tensor: &ToyTensor) -> Vec<f64> {
        tensor.data.to_vec()
    }
    fn packed_shape<'a>(&self, packed: &'a Infallible) -> &'a [usize; 2] {
        match *packed {}
    }
    fn packed_precision(&self, packed: &Infallible) -> Precision {
        match *packed {}
    }
    fn stored_shape(&self, states: &Infallible) -> [usize; 4] {
        match *states {}
    }
    fn stored_bytes(&self, states: &Infallible) -> usize {
        match *states {}
    }

    const CHUNK_TOKENS: usize = if CHUNK > 0 { CHUNK } else { 1 };
    const RECURRENT: bool = CHUNK > 0;

    fn check(&self) -> Result<()> {
        match self.lost.load(Ordering::Relaxed) {
            true => Err(Error::Device { message: "the toy was lost".into() }),
            false => Ok(()),
        }
    }

    fn linear(&self, input: Linear<&ToyTensor, WeightOf<'_, Self>>) -> Result<ToyTensor> {
        self.count(0);
        let weight = match input.weight {
            Weight::Full(weight) => weight,
            Weight::Packed(packed) => match *packed {},
        };
        let (outer, inner) = (weight.shape[0], weight.shape[1]);
        let mut y = Vec::new();
        for row in 0..input.x.shape.iter().rev().skip(1).product() {
            for o in 0..outer {
                let start = input.bias.map_or(0.0, |bias| bias.data[o]);
                let dot = |i: usize| input.x.data[row * inner + i] * weight.data[o * inner + i];
                y.push((0..inner).fold(start, |sum, i| sum + dot(i)));
            }
        }
        let mut shape = input.x.shape.to_vec();
        *shape.last_mut().unwrap() = outer;
        Ok(tensor(y, &shape))
    }
    /// A device may also leave some cases of an operation to the other engine: here, two functions only.
    fn map(&self, kind: Map, x: &ToyTensor) -> Result<ToyTensor> {
        let f = |v: f64| match kind {
            Map::Neg => Some(-v),
            Map::Scale(factor) => Some(factor * v),
            _ => None,
        };
        let data: Option<Vec<f64>> = x.data.iter().map(|&v| f(v)).collect();
        let data = data.ok_or(Error::Unsupported { operation: "map" })?;
        self.count(1);
        Ok(tensor(data, &x.shape))
    }
    /// Without broadcasting.
    fn zip(&self, kind: Zip, a: &ToyTensor, b: &ToyTensor) -> Result<ToyTensor> {
        if a.shape != b.shape {
            return Err(Error::Unsupported { operation: "zip" });
        }
        self.count(2);
        let f = |a: f64, b: f64| match kind {
            Zip::Add => a + b,
            Zip::Sub => a - b,
            Zip::Mul => a * b,
            Zip::Div => a / b,
        };
        Ok(tensor(a.data.iter().zip(&b.data[..]).map(|(&a, &b)| f(a, b)).collect(), &a.shape))
    }
    fn rms_norm(&self, input: RmsNormList<'_, &ToyTensor>, eps: f64) -> Result<Vec<ToyTensor>> {
        self.count(3);
        let width = input.weight.shape[0];
        let one = |x: &&ToyTensor| {
            let mut y = x.data.to_vec();
            for row in y.chunks_exact_mut(width) {
                let mean = row.iter().map(|v| v * v).sum::<f64>() / width as f64;
                let r = 1.0 / (mean + eps).sqrt();
                row.iter_mut().zip(&input.weight.data[..]).for_each(|(v, w)| *v = *v * r * w);
            }
            tensor(y, &x.shape)
        };
        Ok(input.x.iter().map(one).collect())
    }
}

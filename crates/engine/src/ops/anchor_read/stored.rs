//! Anchor states in storage precision: f32, bf16, or int8 with one scale per row.
//!
//! A bank may hold many anchors, so states can be stored compactly; they are dequantised one tile at a time. They
//! are in memory, or in a file until first read; then a state is loaded, verified against its checksum and cached.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::numbers::{Numbers, Source};
use crate::device::Device;
use crate::error::{Result, bad_shape, bad_value};
use crate::op::Op;
use crate::precision::{to_bf16, to_int8};
use crate::simd::{self, LANES, Simd};
use crate::tensor::{self, Tensor};

/// Precision of stored anchor states; int8 has one scale for each row of d_v elements.
pub use crate::precision::Storage;

/// Converts anchor states to storage precision.
pub struct StoreStates {
    /// States, [n, value_heads, d_k, d_v].
    pub states: Tensor,
    /// Precision of the result.
    pub storage: Storage,
}

impl Op for StoreStates {
    const NAME: &'static str = "store_states";
    /// Shape of the states.
    type Sizes = [usize; 4];
    type Output = Tensor;

    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.states]
    }
    fn check(&self) -> Result<[usize; 4]> {
        let shape = self.states.shape();
        let expected = "[anchors, value_heads, d_k, d_v]";
        shape.try_into().or_else(|_| bad_shape(Self::NAME, "states", shape, expected))
    }
}

/// Copies stored states to host memory, in the format that is written to files.
pub struct StatesToHost {
    /// States that [`Tensor::store`] or [`Tensor::from_stored`] made.
    pub states: Tensor,
}

impl Op for StatesToHost {
    const NAME: &'static str = "stored_to_host";
    type Sizes = ();
    type Output = Arc<StoredStates>;

    fn inputs(&self) -> Vec<&Tensor> {
        Vec::new()
    }
    fn weights(&self) -> Vec<&Tensor> {
        vec![&self.states]
    }
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

impl Tensor {
    /// Converts anchor states [n, value_heads, d_k, d_v] to storage precision. `anchor_read_stored` reads the result,
    /// without gradients.
    pub fn store(&self, storage: Storage) -> Result<Tensor> {
        StoreStates { states: self.detach(), storage }.run()
    }

    /// Stored states in host memory, in the format that is written to files.
    pub fn stored(&self) -> Result<Arc<StoredStates>> {
        StatesToHost { states: self.clone() }.run()
    }

    /// Stored states from host memory, or from a source that is read on first use.
    pub fn from_stored(states: StoredStates, device: &Device) -> Result<Tensor> {
        Ok(Self::new(device.stored_from_host(states)?, device))
    }
}

/// [`StoreStates`] on a device whose memory is the host's.
pub(crate) fn store<B>(_: &B, op: StoreStates, shape: [usize; 4]) -> Result<Tensor> {
    let values = match op.states.data() {
        tensor::Data::F32(array) => Cow::Borrowed(array.data()),
        _ => Cow::Owned(op.states.to_f32()),
    };
    Ok(op.states.like(StoredStates::new(&values, shape, op.storage)))
}

/// [`StatesToHost`] on a device whose memory is the host's.
pub(crate) fn to_host<B>(_: &B, op: StatesToHost, (): ()) -> Result<Arc<StoredStates>> {
    host(&op.states).cloned()
}

/// Stored states in host memory.
pub(super) fn host(states: &Tensor) -> Result<&Arc<StoredStates>> {
    match states.data() {
        tensor::Data::Stored(stored) => Ok(stored),
        _ => bad_value("stored_states", "the tensor does not hold stored states"),
    }
}

/// Stored anchor states, [n, value_heads, d_k, d_v].
#[derive(Clone, Debug)]
pub struct StoredStates {
    shape: [usize; 4],
    data: Data,
}

#[derive(Clone, Debug)]
enum Data {
    F32(Numbers<f32>),
    Bf16(Numbers<u16>),
    Int8 { codes: Numbers<i8>, scales: Numbers<f32> },
}

impl StoredStates {
    /// Converts states [n, value_heads, d_k, d_v] to the given storage precision.
    fn new(data: &[f32], shape: [usize; 4], storage: Storage) -> Self {
        let data = match storage {
            Storage::F32 => Data::F32(Numbers::Own(data.to_vec())),
            Storage::Bf16 => Data::Bf16(Numbers::Own(data.iter().map(|&v| to_bf16(v)).collect())),
            Storage::Int8 => {
                let width = shape[3].max(1);
                let mut codes = vec![0; data.len()];
                let rows = data.chunks_exact(width).zip(codes.chunks_exact_mut(width));
                let scales = rows.map(|(row, codes)| to_int8(row, codes)).collect();
                Data::Int8 { codes: Numbers::Own(codes), scales: Numbers::Own(scales) }
            }
        };
        Self { shape, data }
    }

    /// Lazily loaded states, with the byte range in the source and the checksum of each of [`StoredStates::parts`].
    /// Nothing is loaded yet.
    pub fn distant(
        source: &Arc<dyn Source>,
        shape: [usize; 4],
        storage: Storage,
        parts: &[(Range<usize>, u64)],
    ) -> Result<Self> {
        let [n, heads, key_dim, value_dim] = shape;
        let counts = [heads, key_dim].iter().try_fold(n, |rows, &size| rows.checked_mul(size));
        let counts = counts.and_then(|rows| Some((rows, rows.checked_mul(value_dim)?)));
        let data = match (storage, parts, counts) {
            (Storage::F32, [(range, sum)], Some((_, count))) => {
                Data::F32(Numbers::distant(source, range.clone(), *sum, count)?)
            }
            (Storage::Bf16, [(range, sum)], Some((_, count))) => {
                Data::Bf16(Numbers::distant(source, range.clone(), *sum, count)?)
            }
            (Storage::Int8, [(range, sum), (scales, scales_sum)], Some((rows, count))) => Data::Int8 {
                codes: Numbers::distant(source, range.clone(), *sum, count)?,
                scales: Numbers::distant(source, scales.clone(), *scales_sum, rows)?,
            },
            _ => {
                let message = format!("{} parts of a file for {shape:?} states of {storage:?}", parts.len());
                return bad_value("stored_states", message);
            }
        };
        Ok(Self { shape, data })
    }

    /// File representation: one part of f32 or bf16 values, or int8 values followed by a part with the f32 row
    /// scales. Fails if the data cannot be loaded; data loaded only for this call is not cached.
    pub fn parts(&self) -> Result<Vec<Cow<'_, [u8]>>> {
        Ok(match &self.data {
            Data::F32(v) => vec![v.bytes()?],
            Data::Bf16(v) => vec![v.bytes()?],
            Data::Int8 { codes, scales } => vec![codes.bytes()?, scales.bytes()?],
        })
    }

    /// Whether the states can be read without loading.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        match &self.data {
            Data::F32(v) => v.is_here(),
            Data::Bf16(v) => v.is_here(),
            Data::Int8 { codes, scales } => codes.is_here() && scales.is_here(),
        }
    }

    /// Loads what is not in memory yet; [`StoredStates::check`] reports a failure.
    pub(crate) fn fetch(&self) {
        match &self.data {
            Data::F32(v) => _ = v.get(),
            Data::Bf16(v) => _ = v.get(),
            Data::Int8 { codes, scales } => _ = (codes.get(), scales.get()),
        }
    }

    /// Checksums of [`StoredStates::parts`]. For states in a file these are the recorded checksums, so nothing is
    /// loaded.
    pub fn checksums(&self) -> Vec<u64> {
        match &self.data {
            Data::F32(v) => vec![v.checksum()],
            Data::Bf16(v) => vec![v.checksum()],
            Data::Int8 { codes, scales } => vec![codes.checksum(), scales.checksum()],
        }
    }

    /// Returns an error if loading was attempted and failed or the data was corrupt. Results computed from such
    /// states are invalid.
    pub(crate) fn check(&self) -> Result<()> {
        match &self.data {
            Data::F32(v) => v.check(),
            Data::Bf16(v) => v.check(),
            Data::Int8 { codes, scales } => codes.check().and(scales.check()),
        }
    }

    /// Shape, [n, value_heads, d_k, d_v].
    pub fn shape(&self) -> &[usize; 4] {
        &self.shape
    }

    /// Storage precision.
    pub fn storage(&self) -> Storage {
        match self.data {
            Data::F32(_) => Storage::F32,
            Data::Bf16(_) => Storage::Bf16,
            Data::Int8 { .. } => Storage::Int8,
        }
    }

    /// Size of values and scales in bytes.
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(v) => v.len() * 4,
            Data::Bf16(v) => v.len() * 2,
            Data::Int8 { codes, scales } => codes.len() + scales.len() * 4,
        }
    }

    /// All states converted to f32. Fails if they cannot be loaded or are corrupt.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let width = self.shape[3].max(1);
        Ok(match &self.data {
            Data::F32(v) => v.read()?.to_vec(),
            Data::Bf16(v) => v.read()?.iter().map(|&b| bf16::from_bits(b).to_f32()).collect(),
            Data::Int8 { codes, scales } => codes
                .read()?
                .chunks_exact(width)
                .zip(scales.read()?)
                .flat_map(|(r, &s)| r.iter().map(move |&c| f32::from(c) * s))
                .collect(),
        })
    }

    /// State (`n`, `head`) in place, in storage precision; `None` if it could not be loaded.
    #[inline(always)]
    pub(crate) fn codes(&self, n: usize, head: usize) -> Option<Codes<'_>> {
        let [_, heads, rows, cols] = self.shape;
        let first = (n * heads + head) * rows;
        let all = first * cols..(first + rows) * cols;
        Some(match &self.data {
            Data::F32(v) => Codes::F32(&v.get()?[all]),
            Data::Bf16(v) => Codes::Bf16(&v.get()?[all]),
            Data::Int8 { codes, scales } => {
                Codes::Int8(&codes.get()?[all], &scales.get()?[first..first + rows])
            }
        })
    }

    /// Writes state (`n`, `head`) into panels; zeros if it could not be loaded, which [`StoredStates::check`] then
    /// reports.
    #[inline(always)]
    pub(crate) fn pack<S: Simd>(&self, s: S, n: usize, head: usize, panels: &mut [f32]) {
        let [_, _, rows, cols] = self.shape;
        let rp = simd::padded(rows);
        let panels = &mut panels[..rp * simd::padded(cols)];
        let codes = match self.codes(n, head) {
            Some(Codes::F32(state)) => return simd::pack(rows, cols, state, panels),
            other => other,
        };
        panels.fill(0.0);
        let Some(codes) = codes else { return };
        for r in 0..rows {
            for c in (0..cols).step_by(LANES) {
                let from = r * cols + c;
                let to = (c / simd::PANEL) * rp * simd::PANEL + r * simd::PANEL + c % simd::PANEL;
                let width = LANES.min(cols - c);
                let to = &mut panels[to..to + LANES];
                match codes {
                    Codes::F32(v) => to[..width].copy_from_slice(&v[from..from + width]),
                    Codes::Bf16(v) if width == LANES => s.store(to, s.load_bf16(&v[from..])),
                    Codes::Bf16(v) => {
                        (0..width).for_each(|i| to[i] = bf16::from_bits(v[from + i]).to_f32());
                    }
                    Codes::Int8(v, scales) if width == LANES => {
                        s.store(to, s.mul(s.load_i8(&v[from..]), s.splat(scales[r])));
                    }
                    Codes::Int8(v, scales) => {
                        (0..width).for_each(|i| to[i] = f32::from(v[from + i]) * scales[r]);
                    }
                }
            }
        }
    }
}

/// Elements of one state in storage precision, [d_k, d_v].
#[derive(Clone, Copy)]
pub(crate) enum Codes<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    /// Quantised values and row scales.
    Int8(&'a [i8], &'a [f32]),
}

impl Codes<'_> {
    /// Address and size in bytes.
    pub(crate) fn place(&self) -> (*const f32, usize) {
        match self {
            Self::F32(v) => (v.as_ptr(), size_of_val(*v)),
            Self::Bf16(v) => (v.as_ptr().cast(), size_of_val(*v)),
            Self::Int8(v, _) => (v.as_ptr().cast(), size_of_val(*v)),
        }
    }
}

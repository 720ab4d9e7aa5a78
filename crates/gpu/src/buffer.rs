//! Buffers on the device, and the pool that they return to.
//!
//! A buffer whose last handle is dropped goes back to the pool and serves a later tensor. That is safe without waiting
//! for the device: its commands run in the order in which they were recorded.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use march_engine::Result;
use wgpu::BufferUsages;

use crate::error::device;

/// Buffers that are not in use, by size in bytes.
#[derive(Default)]
pub(crate) struct Pool {
    free: Mutex<BTreeMap<u64, Vec<wgpu::Buffer>>>,
    total: Mutex<u64>,
}

/// A buffer on the device; dropping the last handle returns it to its pool.
pub(crate) struct Buffer {
    raw: Option<wgpu::Buffer>,
    /// `None` for a buffer that was filled by the host, which is not reused.
    pool: Option<Weak<Pool>>,
}

impl Buffer {
    /// The device's own handle.
    pub fn raw(&self) -> &wgpu::Buffer {
        let Some(raw) = &self.raw else { unreachable!("only drop takes it") };
        raw
    }

    /// A buffer filled with bytes, at least four.
    pub fn filled(gpu: &wgpu::Device, bytes: &[u8]) -> Result<Self> {
        let size = (bytes.len() as u64).next_multiple_of(4).max(4);
        let raw = create(gpu, size, true)?;
        if let Ok(mut view) = raw.get_mapped_range_mut(..) {
            view.slice(..bytes.len()).copy_from_slice(bytes);
        } else {
            return device("the memory of a new buffer cannot be written: the device was probably lost");
        }
        raw.unmap();
        Ok(Self { raw: Some(raw), pool: None })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let (Some(raw), Some(pool)) = (self.raw.take(), self.pool.as_ref().and_then(Weak::upgrade)) {
            let mut free = pool.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.entry(raw.size()).or_default().push(raw);
        }
    }
}

/// Sizes are rounded up to a multiple of an eighth of the power of two below, so that tensors of similar sizes share
/// buffers.
fn size_class(bytes: u64) -> u64 {
    let bytes = bytes.max(256);
    bytes.next_multiple_of((bytes.next_power_of_two() / 16).max(256))
}

impl Pool {
    /// A buffer of at least `bytes` bytes, with any contents.
    pub fn take(self: &Arc<Self>, gpu: &wgpu::Device, bytes: u64) -> Result<Buffer> {
        let size = size_class(bytes);
        let limits = gpu.limits();
        let largest = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        if bytes > largest {
            return device(format!(
                "a tensor of {} is larger than this device allows ({}): use a smaller micro-batch or a shorter sequence",
                megabytes(bytes),
                megabytes(largest)
            ));
        }
        let found = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.get_mut(&size).and_then(Vec::pop)
        };
        let raw = match found {
            Some(raw) => raw,
            None => self.allocate(gpu, size.min(largest.max(4) / 4 * 4))?,
        };
        Ok(Buffer { raw: Some(raw), pool: Some(Arc::downgrade(self)) })
    }

    fn allocate(&self, gpu: &wgpu::Device, size: u64) -> Result<wgpu::Buffer> {
        let raw = match create(gpu, size, false) {
            Ok(raw) => raw,
            Err(_) => {
                // Out of memory: give back what is not in use, then try once more.
                self.clear();
                let _ = gpu.poll(wgpu::PollType::wait_indefinitely());
                match create(gpu, size, false) {
                    Ok(raw) => raw,
                    Err(_) => {
                        let held = *self.total.lock().unwrap_or_else(PoisonError::into_inner);
                        return device(format!(
                            "the device is out of memory: a tensor of {} was wanted besides {} in use. Recompute blocks \
                             in the backward pass (`--set train.recompute=true`), or use a smaller micro-batch \
                             (`--set train.micro_batch=N`)",
                            megabytes(size),
                            megabytes(held)
                        ));
                    }
                }
            }
        };
        *self.total.lock().unwrap_or_else(PoisonError::into_inner) += size;
        Ok(raw)
    }

    /// Returns unused buffers to the system.
    pub fn clear(&self) {
        let free = std::mem::take(&mut *self.free.lock().unwrap_or_else(PoisonError::into_inner));
        let bytes: u64 = free.iter().map(|(size, list)| size * list.len() as u64).sum();
        let mut total = self.total.lock().unwrap_or_else(PoisonError::into_inner);
        *total = total.saturating_sub(bytes);
    }

    /// Bytes of the buffers that are not in use.
    pub fn unused(&self) -> u64 {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.iter().map(|(size, list)| size * list.len() as u64).sum()
    }

    /// Bytes of all pooled buffers, in use or not.
    pub fn bytes(&self) -> u64 {
        *self.total.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn create(gpu: &wgpu::Device, size: u64, mapped_at_creation: bool) -> Result<wgpu::Buffer> {
    let scope = gpu.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
    let raw = gpu.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation });
    match pollster::block_on(scope.pop()) {
        None => Ok(raw),
        Some(error) => device(format!("a buffer of {} could not be allocated: {error}", megabytes(size))),
    }
}

/// A number of bytes for a message.
pub(crate) fn megabytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

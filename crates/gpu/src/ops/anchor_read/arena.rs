//! Memory of stored anchor states: slots of one size in one growing buffer, so that a kernel reads any of many
//! anchors by one binding and a slot for each.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use march_engine::Result;
use march_engine::ops::anchor_read::Storage;

use crate::array::GpuArray;
use crate::error::device;
use crate::gpu::Gpu;

/// How one anchor's states [value_heads, d_k, d_v] lie in a slot: codes, then for int8 a scale for each row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Layout {
    /// As STORAGE in `states.wgsl`.
    pub storage: u32,
    /// Rows of d_v numbers.
    pub rows: usize,
    pub width: usize,
}

impl Layout {
    pub fn new(storage: Storage, [heads, key_dim, value_dim]: [usize; 3]) -> Self {
        let storage = match storage {
            Storage::F32 => 0,
            Storage::Bf16 => 1,
            Storage::Int8 => 2,
        };
        Self { storage, rows: heads * key_dim, width: value_dim }
    }

    pub fn storage(&self) -> Storage {
        [Storage::F32, Storage::Bf16, Storage::Int8][self.storage as usize]
    }

    /// Bytes of a code.
    pub fn code_bytes(&self) -> usize {
        4 >> self.storage
    }

    pub fn code_words(&self) -> usize {
        (self.rows * self.width * self.code_bytes()).div_ceil(4)
    }

    pub fn slot_words(&self) -> usize {
        self.code_words() + if self.storage == 2 { self.rows } else { 0 }
    }
}

/// The arenas of a device.
#[derive(Default)]
pub(crate) struct Arenas(Mutex<HashMap<Layout, Vec<Arc<Arena>>>>);

/// A buffer of slots. It grows by moving to a larger buffer.
pub(crate) struct Arena {
    pub layout: Layout,
    slots: Mutex<Slots>,
}

#[derive(Default)]
struct Slots {
    tensor: Option<GpuArray>,
    capacity: usize,
    /// Slots that were ever used, and those of them that are free.
    used: usize,
    free: Vec<u32>,
}

/// Slots of an arena that are in use; dropping it frees them. The device runs commands in the order of their
/// recording, so a slot may be reused at once.
pub(crate) struct SlotLease {
    pub arena: Arc<Arena>,
    pub slots: Vec<u32>,
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        let mut slots = self.arena.lock();
        slots.free.extend(&self.slots);
        if slots.free.len() == slots.used {
            *slots = Slots::default();
        }
    }
}

impl Arenas {
    /// Takes `count` slots, and lets `write` record what fills them in the arena's buffer.
    pub fn take(
        &self,
        gpu: &Gpu,
        layout: Layout,
        count: usize,
        write: impl FnOnce(&GpuArray, &[u32]) -> Result<()>,
    ) -> Result<SlotLease> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let list = all.entry(layout).or_default();
        for arena in list.iter() {
            if let Some(slots) = arena.take(gpu, count)? {
                return arena.fill(slots, write);
            }
        }
        let arena = Arc::new(Arena { layout, slots: Mutex::default() });
        list.push(Arc::clone(&arena));
        match arena.take(gpu, count)? {
            Some(slots) => arena.fill(slots, write),
            None => {
                device(format!("{count} anchor states of {} words each are too large", layout.slot_words()))
            }
        }
    }
}

impl Arena {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The buffer, with the contents of all slots that are in use.
    pub fn tensor(&self) -> Option<GpuArray> {
        self.lock().tensor.clone()
    }

    /// Reserves slots; `None` if a buffer for them would be larger than the device allows.
    fn take(self: &Arc<Self>, gpu: &Gpu, count: usize) -> Result<Option<SlotLease>> {
        let mut slots = self.lock();
        let words = self.layout.slot_words().max(1);
        let reused = count.min(slots.free.len());
        let needed = slots.used + count - reused;
        if needed > slots.capacity || slots.tensor.is_none() {
            let limits = gpu.limits();
            let bytes = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
            let most = bytes as usize / (4 * words);
            if needed > most {
                return Ok(None);
            }
            let capacity = needed.max(slots.capacity * 2).clamp(1, most.max(1));
            let tensor = gpu.empty(&[capacity * words])?;
            if let Some(old) = &slots.tensor {
                gpu.copy(old, 0, &tensor, 0, slots.used * words);
            }
            (slots.tensor, slots.capacity) = (Some(tensor), capacity);
        }
        let keep = slots.free.len() - reused;
        let mut list = slots.free.split_off(keep);
        list.extend(slots.used as u32..needed as u32);
        slots.used = needed;
        drop(slots);
        Ok(Some(SlotLease { arena: Arc::clone(self), slots: list }))
    }

    /// Fills slots while no one moves the buffer: [`Arenas::take`] holds the lock of all arenas.
    fn fill(
        self: &Arc<Self>,
        taken: SlotLease,
        write: impl FnOnce(&GpuArray, &[u32]) -> Result<()>,
    ) -> Result<SlotLease> {
        if let Some(tensor) = self.tensor() {
            write(&tensor, &taken.slots)?;
        }
        Ok(taken)
    }
}

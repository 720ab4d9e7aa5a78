//! Anchor states in storage precision on the device.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use march_engine::ops::anchor_read::{
    ReadPlan, Sizes, Source, StatesToHost, Storage, StoreStates, StoredStates,
};
use march_engine::{DType, Data, Error, Foreign, Result, Tensor, checksum};

use super::arena::{Layout, SlotLease};
use super::call::{Call, States};
use crate::array::{GpuArray, array};
use crate::gpu::Gpu;
use crate::kernel::Kernel;

/// Anchor states [n, value_heads, d_k, d_v] in storage precision on the device. Cloning copies a handle.
#[derive(Clone)]
pub(crate) struct Stored {
    shape: [usize; 4],
    taken: Arc<SlotLease>,
}

impl fmt::Debug for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpu states {:?} as {}", self.shape, self.taken.arena.layout.storage())
    }
}

fn store_kernel(entry: &'static str, storage: u32) -> Kernel {
    Kernel {
        name: "anchor_read/store",
        source: include_str!("store.wgsl"),
        entry,
        constants: vec![("STORAGE", storage)],
        writes: &[false, false, true, true],
    }
}

fn unstore_kernel(storage: u32) -> Kernel {
    Kernel {
        name: "anchor_read/unstore",
        source: concat!(
            include_str!("unstore.wgsl"),
            include_str!("numbers.wgsl"),
            include_str!("states.wgsl")
        ),
        entry: "unstore",
        constants: vec![("STORAGE", storage), ("SLOTS", 0)],
        writes: &[false, false, true],
    }
}

pub(super) fn kernels() -> Vec<Kernel> {
    let mut list = vec![store_kernel("scales", 2)];
    list.extend((0..3).flat_map(|storage| [store_kernel("codes", storage), unstore_kernel(storage)]));
    list
}

/// Bytes of states on their way to host memory.
#[derive(Debug)]
struct Copied(Vec<u8>);

impl Source for Copied {
    fn fetch(&self, start: usize, _: u64, bytes: &mut [u8]) -> Result<(), String> {
        let all = self.0.get(start..start + bytes.len()).ok_or("the range is outside the copied states")?;
        bytes.copy_from_slice(all);
        Ok(())
    }
}

pub(crate) fn store(gpu: &Gpu, op: StoreStates, shape: [usize; 4]) -> Result<Tensor> {
    Ok(op.states.like(Stored::new(gpu, array(&op.states), shape, op.storage)?))
}

pub(crate) fn to_host(gpu: &Gpu, op: StatesToHost, (): ()) -> Result<Arc<StoredStates>> {
    Ok(Arc::new(Stored::of(&op.states)?.to_host(gpu)?))
}

impl Stored {
    /// The states of a tensor.
    fn of(tensor: &Tensor) -> Result<&Self> {
        let message = "the tensor does not hold stored states of this device".into();
        tensor.foreign().ok_or(Error::Value { operation: "stored_states", message })
    }

    fn new(gpu: &Gpu, states: &GpuArray, shape: [usize; 4], storage: Storage) -> Result<Self> {
        let [n, sizes @ ..] = shape;
        let layout = Layout::new(storage, sizes);
        let taken = gpu.arenas().take(gpu, layout, n, |arena, slots| {
            let slots = gpu.upload_indices(slots)?;
            let inverses = gpu.empty(&[n * layout.rows])?;
            let tensors = [states, &slots, arena, &inverses];
            let counts = [n, layout.rows, layout.width, layout.slot_words(), layout.code_words()];
            let numbers = counts.map(|count| count as u32);
            if storage == Storage::Int8 {
                let groups = gpu.list((n * layout.rows).div_ceil(64));
                gpu.run(&store_kernel("scales", 2), &tensors, &numbers, groups)?;
            }
            let groups = gpu.list((n * layout.code_words()).div_ceil(64));
            gpu.run(&store_kernel("codes", layout.storage), &tensors, &numbers, groups)
        })?;
        Ok(Self { shape, taken: Arc::new(taken) })
    }

    fn to_host(&self, gpu: &Gpu) -> Result<StoredStates> {
        let layout = self.taken.arena.layout;
        let words = layout.slot_words();
        let copy = gpu.empty(&[self.shape[0] * words])?;
        if let Some(arena) = self.taken.arena.tensor() {
            for (i, &slot) in self.taken.slots.iter().enumerate() {
                gpu.copy(&arena, slot as usize * words, &copy, i * words, words);
            }
        }
        let bits: Vec<u8> = gpu.download(&copy).iter().flat_map(|v| v.to_bits().to_le_bytes()).collect();
        gpu.alive()?;
        let anchors = || bits.chunks_exact(4 * words.max(1));
        let codes = layout.rows * layout.width * layout.code_bytes();
        let mut bytes: Vec<u8> = anchors().flat_map(|slot| &slot[..codes]).copied().collect();
        let mut parts = vec![part(&bytes, 0..bytes.len())];
        if layout.storage() == Storage::Int8 {
            let start = bytes.len();
            bytes.extend(anchors().flat_map(|slot| &slot[4 * layout.code_words()..]));
            parts.push(part(&bytes, start..bytes.len()));
        }
        let source: Arc<dyn Source> = Arc::new(Copied(bytes));
        StoredStates::distant(&source, self.shape, layout.storage(), &parts)
    }

    pub fn from_host(gpu: &Gpu, states: &StoredStates) -> Result<Self> {
        let shape @ [n, sizes @ ..] = *states.shape();
        let layout = Layout::new(states.storage(), sizes);
        let words = layout.slot_words();
        let parts = states.parts()?;
        let codes = layout.rows * layout.width * layout.code_bytes();
        let mut bytes = vec![0; 4 * n * words];
        for (i, slot) in bytes.chunks_exact_mut(4 * words.max(1)).enumerate() {
            slot[..codes].copy_from_slice(&parts[0][i * codes..(i + 1) * codes]);
            if let Some(scales) = parts.get(1) {
                let size = 4 * layout.rows;
                slot[4 * layout.code_words()..].copy_from_slice(&scales[i * size..(i + 1) * size]);
            }
        }
        let bits: Vec<u32> =
            bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let copy = gpu.upload_indices(&bits)?;
        let taken = gpu.arenas().take(gpu, layout, n, |arena, slots| {
            for (i, &slot) in slots.iter().enumerate() {
                gpu.copy(&copy, i * words, arena, slot as usize * words, words);
            }
            Ok(())
        })?;
        Ok(Self { shape, taken: Arc::new(taken) })
    }
}

impl Foreign for Stored {
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn dtype(&self) -> DType {
        self.taken.arena.layout.storage().into()
    }
    fn is_plain(&self) -> bool {
        false
    }
    fn bytes(&self) -> usize {
        let layout = self.taken.arena.layout;
        layout.storage().bytes(self.shape[0] * layout.rows, layout.width)
    }
}

impl From<Stored> for Data {
    fn from(stored: Stored) -> Self {
        Self::Foreign(Arc::new(stored))
    }
}

/// Place and checksum of a part of the copied bytes.
fn part(bytes: &[u8], range: Range<usize>) -> (Range<usize>, u64) {
    let sum = checksum(&bytes[range.clone()]);
    (range, sum)
}

/// The states of a list for a kernel: their arena and a slot for each anchor. If they are in several arenas, a tensor
/// with copies of those that the plan makes visible.
pub(super) fn together(gpu: &Gpu, list: &[Tensor], sizes: &Sizes, plan: &ReadPlan) -> Result<States> {
    // The engine has checked the first.
    let one_each = (list.len() == sizes.anchors).then_some(1);
    let checked = |tensor| {
        let stored = Stored::of(tensor)?;
        sizes.check_stored(&stored.shape, one_each)?;
        Ok(stored)
    };
    let list = list.iter().map(checked).collect::<Result<Vec<&Stored>>>()?;
    let arena = &list[0].taken.arena;
    if let Some(tensor) = arena.tensor().filter(|_| list.iter().all(|s| Arc::ptr_eq(&s.taken.arena, arena))) {
        let layout = arena.layout;
        return Ok(States {
            tensor,
            storage: layout.storage,
            slot_words: layout.slot_words(),
            code_words: layout.code_words(),
            slots: Some(list.iter().flat_map(|s| &s.taken.slots).copied().collect()),
        });
    }
    let mut visible = vec![false; sizes.anchors];
    plan.segments.iter().flat_map(|segment| segment.visible.iter()).for_each(|m| visible[m] = true);
    let whole = gpu.empty(&[sizes.anchors, sizes.value_heads, sizes.key_dim, sizes.value_dim])?;
    let anchors = list.iter().flat_map(|s| s.taken.slots.iter().map(|&slot| (&s.taken.arena, slot)));
    for (m, (arena, slot)) in anchors.enumerate().filter(|&(m, _)| visible[m]) {
        let Some(tensor) = arena.tensor() else { continue };
        let count = sizes.value_heads * sizes.key_dim * sizes.value_dim;
        let words = Call::of_slot(sizes, &arena.layout, slot, m);
        let kernel = unstore_kernel(arena.layout.storage);
        gpu.run(&kernel, &[&tensor, &tensor, &whole], &words, gpu.list(count.div_ceil(64)))?;
    }
    Ok(States::whole(&whole, sizes))
}

//! Anchor states in storage precision on the device.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use march_engine::ops::anchor_read::{ReadPlan, Source, Storage, StoredStates};
use march_engine::{Error, Result, checksum};

use super::arena::{Layout, SlotLease};
use super::call::{Call, Sizes, States};
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::tensor::Tensor;

/// Anchor states [n, value_heads, d_k, d_v] in storage precision on the device. Cloning copies a handle.
#[derive(Clone)]
pub struct Stored {
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

impl Stored {
    pub(crate) fn new(gpu: &Gpu, states: &Tensor, storage: Storage) -> Result<Self> {
        let &[n, heads, key_dim, value_dim] = states.shape() else { unreachable!("the shape was checked") };
        let layout = Layout::new(storage, [heads, key_dim, value_dim]);
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
        Ok(Self { shape: [n, heads, key_dim, value_dim], taken: Arc::new(taken) })
    }

    pub(crate) fn to_host(&self, gpu: &Gpu) -> Result<StoredStates> {
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

    pub(crate) fn from_host(gpu: &Gpu, states: &StoredStates) -> Result<Self> {
        let [n, sizes @ ..] = states.shape();
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
        Ok(Self { shape: states.shape(), taken: Arc::new(taken) })
    }

    pub(crate) fn shape(&self) -> [usize; 4] {
        self.shape
    }

    pub(crate) fn bytes(&self) -> usize {
        let layout = self.taken.arena.layout;
        layout.storage().bytes(self.shape[0] * layout.rows, layout.width)
    }
}

/// Place and checksum of a part of the copied bytes.
fn part(bytes: &[u8], range: Range<usize>) -> (Range<usize>, u64) {
    let sum = checksum(&bytes[range.clone()]);
    (range, sum)
}

/// The states of a list for a kernel: their arena and a slot for each anchor. If they are in several arenas, a tensor
/// with copies of those that the plan makes visible.
pub(super) fn together(gpu: &Gpu, list: &[Arc<Stored>], sizes: &Sizes, plan: &ReadPlan) -> Result<States> {
    let one_each = list.len() == sizes.anchors;
    let expected = [sizes.value_heads, sizes.key_dim, sizes.value_dim];
    let wrong = list.iter().find(|s| s.shape[1..] != expected || (one_each && s.shape[0] != 1));
    if let Some(wrong) = wrong {
        return Err(Error::Shape {
            operation: "anchor_read",
            argument: "anchor_states",
            found: wrong.shape.to_vec(),
            expected: format!("one anchor of {expected:?} each, as the first"),
        });
    }
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

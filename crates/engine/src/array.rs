//! Arrays in host memory, and the pool that recycles their buffers.
//!
//! An array is always contiguous and row-major. Cloning copies a pointer. When the last clone is dropped, the
//! buffer returns to its pool, so a training step with the same shapes as the previous step allocates no memory
//! from the system.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Result, bad_value};

/// Elements of an array: `f32` and `f64`. All-zero bytes are the number zero.
pub trait Real: Copy + Default + Send + Sync + 'static {}

impl Real for f32 {}
impl Real for f64 {}

/// Owned memory aligned to a cache line. Large allocations use 2 MiB pages where the system supports them, because
/// the rows of one head are spread over many small pages.
pub(crate) struct Lines<R> {
    /// First element, at `base` or slightly after it.
    start: NonNull<R>,
    bytes: usize,
    base: NonNull<u8>,
    layout: Layout,
}

const LINE: usize = 64;
const LARGE_PAGE: usize = 2 << 20;

#[allow(unsafe_code)]
// SAFETY: the memory is owned, and its elements are `Send`.
unsafe impl<R: Real> Send for Lines<R> {}
#[allow(unsafe_code)]
// SAFETY: shared access only reads.
unsafe impl<R: Real> Sync for Lines<R> {}

impl<R: Real> Lines<R> {
    /// Allocates at least `len` zeros.
    #[allow(unsafe_code)]
    pub(crate) fn zeroed(len: usize) -> Self {
        let bytes = (len * size_of::<R>()).next_multiple_of(LINE).max(LINE);
        let large = bytes >= 2 * LARGE_PAGE;
        let align = if large { LARGE_PAGE } else { LINE };
        // Zeroed pages from the system cost nothing until touched, but the allocator provides them only for small
        // alignments; so over-allocate and align manually.
        let layout = Layout::from_size_align(bytes + align, 16).expect("a size that was checked");
        // SAFETY: the size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(memory) else { handle_alloc_error(layout) };
        let skip = memory.addr().next_multiple_of(align) - memory.addr();
        // SAFETY: `skip` is below `align`, so `bytes` bytes from here are inside the allocation.
        let start = unsafe { base.add(skip) };
        #[cfg(target_os = "linux")]
        if large {
            let whole = bytes / LARGE_PAGE * LARGE_PAGE;
            // SAFETY: advice on whole pages of owned memory; failure has no effect.
            unsafe { libc::madvise(start.as_ptr().cast(), whole, libc::MADV_HUGEPAGE) };
        }
        Self { start: start.cast(), bytes, base, layout }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.bytes / size_of::<R>()
    }

    #[allow(unsafe_code)]
    pub(crate) fn as_slice(&self) -> &[R] {
        // SAFETY: the memory is initialised (all-zero bytes are the number zero), aligned and owned.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.capacity()) }
    }

    #[allow(unsafe_code)]
    pub(crate) fn as_mut_slice(&mut self) -> &mut [R] {
        // SAFETY: as above; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.capacity()) }
    }
}

impl<R> Drop for Lines<R> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// Free buffers by capacity.
#[derive(Default)]
pub(crate) struct Pool<R: Real> {
    free: Mutex<BTreeMap<usize, Vec<Lines<R>>>>,
    /// Bytes held by live arrays.
    live: AtomicUsize,
}

impl<R: Real> Pool<R> {
    /// Returns a buffer of at least `len` elements with unspecified (but initialised) contents.
    fn take(&self, len: usize) -> Lines<R> {
        let class = size_class(len);
        let found = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.get_mut(&class).and_then(Vec::pop)
        };
        let lines = found.unwrap_or_else(|| Lines::zeroed(class));
        self.live.fetch_add(lines.bytes, Ordering::Relaxed);
        lines
    }

    fn give(&self, lines: Lines<R>) {
        self.live.fetch_sub(lines.bytes, Ordering::Relaxed);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry(lines.capacity()).or_default().push(lines);
    }

    /// Returns all free buffers to the system.
    #[allow(unsafe_code)]
    pub(crate) fn trim(&self) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).clear();
        // The allocator keeps what was freed between buffers that are in use, unless it is told.
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        // SAFETY: it may be called at any time, from any thread.
        unsafe {
            libc::malloc_trim(0);
        }
    }

    /// Bytes held by live arrays.
    pub(crate) fn live_bytes(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Bytes of free buffers in the pool.
    pub(crate) fn free_bytes(&self) -> usize {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.iter().map(|(class, list)| class * size_of::<R>() * list.len()).sum()
    }
}

/// Rounds a length up so that lengths within about an eighth of each other share buffers.
fn size_class(len: usize) -> usize {
    let step = (len.next_power_of_two() / 16).max(16);
    len.div_ceil(step).max(1) * step
}

struct Buffer<R: Real> {
    lines: Option<Lines<R>>,
    pool: Option<Arc<Pool<R>>>,
}

impl<R: Real> Drop for Buffer<R> {
    fn drop(&mut self) {
        if let (Some(lines), Some(pool)) = (self.lines.take(), &self.pool) {
            pool.give(lines);
        }
    }
}

/// Dimensions, stored inline for ranks up to four.
#[derive(Clone)]
enum Shape {
    Few([usize; 4], usize),
    Many(Vec<usize>),
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        let mut few = [0; 4];
        match few.get_mut(..dims.len()) {
            Some(to) => {
                to.copy_from_slice(dims);
                Self::Few(few, dims.len())
            }
            None => Self::Many(dims.to_vec()),
        }
    }
}

impl std::ops::Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        match self {
            Self::Few(dims, count) => &dims[..*count],
            Self::Many(dims) => dims,
        }
    }
}

/// Contiguous row-major elements in host memory: the data of a tensor on the CPU or on the reference device.
pub struct Array<R: Real> {
    buffer: Arc<Buffer<R>>,
    shape: Shape,
}

impl<R: Real> Clone for Array<R> {
    fn clone(&self) -> Self {
        Self { buffer: Arc::clone(&self.buffer), shape: self.shape.clone() }
    }
}

impl<R: Real> std::fmt::Debug for Array<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Array{:?}", self.shape())
    }
}

impl<R: Real> Array<R> {
    /// Array with unspecified contents; the caller must write every element.
    pub(crate) fn uninit(pool: &Arc<Pool<R>>, shape: &[usize]) -> Self {
        Self::with_capacity(pool, shape.iter().product(), shape)
    }

    /// Array with unspecified contents and 50 % spare capacity.
    pub(crate) fn uninit_with_room(pool: &Arc<Pool<R>>, shape: &[usize]) -> Self {
        let len: usize = shape.iter().product();
        Self::with_capacity(pool, len + len / 2, shape)
    }

    fn with_capacity(pool: &Arc<Pool<R>>, capacity: usize, shape: &[usize]) -> Self {
        let buffer = Buffer { lines: Some(pool.take(capacity)), pool: Some(Arc::clone(pool)) };
        Self { buffer: Arc::new(buffer), shape: shape.into() }
    }

    /// Appends elements in place and sets the shape. Returns false if the buffer is shared or lacks capacity.
    pub(crate) fn extend(&mut self, more: &Self, shape: &[usize]) -> bool {
        let (old, new) = (self.len(), self.len() + more.len());
        let Some(lines) = Arc::get_mut(&mut self.buffer).and_then(|buffer| buffer.lines.as_mut()) else {
            return false;
        };
        if lines.capacity() < new {
            return false;
        }
        lines.as_mut_slice()[old..new].copy_from_slice(more.data());
        self.shape = shape.into();
        true
    }

    /// Array of zeros.
    pub(crate) fn zeros(pool: &Arc<Pool<R>>, shape: &[usize]) -> Self {
        let mut array = Self::uninit(pool, shape);
        array.data_mut().fill(R::default());
        array
    }

    /// Array with the given contents.
    pub(crate) fn from_slice(pool: &Arc<Pool<R>>, data: &[R], shape: &[usize]) -> Result<Self> {
        let len = element_count("tensor", shape)?;
        if len != data.len() {
            return bad_value(
                "tensor",
                format!("got {} values for shape {shape:?}, expected {len}", data.len()),
            );
        }
        let mut array = Self::uninit(pool, shape);
        array.data_mut().copy_from_slice(data);
        Ok(array)
    }

    /// Array without a pool; for reference kernels and tests.
    pub(crate) fn detached(data: Vec<R>, shape: &[usize]) -> Self {
        debug_assert_eq!(data.len(), shape.iter().product::<usize>());
        let mut lines = Lines::zeroed(data.len());
        lines.as_mut_slice()[..data.len()].copy_from_slice(&data);
        let buffer = Buffer { lines: Some(lines), pool: None };
        Self { buffer: Arc::new(buffer), shape: shape.into() }
    }

    /// Dimensions.
    #[inline]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    #[inline]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the whole buffer, with its spare room.
    pub(crate) fn held_bytes(&self) -> usize {
        self.buffer.lines.as_ref().map_or(0, |lines| lines.bytes)
    }

    /// Size of the last dimension (1 for a scalar).
    #[inline]
    pub(crate) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Elements in row-major order.
    #[inline(always)]
    pub fn data(&self) -> &[R] {
        let len = self.len();
        &self.buffer.lines.as_ref().map_or(&[][..], Lines::as_slice)[..len]
    }

    /// Elements in row-major order, mutable. The buffer must not be shared.
    pub(crate) fn data_mut(&mut self) -> &mut [R] {
        let len = self.len();
        let buffer =
            Arc::get_mut(&mut self.buffer).expect("an array must not be shared while it is being written");
        &mut buffer.lines.as_mut().map_or(&mut [][..], Lines::as_mut_slice)[..len]
    }

    /// Whether this is the only handle to the buffer.
    pub(crate) fn is_unique(&mut self) -> bool {
        Arc::get_mut(&mut self.buffer).is_some()
    }

    /// Handle to the same buffer with another shape of equal size.
    pub(crate) fn with_shape(&self, shape: &[usize]) -> Self {
        debug_assert_eq!(self.len(), shape.iter().product::<usize>());
        Self { buffer: Arc::clone(&self.buffer), shape: shape.into() }
    }
}

/// Number of elements of a shape; an error if it overflows.
pub(crate) fn element_count(operation: &'static str, shape: &[usize]) -> Result<usize> {
    let count = shape.iter().try_fold(1usize, |acc, &dim| acc.checked_mul(dim));
    match count {
        Some(count) if count <= isize::MAX as usize / 8 => Ok(count),
        _ => bad_value(operation, format!("shape {shape:?} is too large")),
    }
}

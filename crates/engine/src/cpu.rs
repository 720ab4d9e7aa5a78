//! The CPU in f32: threads, instruction set, buffer pool and options. Its operations are listed in `cpu_table`.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::array::{Array, Lines, Pool};
use crate::cpu_table;
use crate::device::{Backend, Device, Table};
use crate::error::{Error, Result};
use crate::ops::gated_delta;
use crate::simd::Level;
use crate::simd::wide::Path;
use crate::team::{CacheAligned, Team};
use crate::tensor::Data;

/// How products with weight matrices are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Products {
    /// The fastest method for the call's shape; for training.
    #[default]
    Fastest,
    /// The result for a row is bit-identical whatever the number of rows in the call; for inference.
    BatchInvariant,
}

/// Options of the CPU device.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuOptions {
    /// Number of threads; 0 uses all that the machine has.
    pub threads: usize,
    /// Use the portable instruction set even if the processor supports a better one. On x86-64 it needs the feature
    /// `portable`.
    pub portable: bool,
    /// How products with weight matrices are computed.
    pub products: Products,
    /// Instruction set of kernels; by default that of the environment variable `MARCH_SIMD`, `avx2` or `avx512`, or else
    /// the best that the processor has. Products with weights have other roundings with another one.
    pub level: Option<Level>,
    /// Instruction set of products of integers, with weights in `q8` and `q4`; the fastest by default. The results do
    /// not depend on it.
    pub integers: Option<Path>,
}

/// The CPU in f32, with SIMD and threads. [`Device::cpu`] makes a device of it.
pub struct Cpu {
    team: Team,
    threads: usize,
    level: Level,
    path: Path,
    buffers: Arc<Pool<f32>>,
    products: Products,
    table: Table,
}

impl Device {
    /// The CPU in f32, with SIMD and threads.
    pub fn cpu(options: CpuOptions) -> Result<Self> {
        Ok(Self::new(Cpu::new(options)?))
    }
}

impl Backend for Cpu {
    fn name(&self) -> &str {
        "cpu"
    }
    fn table(&self) -> &Table {
        &self.table
    }
    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<Data> {
        Ok(self.from_slice(data, shape)?.into())
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<Data> {
        let mut array = self.uninit(shape);
        array.data_mut().fill(value as f32);
        Ok(array.into())
    }
    fn to_f32(&self, data: &Data) -> Vec<f32> {
        match data {
            Data::F32(array) => array.data().to_vec(),
            Data::Packed(packed) => packed.numbers(),
            _ => unreachable!("a device reads only its own plain tensors"),
        }
    }
    fn chunk_tokens(&self) -> usize {
        gated_delta::CHUNK_TOKENS
    }
    fn side_by_side(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        self.parallel(count, task);
    }
    fn trim(&self) {
        self.buffers.trim();
    }
    fn live_bytes(&self) -> usize {
        self.buffers.live_bytes()
    }
    fn free_bytes(&self) -> usize {
        self.buffers.free_bytes()
    }
}

impl std::fmt::Debug for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Cpu {{ threads: {}, level: {:?}, products: {:?} }}",
            self.threads, self.level, self.products
        )
    }
}

/// The environment variable that chooses the instruction set.
const SIMD: &str = "MARCH_SIMD";

/// The instruction set that the environment variable names.
fn forced(value: Option<&str>) -> Result<Option<Level>> {
    match value {
        None | Some("") => Ok(None),
        Some("avx2") => Ok(Some(Level::Avx2)),
        Some("avx512") => Ok(Some(Level::Avx512)),
        Some(other) => Err(Error::Value {
            operation: "Device::cpu",
            message: format!("the environment variable {SIMD} is `{other}`; it must be `avx2` or `avx512`"),
        }),
    }
}

impl Cpu {
    fn new(options: CpuOptions) -> Result<Self> {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if options.threads == 0 { available } else { options.threads };
        let team = Team::new(threads).map_err(|e| Error::Value {
            operation: "Device::cpu",
            message: format!("{threads} threads could not be started: {e}"),
        })?;
        let forced = forced(std::env::var(SIMD).ok().as_deref())?;
        let level = match options.level.or(forced) {
            _ if options.portable => Level::portable(),
            Some(level) => Some(level),
            None => Level::detect(),
        };
        let level = level.ok_or_else(|| Error::Value {
            operation: "Device::cpu",
            message: "kernels for processors without AVX2 are not part of this build; build it with `--features portable`"
                .into(),
        })?;
        if !level.present() {
            return Err(Error::Value {
                operation: "Device::cpu",
                message: format!("this processor has no {level:?}, which was asked for"),
            });
        }
        let path = match options.integers {
            Some(path) if !path.present() => {
                return Err(Error::Value {
                    operation: "Device::cpu",
                    message: format!("this processor has no {} for products of integers", path.name()),
                });
            }
            Some(path) => path,
            None if options.portable => Path::Portable,
            // 256-bit vectors, with or without VNNI.
            None if level == Level::Avx2 => {
                let narrow = [Path::Vnni256, Path::Avx2].into_iter().find(|path| path.present());
                narrow.unwrap_or(Path::Portable)
            }
            None => Path::detect(),
        };
        let table = cpu_table::table();
        Ok(Self { team, threads, level, path, buffers: Arc::default(), products: options.products, table })
    }

    /// Number of threads in use.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Instruction set in use.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Instruction set of products of integers.
    pub fn path(&self) -> Path {
        self.path
    }

    /// How products with weight matrices are computed.
    pub fn products(&self) -> Products {
        self.products
    }

    /// Array with unspecified contents; the caller must write every element.
    pub(crate) fn uninit(&self, shape: &[usize]) -> Array<f32> {
        Array::uninit(&self.buffers, shape)
    }

    /// Array with unspecified contents and 50 % spare capacity, so that it can grow in place.
    pub(crate) fn uninit_with_room(&self, shape: &[usize]) -> Array<f32> {
        Array::uninit_with_room(&self.buffers, shape)
    }

    pub(crate) fn zeros(&self, shape: &[usize]) -> Array<f32> {
        Array::zeros(&self.buffers, shape)
    }

    pub(crate) fn from_slice(&self, data: &[f32], shape: &[usize]) -> Result<Array<f32>> {
        const LARGE: usize = 1 << 20;
        if data.len() < LARGE || shape.iter().product::<usize>() != data.len() {
            return Array::from_slice(&self.buffers, data, shape);
        }
        let mut array = self.uninit(shape);
        let to = Shared::new(array.data_mut());
        self.parallel(data.len().div_ceil(LARGE), |part| {
            let from = &data[part * LARGE..((part + 1) * LARGE).min(data.len())];
            #[allow(unsafe_code)]
            // SAFETY: parts are disjoint.
            unsafe { to.part(part * LARGE, from.len()) }.copy_from_slice(from);
        });
        Ok(array)
    }

    /// Runs `task(i)` once for each i in `0..count`, on all threads. Tasks must be independent, and results must
    /// not depend on which thread runs which task.
    pub(crate) fn parallel(&self, count: usize, task: impl Fn(usize) + Sync) {
        if self.threads == 1 || count <= 1 {
            (0..count).for_each(task);
            return;
        }
        let next = CacheAligned(AtomicUsize::new(0));
        let work = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= count {
                    break;
                }
                task(i);
            }
        };
        self.team.run(&work);
    }

    /// As [`Cpu::parallel`], but each thread begins with a run of neighbouring tasks of its own, and then helps the others
    /// with theirs. For tasks that read memory one after the other: what follows a task in memory is mostly the same
    /// thread's next task, so that it is fetched into the right cache.
    pub(crate) fn parallel_runs(&self, count: usize, task: impl Fn(usize) + Sync) {
        let runs = self.threads.min(count);
        if runs <= 1 {
            return self.parallel(count, task);
        }
        let next: Vec<_> = (0..runs).map(|run| CacheAligned(AtomicUsize::new(run * count / runs))).collect();
        let arrived = AtomicUsize::new(0);
        let work = || {
            let first = arrived.fetch_add(1, Ordering::Relaxed);
            for run in (first..first + runs).map(|run| run % runs) {
                loop {
                    let i = next[run].fetch_add(1, Ordering::Relaxed);
                    if i >= (run + 1) * count / runs {
                        break;
                    }
                    task(i);
                }
            }
        };
        self.team.run(&work);
    }

    /// Splits rows into at most 64 parts, fewer if the total work is small. `cost` is the number of elements
    /// touched per row. The split depends only on the shape, so sums over parts are bit-identical for any number of
    /// threads.
    pub(crate) fn row_parts(&self, rows: usize, cost: usize) -> RowParts {
        const SMALL: usize = 16 * 1024;
        let per_part = (SMALL / cost.max(1)).max(rows.div_ceil(64)).max(1);
        RowParts { rows, per_part }
    }

    /// Runs `task(part, start..end)` for every part.
    pub(crate) fn for_rows(&self, parts: RowParts, task: impl Fn(usize, std::ops::Range<usize>) + Sync) {
        self.parallel(parts.count(), |p| task(p, parts.range(p)));
    }
}

/// Split of rows into parts of equal size.
#[derive(Clone, Copy)]
pub(crate) struct RowParts {
    rows: usize,
    per_part: usize,
}

impl RowParts {
    pub(crate) fn count(self) -> usize {
        self.rows.div_ceil(self.per_part)
    }

    pub(crate) fn range(self, part: usize) -> std::ops::Range<usize> {
        part * self.per_part..((part + 1) * self.per_part).min(self.rows)
    }
}

/// Slice that several tasks write concurrently, each its own disjoint part.
pub(crate) struct Shared<'a, T = f32> {
    p: *mut T,
    len: usize,
    life: std::marker::PhantomData<&'a mut [T]>,
}

#[allow(unsafe_code)]
// SAFETY: callers of `part` guarantee that the parts are disjoint.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self { p: data.as_mut_ptr(), len: data.len(), life: std::marker::PhantomData }
    }

    /// Address of element `at`.
    #[inline(always)]
    pub(crate) fn pointer(&self, at: usize) -> *mut T {
        assert!(at <= self.len, "pointer out of bounds");
        self.p.wrapping_add(at)
    }

    /// Mutable access to `len` elements from `start` on.
    /// # Safety
    /// No two parts that are alive at the same time may overlap.
    #[allow(unsafe_code, clippy::mut_from_ref)]
    #[inline(always)]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "part out of bounds");
        // SAFETY: in bounds by the assertion, disjoint by the caller's guarantee.
        unsafe { std::slice::from_raw_parts_mut(self.p.add(start), len) }
    }
}

impl Shared<'_> {
    /// Writes one element.
    /// # Safety
    /// No other task may access this element concurrently.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn set(&self, at: usize, value: f32) {
        // SAFETY: guaranteed by the caller.
        let slot = unsafe { self.part(at, 1) };
        slot[0] = value;
    }
}

thread_local! {
    static SCRATCH: RefCell<Vec<Lines<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with `len` scratch elements of unspecified contents. The buffer is cached per thread for later calls.
pub(crate) fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    let kept = SCRATCH.with(|s| s.borrow_mut().pop());
    let mut lines = match kept {
        Some(lines) if lines.capacity() >= len => lines,
        _ => Lines::zeroed(len),
    };
    let result = f(&mut lines.as_mut_slice()[..len]);
    SCRATCH.with(|s| s.borrow_mut().push(lines));
    result
}

/// Splits scratch memory into pieces that each start on a cache line.
pub(crate) struct Carve<'a>(pub &'a mut [f32]);

impl<'a> Carve<'a> {
    /// Scratch elements needed for a piece of `len` elements.
    pub(crate) fn size(len: usize) -> usize {
        len.next_multiple_of(16)
    }

    pub(crate) fn take(&mut self, len: usize) -> &'a mut [f32] {
        let rest = std::mem::take(&mut self.0);
        let (piece, rest) = rest.split_at_mut(Self::size(len));
        self.0 = rest;
        &mut piece[..len]
    }
}

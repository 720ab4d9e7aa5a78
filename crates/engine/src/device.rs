//! Devices are values: memory for tensors, and a table of the operations that the device implements.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::marker::PhantomData;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::op::Op;
use crate::ops::anchor_read::StoredStates;
use crate::tensor::Data;

/// What a device has to provide besides its table: memory, and access to it.
pub trait Backend: Any + Send + Sync {
    /// Name in messages, such as `cpu`.
    fn name(&self) -> &str;
    /// The operations that this device implements.
    fn table(&self) -> &Table;

    /// Creates the data of a tensor from values in row-major order; their number fits the shape.
    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<Data>;
    /// Like `from_f32`, rounded to the device's number type.
    fn from_f64(&self, data: &[f64], shape: &[usize]) -> Result<Data> {
        self.from_f32(&data.iter().map(|&v| v as f32).collect::<Vec<_>>(), shape)
    }
    /// Creates data filled with `value`.
    fn full(&self, shape: &[usize], value: f64) -> Result<Data>;
    /// Values of plain data in row-major order.
    fn to_f32(&self, data: &Data) -> Vec<f32>;
    /// Values of plain data in row-major order, as f64.
    fn to_f64(&self, data: &Data) -> Vec<f64> {
        self.to_f32(data).into_iter().map(f64::from).collect()
    }

    /// Data of stored anchor states from host memory, or from a source that is read on first use.
    fn stored_from_host(&self, states: StoredStates) -> Result<Data> {
        Ok(states.into())
    }

    /// Tokens per chunk of the recurrent operations (`gated_delta`, `log_linear_delta`). Chunks start at multiples of
    /// this, counted from the call's first token. A sequence that is split at multiples of this into several calls
    /// gives results bit-identical to a single call.
    fn chunk_tokens(&self) -> usize {
        1
    }
    /// Runs `task(0)` to `task(count - 1)`, each once, in parallel if the device has threads. Operations inside a task
    /// run on the task's own thread. Tasks must be independent of each other.
    fn side_by_side(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(task);
    }
    /// Fails if the device was lost. `to_f32` and `to_f64` cannot report that: call this before their values are
    /// trusted, for example before they replace a file.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// Returns unused buffers to the system.
    fn trim(&self) {}
    /// Bytes currently held by tensors; 0 if the device does not count them.
    fn live_bytes(&self) -> usize {
        0
    }
    /// Bytes of unused buffers kept for reuse; 0 if the device does not count them.
    fn free_bytes(&self) -> usize {
        0
    }
}

/// The kernel of operation `O` on backend `B`: a plain function.
pub type Kernel<B, O> = fn(&B, O, <O as Op>::Sizes) -> Result<<O as Op>::Output>;

/// A kernel that finds out for itself that the backend is its own.
type Erased<O> = Box<dyn Fn(&dyn Backend, O, <O as Op>::Sizes) -> Result<<O as Op>::Output> + Send + Sync>;

struct Entry {
    name: &'static str,
    /// `Erased<O>` of the operation that is the key.
    kernel: Box<dyn Any + Send + Sync>,
}

/// The operations of a device, one line each: `Table::of::<Cpu>().with(rms_norm::fast::forward)…`. The operation is in
/// the kernel's type.
pub struct Table {
    entries: HashMap<TypeId, Entry, BuildHasherDefault<TypeIdHasher>>,
}

impl Table {
    /// Starts the table of a backend.
    pub fn of<B: Backend>() -> TableBuilder<B> {
        TableBuilder { table: Self { entries: HashMap::default() }, backend: PhantomData }
    }

    /// Names of the operations, sorted.
    pub fn names(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.entries.values().map(|entry| entry.name).collect();
        names.sort_unstable();
        names
    }
}

/// A table that is being filled.
pub struct TableBuilder<B> {
    table: Table,
    backend: PhantomData<B>,
}

impl<B: Backend> TableBuilder<B> {
    /// Adds the kernel of an operation.
    pub fn with<O: Op>(mut self, kernel: Kernel<B, O>) -> Self {
        let erased: Erased<O> = Box::new(move |backend, op, sizes| {
            let Some(backend) = (backend as &dyn Any).downcast_ref::<B>() else {
                unreachable!("a device runs only its own table")
            };
            kernel(backend, op, sizes)
        });
        self.table.entries.insert(TypeId::of::<O>(), Entry { name: O::NAME, kernel: Box::new(erased) });
        self
    }

    /// The filled table.
    pub fn build(self) -> Table {
        self.table
    }
}

/// Type ids are hashes already.
#[derive(Default)]
struct TypeIdHasher(u64);

impl Hasher for TypeIdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = self.0.rotate_left(8) ^ u64::from(byte));
    }
    fn write_u64(&mut self, value: u64) {
        self.0 ^= value;
    }
}

/// A device that holds tensors and runs operations. Cloning copies a handle. Two devices are equal if they are the same
/// one: tensors of one cannot be used on the other.
#[derive(Clone)]
pub struct Device(Arc<dyn Backend>);

impl Device {
    /// Makes a device of a backend.
    pub fn new<B: Backend>(backend: B) -> Self {
        Self(Arc::new(backend))
    }

    /// Names of the operations that this device implements, sorted.
    pub fn operations(&self) -> Vec<&'static str> {
        self.table().names()
    }

    /// The backend, if it is a `B`.
    pub fn backend<B: Backend>(&self) -> Option<&B> {
        (&*self.0 as &dyn Any).downcast_ref()
    }

    /// Runs an operation whose inputs are on this device and were checked.
    pub(crate) fn run<O: Op>(&self, op: O, sizes: O::Sizes) -> Result<O::Output> {
        let entry = self.0.table().entries.get(&TypeId::of::<O>());
        let Some(kernel) = entry.and_then(|entry| entry.kernel.downcast_ref::<Erased<O>>()) else {
            return Err(Error::Unsupported { operation: O::NAME, device: self.to_string() });
        };
        kernel(&*self.0, op, sizes)
    }
}

impl std::ops::Deref for Device {
    type Target = dyn Backend;
    fn deref(&self) -> &dyn Backend {
        &*self.0
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(&other.0))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.0.name())
    }
}

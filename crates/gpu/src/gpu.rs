//! The engine's device: opens it, records the dispatches of operations, and moves numbers in and out.
//!
//! Dispatches are recorded into one compute pass and submitted when the host wants numbers, or after
//! [`RECORDED`] dispatches. The device runs them in order, each after those whose results it reads. Nothing waits for
//! the device except reading results.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use march_engine::{Error, Result};
use wgpu::{
    BindGroupEntry, BindGroupLayoutEntry, BindingResource, BindingType, BufferBinding, BufferBindingType,
    ShaderStages,
};

use crate::adapter::{self, IMMEDIATE_BYTES};
use crate::buffer::{Buffer, Pool};
use crate::error::device;
use crate::kernel::Kernel;
use crate::ops::anchor_read::Arenas;
use crate::tensor::{ALIGN, Tensor};

/// Dispatches in one submission, at the most.
const RECORDED: u64 = 2048;

/// Engine that runs on a GPU by Vulkan, Metal or DX12. Cloning copies a handle.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    description: String,
    identity: String,
    device: wgpu::Device,
    queue: wgpu::Queue,
    limits: wgpu::Limits,
    pool: Arc<Pool>,
    pipelines: Mutex<HashMap<Kernel, Arc<Pipeline>>>,
    recorder: Mutex<Recorder>,
    failure: Arc<Failure>,
    dispatches: AtomicU64,
    arenas: Arenas,
}

/// What went wrong on the device since it was opened. The device reports errors late and from its own threads.
#[derive(Default)]
struct Failure {
    happened: AtomicBool,
    message: Mutex<String>,
}

impl Failure {
    fn note(&self, message: String) {
        if !self.happened.swap(true, Ordering::SeqCst) {
            *self.message.lock().unwrap_or_else(PoisonError::into_inner) = message;
        }
    }
}

struct Pipeline {
    pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
}

/// Commands that were recorded and not yet submitted. The pass must be dropped before its encoder is finished.
#[derive(Default)]
struct Recorder {
    pass: Option<wgpu::ComputePass<'static>>,
    encoder: Option<wgpu::CommandEncoder>,
    count: u64,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({})", self.inner.description)
    }
}

impl Gpu {
    /// Opens GPU number `index` of [`crate::adapters`], or the first that can be used.
    pub fn open(index: Option<usize>) -> Result<Self> {
        let (adapter, device, queue) = adapter::open(index)?;
        let info = adapter.get_info();
        let failure = Arc::new(Failure::default());
        let lost = Arc::clone(&failure);
        device.set_device_lost_callback(move |reason, message| {
            lost.note(format!("the device was lost ({reason:?}): {message}"));
        });
        let uncaptured = Arc::clone(&failure);
        device.on_uncaptured_error(Arc::new(move |error| {
            uncaptured.note(format!("the device reported an error: {error}"));
        }));
        let inner = Inner {
            description: format!("{} on {}", info.name, info.backend),
            identity: [
                info.name,
                info.backend.to_string(),
                info.driver,
                info.driver_info,
                info.device_pci_bus_id,
            ]
            .join("; "),
            limits: device.limits(),
            device,
            queue,
            pool: Arc::default(),
            pipelines: Mutex::default(),
            recorder: Mutex::default(),
            failure,
            dispatches: AtomicU64::new(0),
            arenas: Arenas::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Name of the device and the interface that it is reached by.
    pub fn description(&self) -> String {
        self.inner.description.clone()
    }

    /// Name of the device, its interface, its driver and the driver's version, and where it is plugged in: what a test of
    /// the device holds for.
    pub fn identity(&self) -> &str {
        &self.inner.identity
    }

    /// Number of dispatches since the device was opened.
    pub fn dispatches(&self) -> u64 {
        self.inner.dispatches.load(Ordering::Relaxed)
    }

    /// Bytes that tensors occupy, including buffers kept for reuse.
    pub fn memory(&self) -> u64 {
        self.inner.pool.bytes()
    }

    /// Bytes of buffers that wait for reuse.
    pub(crate) fn unused(&self) -> u64 {
        self.inner.pool.unused()
    }

    /// Returns an error if the device was lost or reported an error.
    pub(crate) fn alive(&self) -> Result<()> {
        if !self.inner.failure.happened.load(Ordering::SeqCst) {
            return Ok(());
        }
        let message = self.inner.failure.message.lock().unwrap_or_else(PoisonError::into_inner);
        device(message.clone())
    }

    // ---- memory ----

    /// A new tensor with any contents, for a kernel to fill.
    pub(crate) fn empty(&self, shape: &[usize]) -> Result<Tensor> {
        let bytes = 4 * shape.iter().product::<usize>() as u64;
        Ok(Tensor::new(self.inner.pool.take(&self.inner.device, bytes)?, shape))
    }

    /// New tensors with any contents in one buffer, and that buffer as a whole, for kernels that write all of them. A
    /// part keeps the whole buffer alive.
    pub(crate) fn group<const N: usize>(&self, shapes: [&[usize]; N]) -> Result<(Tensor, [Tensor; N])> {
        let mut end = 0;
        let starts = shapes.map(|shape| {
            let start = end;
            end = (end + shape.iter().product::<usize>()).next_multiple_of(ALIGN);
            start
        });
        // A part that is empty starts within the buffer, too.
        let whole = self.empty(&[end + ALIGN])?;
        let parts = std::array::from_fn(|i| whole.part(starts[i], shapes[i]));
        Ok((whole, parts))
    }

    /// A new tensor with numbers from the host.
    pub(crate) fn upload(&self, data: &[f32], shape: &[usize]) -> Result<Tensor> {
        Ok(Tensor::new(Buffer::filled(&self.inner.device, bytemuck::cast_slice(data))?, shape))
    }

    /// A list of indices from the host, as a tensor whose bits are `u32`.
    pub(crate) fn upload_indices(&self, data: &[u32]) -> Result<Tensor> {
        Ok(Tensor::new(Buffer::filled(&self.inner.device, bytemuck::cast_slice(data))?, &[data.len()]))
    }

    /// The numbers of a tensor, once the device has computed them. If the device fails, they are NaN and every later
    /// call returns the error.
    pub(crate) fn download(&self, tensor: &Tensor) -> Vec<f32> {
        match self.read(tensor) {
            Ok(values) => values,
            Err(error) => {
                self.inner.failure.note(error.to_string());
                vec![f32::NAN; tensor.len()]
            }
        }
    }

    fn read(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let bytes = 4 * tensor.len() as u64;
        if bytes == 0 {
            return Ok(Vec::new());
        }
        self.alive()?;
        let inner = &*self.inner;
        let staging = inner.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("staging"),
            size: bytes,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        {
            let mut recorder = self.recorder();
            recorder.pass = None;
            let encoder = recorder
                .encoder
                .get_or_insert_with(|| inner.device.create_command_encoder(&Default::default()));
            encoder.copy_buffer_to_buffer(tensor.buffer.raw(), 4 * tensor.start() as u64, &staging, 0, bytes);
            self.submit(&mut recorder);
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        staging.map_async(wgpu::MapMode::Read, .., move |result| {
            let _ = sender.send(result);
        });
        if let Err(error) = inner.device.poll(wgpu::PollType::wait_indefinitely()) {
            return device(format!("waiting for the device failed: {error}"));
        }
        match receiver.recv() {
            Ok(Ok(())) => {}
            _ => return device("the device did not return its results: it was probably lost"),
        }
        let Ok(view) = staging.get_mapped_range(..) else {
            return device("the results of the device cannot be read");
        };
        let values = bytemuck::cast_slice(&view).to_vec();
        drop(view);
        self.alive()?;
        Ok(values)
    }

    /// Copies `count` elements from one tensor to another, starting at the given elements.
    pub(crate) fn copy(&self, from: &Tensor, at: usize, to: &Tensor, start: usize, count: usize) {
        if count == 0 {
            return;
        }
        let mut recorder = self.recorder();
        recorder.pass = None;
        let encoder = recorder
            .encoder
            .get_or_insert_with(|| self.inner.device.create_command_encoder(&Default::default()));
        let bytes = |elements: usize| 4 * elements as u64;
        encoder.copy_buffer_to_buffer(
            from.buffer.raw(),
            bytes(from.start() + at),
            to.buffer.raw(),
            bytes(to.start() + start),
            bytes(count),
        );
    }

    /// Returns unused memory to the system.
    pub fn trim(&self) {
        self.inner.pool.clear();
    }

    /// Memory of stored anchor states.
    pub(crate) fn arenas(&self) -> &Arenas {
        &self.inner.arenas
    }

    // ---- kernels ----

    /// Records a dispatch: `tensors` in the order of the kernel's bindings, `numbers` as its immediates (at most 32),
    /// `groups` workgroups in each dimension. A dispatch without workgroups does nothing.
    pub(crate) fn run(
        &self,
        kernel: &Kernel,
        tensors: &[&Tensor],
        numbers: &[u32],
        groups: [usize; 3],
    ) -> Result<()> {
        if groups.contains(&0) {
            return Ok(());
        }
        self.alive()?;
        let most = self.inner.limits.max_compute_workgroups_per_dimension as usize;
        if let Some(count) = groups.iter().find(|&&count| count > most) {
            return device(format!(
                "{}: {count} workgroups in one dimension, the device allows {most}",
                kernel.name
            ));
        }
        debug_assert_eq!(tensors.len(), kernel.writes.len(), "{}: bindings", kernel.name);
        let pipeline = self.pipeline(kernel)?;
        let entries: Vec<BindGroupEntry<'_>> = (0..)
            .zip(tensors)
            .map(|(binding, tensor)| BindGroupEntry {
                binding,
                resource: BindingResource::Buffer(BufferBinding {
                    buffer: tensor.buffer.raw(),
                    offset: 4 * tensor.start() as u64,
                    size: None,
                }),
            })
            .collect();
        let inner = &*self.inner;
        let bind_group = inner.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(kernel.name),
            layout: &pipeline.layout,
            entries: &entries,
        });
        let mut recorder = self.recorder();
        let Recorder { pass, encoder, count } = &mut *recorder;
        let pass = pass.get_or_insert_with(|| {
            let encoder =
                encoder.get_or_insert_with(|| inner.device.create_command_encoder(&Default::default()));
            encoder.begin_compute_pass(&Default::default()).forget_lifetime()
        });
        pass.set_pipeline(&pipeline.pipeline);
        pass.set_bind_group(0, &bind_group, &[]);
        if !numbers.is_empty() {
            pass.set_immediates(0, bytemuck::cast_slice(numbers));
        }
        let [x, y, z] = groups.map(|count| count as u32);
        pass.dispatch_workgroups(x, y, z);
        *count += 1;
        inner.dispatches.fetch_add(1, Ordering::Relaxed);
        if *count >= RECORDED {
            self.submit(&mut recorder);
        }
        Ok(())
    }

    /// Workgroups for a list of `count` items, folded into two dimensions; kernels undo it with `group_index`.
    pub(crate) fn list(&self, count: usize) -> [usize; 3] {
        let most = self.inner.limits.max_compute_workgroups_per_dimension as usize;
        if count <= most { [count, 1, 1] } else { [most, count.div_ceil(most), 1] }
    }

    /// Invocations in a workgroup, at the most.
    pub(crate) fn limits(&self) -> &wgpu::Limits {
        &self.inner.limits
    }

    fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.inner.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(&self, recorder: &mut Recorder) {
        recorder.pass = None;
        recorder.count = 0;
        if let Some(encoder) = recorder.encoder.take() {
            self.inner.queue.submit([encoder.finish()]);
        }
    }

    /// Submits what was recorded and waits until the device has finished it.
    pub fn wait(&self) -> Result<()> {
        self.submit(&mut self.recorder());
        if let Err(error) = self.inner.device.poll(wgpu::PollType::wait_indefinitely()) {
            return device(format!("waiting for the device failed: {error}"));
        }
        self.alive()
    }

    fn pipeline(&self, kernel: &Kernel) -> Result<Arc<Pipeline>> {
        let mut pipelines = self.inner.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = pipelines.get(kernel) {
            return Ok(Arc::clone(pipeline));
        }
        let pipeline = Arc::new(self.compile(kernel)?);
        pipelines.insert(kernel.clone(), Arc::clone(&pipeline));
        Ok(pipeline)
    }

    #[allow(unsafe_code)]
    fn compile(&self, kernel: &Kernel) -> Result<Pipeline> {
        let gpu = &self.inner.device;
        let scope = gpu.push_error_scope(wgpu::ErrorFilter::Validation);
        let descriptor = wgpu::ShaderModuleDescriptor {
            label: Some(kernel.name),
            source: wgpu::ShaderSource::Wgsl(kernel.text().into()),
        };
        let checks = wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..Default::default() };
        // SAFETY: the kernels are part of this crate; their loops end. Bounds checks stay on.
        let module = unsafe { gpu.create_shader_module_trusted(descriptor, checks) };
        let entries: Vec<BindGroupLayoutEntry> = (0..)
            .zip(kernel.writes)
            .map(|(binding, writes)| BindGroupLayoutEntry {
                binding,
                visibility: ShaderStages::COMPUTE,
                ty: BindingType::Buffer {
                    ty: BufferBindingType::Storage { read_only: !writes },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let layout = gpu.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(kernel.name),
            entries: &entries,
        });
        let pipeline_layout = gpu.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.name),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: IMMEDIATE_BYTES,
        });
        let pipeline = gpu.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(kernel.name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some(kernel.entry),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Kernels write workgroup memory before they read it; zeroing it costs seconds of compilation.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        match pollster::block_on(scope.pop()) {
            None => Ok(Pipeline { pipeline, layout }),
            Some(error) => Err(Error::Device {
                message: format!("{} could not be compiled for this device: {error}", kernel.name),
            }),
        }
    }
}

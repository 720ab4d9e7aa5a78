//! The engine's device: opens it, records the dispatches of operations, and moves numbers in and out.
//!
//! Dispatches are recorded into one compute pass and submitted when the host wants numbers, or after
//! [`RECORDED`] dispatches. The device runs them in order, each after those whose results it reads. Nothing waits for
//! the device except reading results.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use march_engine::ops::anchor_read::StoredStates;
use march_engine::{Backend, Data, Device, Error, Result, Table};
use wgpu::{
    BindGroupEntry, BindGroupLayoutEntry, BindingResource, BindingType, BufferBinding, BufferBindingType,
    ShaderStages,
};

use crate::adapter::{self, IMMEDIATE_BYTES};
use crate::array::{ALIGN, GpuArray};
use crate::buffer::{Buffer, Pool};
use crate::error::device;
use crate::kernel::Kernel;
use crate::ops::anchor_read::{Arenas, Stored};
use crate::ops::elementwise;
use crate::table::table;

/// Dispatches in one submission, at the most.
const RECORDED: u64 = 2048;

/// A GPU, reached by Vulkan, Metal or DX12. [`Gpu::open`] makes a device of it.
pub struct Gpu {
    name: String,
    identity: String,
    table: Table,
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

impl Gpu {
    /// Opens GPU number `index` of [`crate::adapters`], or the first that can be used.
    pub fn open(index: Option<usize>) -> Result<Device> {
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
        Ok(Device::new(Self {
            name: format!("{} on {}", info.name, info.backend),
            identity: [
                info.name,
                info.backend.to_string(),
                info.driver,
                info.driver_info,
                info.device_pci_bus_id,
            ]
            .join("; "),
            table: table(),
            limits: device.limits(),
            device,
            queue,
            pool: Arc::default(),
            pipelines: Mutex::default(),
            recorder: Mutex::default(),
            failure,
            dispatches: AtomicU64::new(0),
            arenas: Arenas::default(),
        }))
    }

    /// The GPU of a device.
    pub(crate) fn of(device: &Device) -> Result<&Self> {
        let message = || Error::Device { message: format!("{device} is not a GPU") };
        device.backend().ok_or_else(message)
    }

    /// Error for a call of an operation that no kernel can run.
    pub(crate) fn unsupported<T>(&self, operation: &'static str) -> Result<T> {
        Err(Error::Unsupported { operation, device: self.name.clone() })
    }

    /// Name of the device, its interface, its driver and the driver's version, and where it is plugged in: what a test of
    /// the device holds for.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Number of dispatches since the device was opened.
    pub fn dispatches(&self) -> u64 {
        self.dispatches.load(Ordering::Relaxed)
    }

    /// Returns an error if the device was lost or reported an error.
    pub(crate) fn alive(&self) -> Result<()> {
        if !self.failure.happened.load(Ordering::SeqCst) {
            return Ok(());
        }
        let message = self.failure.message.lock().unwrap_or_else(PoisonError::into_inner);
        device(message.clone())
    }

    // ---- memory ----

    /// A new tensor with any contents, for a kernel to fill.
    pub(crate) fn empty(&self, shape: &[usize]) -> Result<GpuArray> {
        let bytes = 4 * shape.iter().product::<usize>() as u64;
        Ok(GpuArray::new(self.pool.take(&self.device, bytes)?, shape))
    }

    /// New tensors with any contents in one buffer, and that buffer as a whole, for kernels that write all of them. A
    /// part keeps the whole buffer alive.
    pub(crate) fn group<const N: usize>(&self, shapes: [&[usize]; N]) -> Result<(GpuArray, [GpuArray; N])> {
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
    pub(crate) fn upload(&self, data: &[f32], shape: &[usize]) -> Result<GpuArray> {
        Ok(GpuArray::new(Buffer::filled(&self.device, bytemuck::cast_slice(data))?, shape))
    }

    /// A list of indices from the host, as a tensor whose bits are `u32`.
    pub(crate) fn upload_indices(&self, data: &[u32]) -> Result<GpuArray> {
        Ok(GpuArray::new(Buffer::filled(&self.device, bytemuck::cast_slice(data))?, &[data.len()]))
    }

    /// The numbers of a tensor, once the device has computed them. If the device fails, they are NaN and every later
    /// call returns the error.
    pub(crate) fn download(&self, tensor: &GpuArray) -> Vec<f32> {
        match self.read(tensor) {
            Ok(values) => values,
            Err(error) => {
                self.failure.note(error.to_string());
                vec![f32::NAN; tensor.len()]
            }
        }
    }

    fn read(&self, tensor: &GpuArray) -> Result<Vec<f32>> {
        let bytes = 4 * tensor.len() as u64;
        if bytes == 0 {
            return Ok(Vec::new());
        }
        self.alive()?;
        let staging = self.device.create_buffer(&wgpu::BufferDescriptor {
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
                .get_or_insert_with(|| self.device.create_command_encoder(&Default::default()));
            encoder.copy_buffer_to_buffer(tensor.buffer.raw(), 4 * tensor.start() as u64, &staging, 0, bytes);
            self.submit(&mut recorder);
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        staging.map_async(wgpu::MapMode::Read, .., move |result| {
            let _ = sender.send(result);
        });
        if let Err(error) = self.device.poll(wgpu::PollType::wait_indefinitely()) {
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
    pub(crate) fn copy(&self, from: &GpuArray, at: usize, to: &GpuArray, start: usize, count: usize) {
        if count == 0 {
            return;
        }
        let mut recorder = self.recorder();
        recorder.pass = None;
        let encoder =
            recorder.encoder.get_or_insert_with(|| self.device.create_command_encoder(&Default::default()));
        let bytes = |elements: usize| 4 * elements as u64;
        encoder.copy_buffer_to_buffer(
            from.buffer.raw(),
            bytes(from.start() + at),
            to.buffer.raw(),
            bytes(to.start() + start),
            bytes(count),
        );
    }

    /// Memory of stored anchor states.
    pub(crate) fn arenas(&self) -> &Arenas {
        &self.arenas
    }

    // ---- kernels ----

    /// Records a dispatch: `tensors` in the order of the kernel's bindings, `numbers` as its immediates (at most 32),
    /// `groups` workgroups in each dimension. A dispatch without workgroups does nothing.
    pub(crate) fn run(
        &self,
        kernel: &Kernel,
        tensors: &[&GpuArray],
        numbers: &[u32],
        groups: [usize; 3],
    ) -> Result<()> {
        if groups.contains(&0) {
            return Ok(());
        }
        self.alive()?;
        let most = self.limits.max_compute_workgroups_per_dimension as usize;
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
        let bind_group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(kernel.name),
            layout: &pipeline.layout,
            entries: &entries,
        });
        let mut recorder = self.recorder();
        let Recorder { pass, encoder, count } = &mut *recorder;
        let pass = pass.get_or_insert_with(|| {
            let encoder =
                encoder.get_or_insert_with(|| self.device.create_command_encoder(&Default::default()));
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
        self.dispatches.fetch_add(1, Ordering::Relaxed);
        if *count >= RECORDED {
            self.submit(&mut recorder);
        }
        Ok(())
    }

    /// Workgroups for a list of `count` items, folded into two dimensions; kernels undo it with `group_index`.
    pub(crate) fn list(&self, count: usize) -> [usize; 3] {
        let most = self.limits.max_compute_workgroups_per_dimension as usize;
        if count <= most { [count, 1, 1] } else { [most, count.div_ceil(most), 1] }
    }

    /// Invocations in a workgroup, at the most.
    pub(crate) fn limits(&self) -> &wgpu::Limits {
        &self.limits
    }

    fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(&self, recorder: &mut Recorder) {
        recorder.pass = None;
        recorder.count = 0;
        if let Some(encoder) = recorder.encoder.take() {
            self.queue.submit([encoder.finish()]);
        }
    }

    /// Submits what was recorded and waits until the device has finished it.
    pub fn wait(&self) -> Result<()> {
        self.submit(&mut self.recorder());
        if let Err(error) = self.device.poll(wgpu::PollType::wait_indefinitely()) {
            return device(format!("waiting for the device failed: {error}"));
        }
        self.alive()
    }

    fn pipeline(&self, kernel: &Kernel) -> Result<Arc<Pipeline>> {
        let mut pipelines = self.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = pipelines.get(kernel) {
            return Ok(Arc::clone(pipeline));
        }
        let pipeline = Arc::new(self.compile(kernel)?);
        pipelines.insert(kernel.clone(), Arc::clone(&pipeline));
        Ok(pipeline)
    }

    #[allow(unsafe_code)]
    fn compile(&self, kernel: &Kernel) -> Result<Pipeline> {
        let gpu = &self.device;
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

impl Backend for Gpu {
    fn name(&self) -> &str {
        &self.name
    }
    fn table(&self) -> &Table {
        &self.table
    }
    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<Data> {
        Ok(self.upload(data, shape)?.into())
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<Data> {
        Ok(elementwise::full(self, shape, value as f32)?.into())
    }
    fn to_f32(&self, data: &Data) -> Vec<f32> {
        self.download(GpuArray::of(data))
    }
    fn stored_from_host(&self, states: StoredStates) -> Result<Data> {
        Ok(Stored::from_host(self, &states)?.into())
    }
    fn check(&self) -> Result<()> {
        self.alive()
    }
    fn trim(&self) {
        self.pool.clear();
    }
    fn live_bytes(&self) -> usize {
        self.pool.bytes().saturating_sub(self.pool.unused()) as usize
    }
    fn free_bytes(&self) -> usize {
        self.pool.unused() as usize
    }
}

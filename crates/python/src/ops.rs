//! Operations for models that are written in Python, with their backward passes.
//!
//! Arrays of float32 are computed by the CPU's kernels, those of float64 by the reference device. Heads are an axis of
//! their own here; the engine has them side by side, which are the same numbers in the same order.

use std::sync::{Arc, Mutex, PoisonError};

use march_engine::ops::anchor_read::{
    AnchorRead, AnchorReadBackward, AnchorReadForward, AnchorReadOptions, ReadPlan,
};
use march_engine::ops::gated_delta::{
    GatedDelta, GatedDeltaBackward, GatedDeltaForward, GatedDeltaGradient, GatedDeltaOptions,
};
use march_engine::ops::log_linear::{LogLinear, LogLinearBackward, LogLinearForward, LogLinearOptions};
use march_engine::{Cpu, CpuOptions, Device, Op, Tensor};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{Numbers, of_tensor};
use crate::error::{Result, refuse};

/// The device of float32, once one was needed.
static CPU: Mutex<Option<Device>> = Mutex::new(None);

/// The device of float32.
fn cpu() -> Result<Device> {
    let mut cpu = CPU.lock().unwrap_or_else(PoisonError::into_inner);
    if cpu.is_none() {
        *cpu = Some(Device::cpu(CpuOptions::default())?);
    }
    cpu.clone().map_or_else(|| refuse("there is no device"), Ok)
}

/// Sets the number of threads of the operations; 0 takes all.
#[pyfunction]
pub fn set_threads(threads: usize) -> Result<()> {
    let device = Device::cpu(CpuOptions { threads, ..CpuOptions::default() })?;
    *CPU.lock().unwrap_or_else(PoisonError::into_inner) = Some(device);
    Ok(())
}

/// The number of threads of the operations.
#[pyfunction]
pub fn threads() -> Result<usize> {
    Ok(cpu()?.backend::<Cpu>().map_or(1, Cpu::threads))
}

/// The inputs of a call, which are all of one type, and their device.
struct Inputs<'a, 'py> {
    numbers: Vec<Option<Numbers<'py>>>,
    names: &'a [&'static str],
    device: Device,
}

impl<'a, 'py> Inputs<'a, 'py> {
    fn new(names: &'a [&'static str], values: &[Option<Bound<'py, PyAny>>]) -> Result<Self> {
        let mut numbers: Vec<Option<Numbers<'py>>> = Vec::with_capacity(names.len());
        for (&name, value) in names.iter().zip(values) {
            numbers.push(value.as_ref().map(|value| Numbers::new(name, value)).transpose()?);
        }
        let mut types = numbers.iter().flatten().map(|numbers| numbers.is_f64);
        let is_f64 = types.next().unwrap_or(false);
        if types.any(|other| other != is_f64) {
            return refuse("the arrays must all be of float32 or all of float64");
        }
        let device = if is_f64 { Device::reference() } else { cpu()? };
        Ok(Self { numbers, names, device })
    }

    fn numbers(&self, i: usize) -> Result<&Numbers<'py>> {
        match &self.numbers[i] {
            Some(numbers) => Ok(numbers),
            None => refuse(format!("`{}` is missing", self.names[i])),
        }
    }

    fn shape<const N: usize>(&self, i: usize, what: &str) -> Result<[usize; N]> {
        self.numbers(i)?.shape(what)
    }

    /// An input with its last two axes as one.
    fn joined(&self, i: usize, what: &str) -> Result<Tensor> {
        let [batch, tokens, heads, width] = self.shape(i, what)?;
        self.numbers(i)?.tensor(&[batch, tokens, heads * width], &self.device)
    }

    /// An input as it is.
    fn plain<const N: usize>(&self, i: usize, what: &str) -> Result<Tensor> {
        self.numbers(i)?.tensor(&self.shape::<N>(i, what)?, &self.device)
    }

    /// An input that may be left out, as it is.
    fn optional<const N: usize>(&self, i: usize, what: &str) -> Result<Option<Tensor>> {
        self.numbers[i].is_some().then(|| self.plain::<N>(i, what)).transpose()
    }

    /// The shape of each input, as the caller gave it.
    fn shapes(&self) -> Vec<Option<Vec<usize>>> {
        self.numbers.iter().map(|numbers| numbers.as_ref().map(|it| it.dims().to_vec())).collect()
    }
}

/// Computes the gradients of the inputs from those of the outputs.
type Gradients = dyn Fn(Vec<Option<Tensor>>) -> march_engine::Result<Vec<Option<Tensor>>> + Send + Sync;

/// The backward pass of one call: called with the gradients of its outputs, in their order, `None` for zero, it returns
/// those of its inputs. It may be called several times.
#[pyclass(frozen, module = "march_lm")]
pub struct Backward {
    gradients: Box<Gradients>,
    device: Device,
    /// The shape of each output for the engine, and whether it has a gradient.
    outputs: Vec<Vec<usize>>,
    /// The shape of each input as the caller gave it; `None` for one that was left out.
    inputs: Vec<Option<Vec<usize>>>,
}

#[pymethods]
impl Backward {
    #[pyo3(signature = (*gradients))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        gradients: &Bound<'py, PyTuple>,
    ) -> Result<Vec<Option<Bound<'py, PyAny>>>> {
        if gradients.len() != self.outputs.len() {
            let (found, expected) = (gradients.len(), self.outputs.len());
            return refuse(format!(
                "got {found} gradients, expected {expected}: one for each output, or None"
            ));
        }
        let mut list = Vec::new();
        for (gradient, shape) in gradients.iter().zip(&self.outputs) {
            let gradient = Some(gradient).filter(|gradient| !gradient.is_none());
            let tensor = |gradient: Bound<'py, PyAny>| {
                let numbers = Numbers::new("gradient", &gradient)?;
                if numbers.dims().iter().product::<usize>() != shape.iter().product::<usize>() {
                    return refuse(format!(
                        "a gradient has shape {:?}, expected that of its output",
                        numbers.dims()
                    ));
                }
                if numbers.is_f64 != (self.device.name() == Device::reference().name()) {
                    return refuse("a gradient must be of the same type as the inputs");
                }
                numbers.tensor(shape, &self.device)
            };
            list.push(gradient.map(tensor).transpose()?);
        }
        if list.iter().all(Option::is_none) {
            return Ok(vec![None; self.inputs.len()]);
        }
        let found = py.detach(|| (self.gradients)(list))?;
        let array = |(tensor, shape): (Option<Tensor>, &Option<Vec<usize>>)| match (tensor, shape) {
            (Some(tensor), Some(shape)) => of_tensor(py, &tensor, shape).map(Some),
            _ => Ok(None),
        };
        found.into_iter().zip(&self.inputs).map(array).collect()
    }
}

/// Arrays, and the backward pass if one was asked for.
type Found<'py, const N: usize> = ([Bound<'py, PyAny>; N], Option<Backward>);

const RULE: [&str; 8] = ["q", "k", "v", "a", "b", "a_log", "dt_bias", "initial_state"];
const QUERY: &str = "batch, tokens, key_heads, d_k";
const VALUE: &str = "batch, tokens, value_heads, d_v";
const GATE: &str = "batch, tokens, value_heads";

/// The gated delta rule. Inputs are q, k, v, a, b, a_log, dt_bias and initial_state or None; outputs the readout, the
/// final state and the states at boundaries.
#[pyfunction]
#[pyo3(signature = (inputs, boundaries, allow_neg_eigval, final_state, backward))]
pub fn gated_delta_vjp<'py>(
    py: Python<'py>,
    inputs: [Option<Bound<'py, PyAny>>; 8],
    boundaries: Vec<Vec<usize>>,
    allow_neg_eigval: bool,
    final_state: bool,
    backward: bool,
) -> Result<Found<'py, 3>> {
    let inputs = Inputs::new(&RULE, &inputs)?;
    let [batch, _, value_heads, value_dim] = inputs.shape(2, VALUE)?;
    let [_, _, key_heads, key_dim] = inputs.shape(1, QUERY)?;
    let options = GatedDeltaOptions {
        key_heads,
        value_heads,
        allow_neg_eigval,
        boundaries: Arc::new(boundaries),
        final_state,
        chunk_offset: 0,
    };
    let [_, _, asking_heads, _] = inputs.shape(0, QUERY)?;
    if asking_heads != key_heads {
        return refuse(format!("`q` has {asking_heads} heads and `k` {key_heads}; they must have as many"));
    }
    let input = GatedDelta {
        query: inputs.joined(0, QUERY)?,
        key: inputs.joined(1, QUERY)?,
        value: inputs.joined(2, VALUE)?,
        retention_input: inputs.plain::<3>(3, GATE)?,
        write_input: inputs.plain::<3>(4, GATE)?,
        a_log: inputs.plain::<1>(5, "value_heads")?,
        dt_bias: inputs.plain::<1>(6, "value_heads")?,
        initial_state: inputs.optional::<4>(7, "batch, value_heads, d_k, d_v")?,
    };
    let forward = GatedDeltaForward { input: input.clone(), options: options.clone(), keep: backward };
    let (found, kept) = py.detach(|| forward.run())?;
    let state = |states: &Tensor| [states.shape()[0], value_heads, key_dim, value_dim];
    let arrays = [
        of_tensor(py, &found.readout, &[batch, found.readout.shape()[1], value_heads, value_dim])?,
        of_tensor(py, &found.final_state, &state(&found.final_state))?,
        of_tensor(py, &found.boundary_states, &state(&found.boundary_states))?,
    ];
    let outputs = [&found.readout, &found.final_state, &found.boundary_states].map(|it| it.shape().to_vec());
    let gradients = move |mut list: Vec<Option<Tensor>>| {
        let [readout, final_state, boundary_states] = [0, 1, 2].map(|i: usize| list[i].take());
        // A state that was not asked for has no gradient.
        let final_state = final_state.filter(|_| options.final_state);
        let gradient = GatedDeltaGradient { readout, final_state, boundary_states };
        let (input, kept, options) = (input.clone(), kept.clone(), options.clone());
        let d = GatedDeltaBackward { input, options, kept, gradient }.run()?;
        let list = [d.query, d.key, d.value, d.retention_input, d.write_input, d.a_log, d.dt_bias];
        Ok(list.into_iter().map(Some).chain([d.initial_state]).collect())
    };
    let backward = backward.then(|| inputs.backward(outputs.to_vec(), gradients));
    Ok((arrays, backward))
}

/// The anchor reader. Inputs are q, routing_query, routing_keys, states and null_score or None; the output is the readout.
#[pyfunction]
#[pyo3(signature = (inputs, boundaries, top_k, scale, backward))]
pub fn anchor_read_vjp<'py>(
    py: Python<'py>,
    inputs: [Option<Bound<'py, PyAny>>; 5],
    boundaries: Vec<Vec<usize>>,
    top_k: Option<usize>,
    scale: f64,
    backward: bool,
) -> Result<Found<'py, 1>> {
    let inputs = Inputs::new(&["q", "routing_query", "routing_keys", "states", "null_score"], &inputs)?;
    let [batch, tokens, key_heads, _] = inputs.shape(0, QUERY)?;
    let [anchors, value_heads, _, value_dim] = inputs.shape(3, "anchors, value_heads, d_k, d_v")?;
    let [keys, heads, width] = inputs.shape(2, "anchors, value_heads, d_r")?;
    let listed: usize = boundaries.iter().map(Vec::len).sum();
    if boundaries.len() != batch || listed != anchors {
        return refuse(format!(
            "`boundaries` has {} lists with {listed} anchors in all, but there are {batch} sequences and {anchors} states; \
             give one list for each sequence, with the place of each anchor",
            boundaries.len()
        ));
    }
    let ascends = |list: &Vec<usize>| list.windows(2).all(|two| two[0] < two[1]);
    if !boundaries.iter().all(ascends) {
        return refuse("the `boundaries` of a sequence must ascend");
    }
    let plan = Arc::new(ReadPlan::from_boundaries(tokens, &boundaries));
    let options = AnchorReadOptions { key_heads, value_heads, top_k, routing_scale: scale, plan };
    let input = AnchorRead {
        query: inputs.joined(0, QUERY)?,
        routing_query: inputs.joined(1, "batch, tokens, value_heads, d_r")?,
        routing_keys: inputs.numbers(2)?.tensor(&[keys, heads * width], &inputs.device)?,
        anchor_states: inputs.plain::<4>(3, "anchors, value_heads, d_k, d_v")?,
        null_score: inputs.optional::<3>(4, GATE)?,
    };
    let forward = AnchorReadForward { input: input.clone(), options: options.clone(), keep: backward };
    let (readout, kept) = py.detach(|| forward.run())?;
    let arrays = [of_tensor(py, &readout, &[batch, tokens, value_heads, value_dim])?];
    let outputs = vec![readout.shape().to_vec()];
    let gradients = move |mut list: Vec<Option<Tensor>>| {
        let Some(gradient) = list[0].take() else { return Ok(vec![None; 5]) };
        let (input, options, readout, kept) = (input.clone(), options.clone(), readout.clone(), kept.clone());
        let d = AnchorReadBackward { input, options, readout, kept, gradient }.run()?;
        let list = [d.query, d.routing_query, d.routing_keys, d.anchor_states];
        Ok(list.into_iter().map(Some).chain([d.null_score]).collect())
    };
    let backward = backward.then(|| inputs.backward(outputs, gradients));
    Ok((arrays, backward))
}

/// The log-linear gated delta rule. Inputs are q, k, v, a, b, a_log, dt_bias, level_input and level_scale; the output is
/// the readout.
#[pyfunction]
#[pyo3(signature = (inputs, allow_neg_eigval, backward))]
pub fn log_linear_delta_vjp<'py>(
    py: Python<'py>,
    inputs: [Option<Bound<'py, PyAny>>; 9],
    allow_neg_eigval: bool,
    backward: bool,
) -> Result<Found<'py, 1>> {
    let names = [&RULE[..7], &["level_input", "level_scale"]].concat();
    let inputs = Inputs::new(&names, &inputs)?;
    let [batch, tokens, value_heads, value_dim] = inputs.shape(2, VALUE)?;
    let [_, _, key_heads, _] = inputs.shape(1, QUERY)?;
    let options =
        LogLinearOptions { key_heads, value_heads, allow_neg_eigval, position: 0, want_state: false };
    let input = LogLinear {
        query: inputs.joined(0, QUERY)?,
        key: inputs.joined(1, QUERY)?,
        value: inputs.joined(2, VALUE)?,
        retention_input: inputs.plain::<3>(3, GATE)?,
        write_input: inputs.plain::<3>(4, GATE)?,
        a_log: inputs.plain::<1>(5, "value_heads")?,
        dt_bias: inputs.plain::<1>(6, "value_heads")?,
        level_input: inputs.joined(7, "batch, tokens, value_heads, levels")?,
        level_scale: inputs.plain::<2>(8, "value_heads, levels")?,
    };
    let forward = LogLinearForward { input: input.clone(), options, initial: None, keep: backward };
    let found = py.detach(|| forward.run())?;
    let arrays = [of_tensor(py, &found.readouts, &[batch, tokens, value_heads, value_dim])?];
    let (outputs, saved) = (vec![found.readouts.shape().to_vec()], found.saved);
    let gradients = move |mut list: Vec<Option<Tensor>>| {
        let Some(gradient) = list[0].take() else { return Ok(vec![None; 9]) };
        let (input, saved) = (input.clone(), saved.clone());
        let d = LogLinearBackward { input, options, initial: None, saved, gradient }.run()?;
        Ok(d.into_array().into_iter().map(Some).collect())
    };
    let backward = backward.then(|| inputs.backward(outputs, gradients));
    Ok((arrays, backward))
}

impl Inputs<'_, '_> {
    /// The backward pass of a call with these inputs.
    fn backward(
        &self,
        outputs: Vec<Vec<usize>>,
        gradients: impl Fn(Vec<Option<Tensor>>) -> march_engine::Result<Vec<Option<Tensor>>>
        + Send
        + Sync
        + 'static,
    ) -> Backward {
        Backward {
            gradients: Box::new(gradients),
            device: self.device.clone(),
            outputs,
            inputs: self.shapes(),
        }
    }
}

//! Tape: reverse-mode differentiation.
//!
//! Parameters enter with [`Tape::parameter`]; whatever is computed from them is recorded by itself, so model code never
//! mentions the tape. Every operation computes its outputs immediately and, if an input is recorded, records a node:
//! the ids of its inputs and outputs, and a closure that owns exactly the tensors its backward pass reads.
//! [`Tape::backward`] pops the nodes from the end one by one. A closure is consumed when it runs, so its buffers return
//! to the pool as soon as they are no longer needed. Once the first node that used a parameter has been processed, that
//! parameter's gradient is final and is passed to the callback, while earlier layers are still to be processed.
//!
//! Tensors hold their tape weakly: nodes hold tensors, and a cycle would never be freed. Without a tape, or after it was
//! dropped, nothing is recorded: that is inference.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::{Result, bad_value};
use crate::op::Op;
use crate::ops::accumulate::Accumulate;
use crate::tensor::Tensor;

/// The place of a recorded tensor.
#[derive(Clone)]
pub(crate) struct Record {
    tape: Weak<Mutex<Inner>>,
    id: u64,
}

/// Gradients of inputs or of outputs, in their order; `None` means zero or not needed.
pub type Gradients = Vec<Option<Tensor>>;

type Backward = Box<dyn FnOnce(&Tape, Gradients) -> Result<Gradients> + Send>;

struct Node {
    inputs: Vec<Option<u64>>,
    outputs: Vec<u64>,
    backward: Backward,
}

struct Parameter {
    key: usize,
    first_use: Option<usize>,
}

#[derive(Default)]
struct Inner {
    /// Whether new nodes are left out: inside a region that will be recomputed.
    paused: bool,
    nodes: Vec<Node>,
    gradients: HashMap<u64, Tensor>,
    parameters: HashMap<u64, Parameter>,
}

/// Records what is computed from its parameters. Cloning copies a handle.
#[derive(Clone, Default)]
pub struct Tape(Arc<Mutex<Inner>>);

impl Tape {
    /// Creates an empty tape.
    pub fn new() -> Self {
        Self::default()
    }

    /// The tensor as a parameter, whose gradient [`Tape::backward`] passes to its callback together with `key`.
    pub fn parameter(&self, key: usize, tensor: &Tensor) -> Tensor {
        let mut inner = self.lock();
        let id = fresh();
        inner.parameters.insert(id, Parameter { key, first_use: None });
        tensor.clone().recorded(Record { tape: Arc::downgrade(&self.0), id })
    }

    /// Number of recorded nodes.
    pub fn len(&self) -> usize {
        self.lock().nodes.len()
    }

    /// Whether no nodes are recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the gradient that a tensor has received so far, for an operation that adds to it and returns the sum.
    pub fn take_gradient(&self, tensor: &Tensor) -> Option<Tensor> {
        self.lock().gradients.remove(&tensor.record()?.id)
    }

    /// Computes the gradients of a scalar with respect to all parameters it depends on. `ready(key, gradient)` is
    /// called once per parameter, as soon as its gradient is final.
    pub fn backward(&self, loss: &Tensor, ready: impl FnMut(usize, Tensor)) -> Result<()> {
        let shape = loss.shape();
        if loss.len() != 1 {
            return bad_value("backward", format!("the loss has shape {shape:?}; it must be a scalar"));
        }
        let one = Tensor::full(shape, 1.0, loss.device())?;
        self.backward_from(&[(loss, one)], ready)
    }

    /// Variant of [`Tape::backward`] that starts from given gradients of several values.
    pub fn backward_from(
        &self,
        seeds: &[(&Tensor, Tensor)],
        mut ready: impl FnMut(usize, Tensor),
    ) -> Result<()> {
        for (tensor, gradient) in seeds {
            let (want, came) = (tensor.shape(), gradient.shape());
            if want != came {
                return bad_value("backward", format!("gradient has shape {came:?}, expected {want:?}"));
            }
            if let Some(record) = tensor.record() {
                self.lock().accumulate(record.id, gradient.clone())?;
            }
        }
        loop {
            let mut inner = self.lock();
            let Some(node) = inner.nodes.pop() else { break };
            let gradients: Gradients = node.outputs.iter().map(|id| inner.gradients.remove(id)).collect();
            if gradients.iter().any(Option::is_some) {
                drop(inner);
                let passed = (node.backward)(self, gradients)?;
                inner = self.lock();
                for (id, gradient) in node.inputs.iter().zip(passed) {
                    if let (Some(id), Some(gradient)) = (id, gradient) {
                        inner.accumulate(*id, gradient)?;
                    }
                }
            }
            let finished = inner.finished_parameters();
            drop(inner);
            for (key, gradient) in finished {
                ready(key, gradient);
            }
        }
        self.lock().gradients.clear();
        Ok(())
    }
}

/// A new id. Ids are unique among all tapes, so that a tensor that was recorded elsewhere is not taken for another one.
fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Inner {
    /// Records the use of parameters by the next node. The first node that uses a parameter is the last to contribute
    /// to its gradient; for uses inside a recomputed region, this is the region's node.
    fn note_use(&mut self, ids: &[Option<u64>]) {
        let here = self.nodes.len();
        for id in ids.iter().flatten() {
            if let Some(parameter) = self.parameters.get_mut(id) {
                parameter.first_use = Some(parameter.first_use.map_or(here, |first| first.min(here)));
            }
        }
    }

    fn accumulate(&mut self, id: u64, gradient: Tensor) -> Result<()> {
        let sum = match self.gradients.remove(&id) {
            Some(sum) => Accumulate { sum, term: gradient }.run()?,
            None => gradient,
        };
        self.gradients.insert(id, sum);
        Ok(())
    }

    fn finished_parameters(&mut self) -> Vec<(usize, Tensor)> {
        let left = self.nodes.len();
        let mut ids: Vec<u64> = self
            .parameters
            .iter()
            .filter(|(id, p)| {
                p.first_use.is_some_and(|first| first >= left) && self.gradients.contains_key(id)
            })
            .map(|(&id, _)| id)
            .collect();
        ids.sort_unstable();
        ids.into_iter()
            .filter_map(|id| {
                let key = self.parameters.get(&id)?.key;
                self.gradients.remove(&id).map(|gradient| (key, gradient))
            })
            .collect()
    }
}

/// The tape of the first recorded input, if it is still there.
fn tape_of(inputs: &[&Tensor]) -> Option<Tape> {
    inputs.iter().find_map(|tensor| tensor.record()?.tape.upgrade()).map(Tape)
}

/// Whether an operation on these inputs will be recorded and must therefore keep data for its backward pass.
pub fn records(inputs: &[&Tensor]) -> bool {
    inputs.iter().any(|tensor| tensor.is_recorded())
        && tape_of(inputs).is_some_and(|tape| !tape.lock().paused)
}

/// Records an operation if one of its inputs is recorded, and returns its outputs. `backward` receives the tape and the
/// gradients of the outputs, and returns those of the inputs, each in order. Tensors that it keeps should be detached,
/// so that nothing is recorded while the tape runs backwards.
pub fn record(
    inputs: &[&Tensor],
    outputs: Vec<Tensor>,
    backward: impl FnOnce(&Tape, Gradients) -> Result<Gradients> + Send + 'static,
) -> Vec<Tensor> {
    if !inputs.iter().any(|tensor| tensor.is_recorded()) {
        return outputs;
    }
    let Some(tape) = tape_of(inputs) else { return outputs };
    let ids: Vec<Option<u64>> = inputs.iter().map(|tensor| Some(tensor.record()?.id)).collect();
    let mut inner = tape.lock();
    inner.note_use(&ids);
    if inner.paused {
        return outputs;
    }
    let out: Vec<u64> = outputs.iter().map(|_| fresh()).collect();
    inner.nodes.push(Node { inputs: ids, outputs: out.clone(), backward: Box::new(backward) });
    let record = |(tensor, id): (Tensor, u64)| tensor.recorded(Record { tape: Arc::downgrade(&tape.0), id });
    outputs.into_iter().zip(out).map(record).collect()
}

/// Variant of [`record`] for operations with a single output.
pub fn record_one(
    inputs: &[&Tensor],
    output: Tensor,
    backward: impl FnOnce(Tensor) -> Result<Gradients> + Send + 'static,
) -> Tensor {
    if !inputs.iter().any(|tensor| tensor.is_recorded()) {
        return output;
    }
    let count = inputs.len();
    let mut outputs = record(inputs, vec![output], move |_, mut gradients| match gradients.pop().flatten() {
        Some(gradient) => backward(gradient),
        None => Ok(vec![None; count]),
    });
    outputs.remove(0)
}

/// Runs `region` without recording and keeps only its inputs; the backward pass recomputes it (gradient checkpointing).
/// Gradients are bit-identical to those without recomputation. If no input is recorded, it just runs `region`.
pub fn recompute<E: From<crate::Error>>(
    inputs: &[&Tensor],
    region: impl Fn(&[Tensor]) -> Result<Vec<Tensor>, E> + Send + 'static,
) -> Result<Vec<Tensor>, E>
where
    crate::Error: From<E>,
{
    let tape = tape_of(inputs);
    let inputs: Vec<Tensor> = inputs.iter().map(|&tensor| tensor.clone()).collect();
    let Some(tape) = tape.filter(|tape| !tape.lock().paused) else { return region(&inputs) };
    tape.lock().paused = true;
    let outputs = region(&inputs);
    let mut inner = tape.lock();
    inner.paused = false;
    let outputs = outputs?;
    let ids: Vec<u64> = outputs.iter().map(|_| fresh()).collect();
    let backward = move |tape: &Tape, gradients: Gradients| {
        let outputs = region(&inputs)?;
        let mut inner = tape.lock();
        for (output, gradient) in outputs.iter().zip(gradients) {
            if let (Some(record), Some(gradient)) = (output.record(), gradient) {
                inner.accumulate(record.id, gradient)?;
            }
        }
        // The recomputed nodes are now at the end of the tape. The backward loop processes them next, and they pass
        // gradients to the region's inputs themselves.
        Ok(Vec::new())
    };
    inner.nodes.push(Node { inputs: Vec::new(), outputs: ids.clone(), backward: Box::new(backward) });
    let record = |(tensor, id): (Tensor, u64)| tensor.recorded(Record { tape: Arc::downgrade(&tape.0), id });
    Ok(outputs.into_iter().zip(ids).map(record).collect())
}

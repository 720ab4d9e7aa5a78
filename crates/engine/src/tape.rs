//! Tape: records a forward pass for reverse-mode differentiation.
//!
//! Parameters enter with [`Tape::parameter`], data with [`Tape::constant`]. Every operation computes its outputs
//! immediately and, if an input needs a gradient, records a node: the ids of its inputs and outputs, and a closure
//! that owns exactly the tensors its backward pass reads. [`Tape::backward`] pops the nodes from the end one by
//! one. A closure is consumed when it runs, so its buffers return to the pool as soon as they are no longer needed.
//! Once the first node that used a parameter has been processed, that parameter's gradient is final and is passed
//! to the callback, while earlier layers are still to be processed.
//!
//! A tape created with [`Tape::inference`] records no nodes and keeps no tensors.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::engine::{Engine, WeightRef, no_gradient};
use crate::error::{Result, bad_value};
use crate::weight::Weight;

/// Value in a computation: a tensor, and its id on the tape if it needs a gradient.
#[derive(Clone, Debug)]
pub struct Var<T> {
    value: T,
    id: Option<u64>,
}

impl<T> Var<T> {
    /// Tensor of this variable.
    pub fn value(&self) -> &T {
        &self.value
    }

    /// Converts into the tensor.
    pub fn into_value(self) -> T {
        self.value
    }

    /// Variable with the same tensor but detached from the tape: no gradient flows through it.
    pub fn detach(&self) -> Self
    where
        T: Clone,
    {
        Self { value: self.value.clone(), id: None }
    }
}

/// Takes the gradients of a node's outputs and returns those of its inputs; `None` means zero or not needed.
type Gradients<E> = Vec<Option<<E as Engine>::Tensor>>;
type Backward<'e, E> = Box<dyn FnOnce(&Tape<'e, E>, Gradients<E>) -> Result<Gradients<E>> + 'e>;

struct Node<'e, E: Engine> {
    inputs: Vec<Option<u64>>,
    outputs: Vec<u64>,
    backward: Backward<'e, E>,
}

struct Parameter {
    key: usize,
    first_use: Option<usize>,
}

struct Inner<'e, E: Engine> {
    recording: bool,
    next_id: u64,
    nodes: Vec<Node<'e, E>>,
    gradients: HashMap<u64, E::Tensor>,
    parameters: HashMap<u64, Parameter>,
}

/// Records operations on an engine. Model code is written once against this type and runs on any engine.
pub struct Tape<'e, E: Engine> {
    engine: &'e E,
    inner: RefCell<Inner<'e, E>>,
}

impl<'e, E: Engine> Tape<'e, E> {
    /// Creates a recording tape.
    pub fn new(engine: &'e E) -> Self {
        Self::with(engine, true)
    }

    /// Creates a tape that computes without recording.
    pub fn inference(engine: &'e E) -> Self {
        Self::with(engine, false)
    }

    fn with(engine: &'e E, recording: bool) -> Self {
        let inner = Inner {
            recording,
            next_id: 0,
            nodes: Vec::new(),
            gradients: HashMap::new(),
            parameters: HashMap::new(),
        };
        Self { engine, inner: RefCell::new(inner) }
    }

    /// Engine that runs the operations.
    pub fn engine(&self) -> &'e E {
        self.engine
    }

    /// Value without a gradient.
    pub fn constant(&self, value: E::Tensor) -> Var<E::Tensor> {
        Var { value, id: None }
    }

    /// Value whose gradient [`Tape::backward`] passes to its callback together with `key`.
    pub fn parameter(&self, key: usize, value: E::Tensor) -> Var<E::Tensor> {
        let mut inner = self.inner.borrow_mut();
        if !inner.recording {
            return Var { value, id: None };
        }
        let id = inner.fresh();
        inner.parameters.insert(id, Parameter { key, first_use: None });
        Var { value, id: Some(id) }
    }

    /// Number of recorded nodes.
    pub fn len(&self) -> usize {
        self.inner.borrow().nodes.len()
    }

    /// Whether no nodes are recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether an operation on these inputs will be recorded and must therefore save data for its backward pass.
    pub(crate) fn records(&self, inputs: &[&Var<E::Tensor>]) -> bool {
        self.inner.borrow().recording && inputs.iter().any(|v| v.id.is_some())
    }

    /// Whether none of these inputs needs a gradient, so that nothing has to be saved or recorded.
    pub(crate) fn is_constant(&self, inputs: &[&Var<E::Tensor>]) -> bool {
        inputs.iter().all(|v| v.id.is_none())
    }

    /// Rejects packed weights on a recording tape, because they are not differentiable.
    pub(crate) fn refuse_packed(&self, operation: &'static str, weights: &[WeightRef<'_, E>]) -> Result<()> {
        if !self.inner.borrow().recording {
            return Ok(());
        }
        weights.iter().try_for_each(|weight| match weight {
            Weight::Full(_) => Ok(()),
            Weight::Packed(packed) => no_gradient(operation, self.engine.packed_precision(packed)),
        })
    }

    /// Records an operation and returns its outputs as variables. `backward` receives the gradients of the outputs
    /// and returns those of the inputs, each in order.
    pub(crate) fn record(
        &self,
        inputs: &[&Var<E::Tensor>],
        outputs: Vec<E::Tensor>,
        backward: impl FnOnce(&Tape<'e, E>, Gradients<E>) -> Result<Gradients<E>> + 'e,
    ) -> Vec<Var<E::Tensor>> {
        if self.is_constant(inputs) {
            return outputs.into_iter().map(|value| Var { value, id: None }).collect();
        }
        let ids: Vec<Option<u64>> = inputs.iter().map(|v| v.id).collect();
        let mut inner = self.inner.borrow_mut();
        inner.note_use(&ids);
        if !inner.recording {
            return outputs.into_iter().map(|value| Var { value, id: None }).collect();
        }
        let out: Vec<u64> = outputs.iter().map(|_| inner.fresh()).collect();
        inner.nodes.push(Node { inputs: ids, outputs: out.clone(), backward: Box::new(backward) });
        outputs.into_iter().zip(out).map(|(value, id)| Var { value, id: Some(id) }).collect()
    }

    /// Variant of [`Tape::record`] for operations with a single output.
    pub(crate) fn record_one(
        &self,
        inputs: &[&Var<E::Tensor>],
        output: E::Tensor,
        backward: impl FnOnce(&Tape<'e, E>, E::Tensor) -> Result<Gradients<E>> + 'e,
    ) -> Var<E::Tensor> {
        if self.is_constant(inputs) {
            return Var { value: output, id: None };
        }
        let count = inputs.len();
        let mut vars =
            self.record(inputs, vec![output], move |tape, mut gradients| match gradients.pop().flatten() {
                Some(gradient) => backward(tape, gradient),
                None => Ok(vec![None; count]),
            });
        vars.remove(0)
    }

    /// Takes the gradient that a variable has received so far, for an operation that adds to it and returns the sum.
    pub(crate) fn take_gradient(&self, var: &Var<E::Tensor>) -> Option<E::Tensor> {
        self.inner.borrow_mut().gradients.remove(&var.id?)
    }

    /// Runs `region` without recording and keeps only its inputs; the backward pass recomputes it (gradient
    /// checkpointing). Gradients are bit-identical to those without recomputation.
    pub fn recompute(
        &self,
        inputs: &[&Var<E::Tensor>],
        region: impl Fn(&Tape<'e, E>, &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> + 'e,
    ) -> Result<Vec<Var<E::Tensor>>> {
        let inputs: Vec<Var<E::Tensor>> = inputs.iter().map(|&v| v.clone()).collect();
        if !self.inner.borrow().recording {
            return region(self, &inputs);
        }
        self.inner.borrow_mut().recording = false;
        let outputs = region(self, &inputs);
        let mut inner = self.inner.borrow_mut();
        inner.recording = true;
        let outputs = outputs?;
        let ids: Vec<u64> = outputs.iter().map(|_| inner.fresh()).collect();
        let backward = move |tape: &Tape<'e, E>, gradients: Gradients<E>| {
            let outputs = region(tape, &inputs)?;
            let mut inner = tape.inner.borrow_mut();
            for (output, gradient) in outputs.iter().zip(gradients) {
                if let (Some(id), Some(gradient)) = (output.id, gradient) {
                    inner.accumulate(tape.engine, id, gradient)?;
                }
            }
            // The recomputed nodes are now at the end of the tape. The backward loop processes them next, and they
            // pass gradients to the region's inputs themselves.
            Ok(Vec::new())
        };
        inner.nodes.push(Node { inputs: Vec::new(), outputs: ids.clone(), backward: Box::new(backward) });
        Ok(outputs.into_iter().zip(ids).map(|(v, id)| Var { value: v.value, id: Some(id) }).collect())
    }

    /// Computes the gradients of a scalar with respect to all parameters it depends on. `ready(key, gradient)` is
    /// called once per parameter, as soon as its gradient is final.
    pub fn backward(&self, loss: &Var<E::Tensor>, ready: impl FnMut(usize, E::Tensor)) -> Result<()> {
        let shape = self.engine.shape(&loss.value).to_vec();
        if shape.iter().product::<usize>() != 1 {
            return bad_value("backward", format!("the loss has shape {shape:?}; it must be a scalar"));
        }
        let one = self.engine.full(&shape, 1.0)?;
        self.backward_from(&[(loss, one)], ready)
    }

    /// Variant of [`Tape::backward`] that starts from given gradients of several values.
    pub fn backward_from(
        &self,
        seeds: &[(&Var<E::Tensor>, E::Tensor)],
        mut ready: impl FnMut(usize, E::Tensor),
    ) -> Result<()> {
        for (var, gradient) in seeds {
            let (want, came) = (self.engine.shape(&var.value), self.engine.shape(gradient));
            if want != came {
                return bad_value("backward", format!("gradient has shape {came:?}, expected {want:?}"));
            }
            if let Some(id) = var.id {
                self.inner.borrow_mut().accumulate(self.engine, id, gradient.clone())?;
            }
        }
        loop {
            let Some(node) = self.inner.borrow_mut().nodes.pop() else { break };
            let gradients: Gradients<E> = {
                let mut inner = self.inner.borrow_mut();
                node.outputs.iter().map(|id| inner.gradients.remove(id)).collect()
            };
            if gradients.iter().any(Option::is_some) {
                let passed = (node.backward)(self, gradients)?;
                let mut inner = self.inner.borrow_mut();
                for (id, gradient) in node.inputs.iter().zip(passed) {
                    if let (Some(id), Some(gradient)) = (id, gradient) {
                        inner.accumulate(self.engine, *id, gradient)?;
                    }
                }
            }
            let finished = self.inner.borrow_mut().finished_parameters();
            for (key, gradient) in finished {
                ready(key, gradient);
            }
        }
        self.inner.borrow_mut().gradients.clear();
        Ok(())
    }
}

impl<E: Engine> Inner<'_, E> {
    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Records the use of parameters by the next node. The first node that uses a parameter is the last to
    /// contribute to its gradient; for uses inside a recomputed region, this is the region's node.
    fn note_use(&mut self, ids: &[Option<u64>]) {
        let here = self.nodes.len();
        for id in ids.iter().flatten() {
            if let Some(parameter) = self.parameters.get_mut(id) {
                parameter.first_use = Some(parameter.first_use.map_or(here, |first| first.min(here)));
            }
        }
    }

    fn accumulate(&mut self, engine: &E, id: u64, gradient: E::Tensor) -> Result<()> {
        match self.gradients.get_mut(&id) {
            Some(sum) => engine.accumulate(sum, &gradient),
            None => {
                self.gradients.insert(id, gradient);
                Ok(())
            }
        }
    }

    fn finished_parameters(&mut self) -> Vec<(usize, E::Tensor)> {
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

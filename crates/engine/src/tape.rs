//! The tape: what a forward pass did, so that a backward pass can undo it.
//!
//! Life of one step. Parameters enter with [`Tape::parameter`], data with [`Tape::constant`]. Every operation
//! computes its outputs at once and, if an input needs a gradient, leaves a node: the ids of its inputs and
//! outputs, and a closure that holds exactly the tensors its backward pass reads. [`Tape::backward`] takes the
//! nodes off the end one by one; a closure is consumed when it runs, so its buffers return to the pool as
//! soon as their last reader is done. When the sweep has passed the first node that used a parameter, the
//! parameter's gradient is final and the callback gets it, while earlier layers are still to come.
//!
//! A tape made with [`Tape::inference`] leaves no nodes and keeps nothing.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::engine::{Engine, WeightRef, no_gradient};
use crate::error::{Result, bad_value};
use crate::weight::Weight;

/// A value in a computation: a tensor, and its place on the tape if a gradient flows to it.
#[derive(Clone, Debug)]
pub struct Var<T> {
    value: T,
    id: Option<u64>,
}

impl<T> Var<T> {
    /// The tensor.
    pub fn value(&self) -> &T {
        &self.value
    }

    /// The tensor, by value.
    pub fn into_value(self) -> T {
        self.value
    }

    /// A variable of this tensor that is cut off from the tape: no gradient flows through it.
    pub fn detach(&self) -> Self
    where
        T: Clone,
    {
        Self { value: self.value.clone(), id: None }
    }
}

/// Gradients of a node's outputs in, gradients of its inputs out; `None` is zero or not needed.
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

/// Records operations on an engine. Model code is written once against it, for any engine.
pub struct Tape<'e, E: Engine> {
    engine: &'e E,
    inner: RefCell<Inner<'e, E>>,
}

impl<'e, E: Engine> Tape<'e, E> {
    /// A tape that records.
    pub fn new(engine: &'e E) -> Self {
        Self::with(engine, true)
    }

    /// A tape that only computes.
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

    /// The engine that computes.
    pub fn engine(&self) -> &'e E {
        self.engine
    }

    /// A value to which no gradient flows.
    pub fn constant(&self, value: E::Tensor) -> Var<E::Tensor> {
        Var { value, id: None }
    }

    /// A value whose gradient [`Tape::backward`] hands out under `key`.
    pub fn parameter(&self, key: usize, value: E::Tensor) -> Var<E::Tensor> {
        let mut inner = self.inner.borrow_mut();
        if !inner.recording {
            return Var { value, id: None };
        }
        let id = inner.fresh();
        inner.parameters.insert(id, Parameter { key, first_use: None });
        Var { value, id: Some(id) }
    }

    /// Nodes on the tape.
    pub fn len(&self) -> usize {
        self.inner.borrow().nodes.len()
    }

    /// Whether nothing has been recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether an operation on these inputs will be recorded, so that it keeps what its backward needs.
    pub(crate) fn records(&self, inputs: &[&Var<E::Tensor>]) -> bool {
        self.inner.borrow().recording && inputs.iter().any(|v| v.id.is_some())
    }

    /// Whether no gradient can flow to any of these inputs: nothing needs to be kept or recorded.
    pub(crate) fn is_constant(&self, inputs: &[&Var<E::Tensor>]) -> bool {
        inputs.iter().all(|v| v.id.is_none())
    }

    /// Refuses packed weights on a tape that records, because no gradient passes them.
    pub(crate) fn refuse_packed(&self, operation: &'static str, weights: &[WeightRef<'_, E>]) -> Result<()> {
        if !self.inner.borrow().recording {
            return Ok(());
        }
        weights.iter().try_for_each(|weight| match weight {
            Weight::Full(_) => Ok(()),
            Weight::Packed(packed) => no_gradient(operation, self.engine.packed_precision(packed)),
        })
    }

    /// Puts the outputs of an operation on the tape. `backward` gets the gradients of the outputs, in their
    /// order, and returns those of the inputs, in theirs.
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

    /// [`Tape::record`] for one output.
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

    /// Runs `region` and keeps only its inputs; the backward pass runs it again. The gradients have the same
    /// bits as without the region.
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
            // The nodes that ran again are now at the end of the tape: the sweep takes them next, and they
            // pass gradients to the region's inputs themselves.
            Ok(Vec::new())
        };
        inner.nodes.push(Node { inputs: Vec::new(), outputs: ids.clone(), backward: Box::new(backward) });
        Ok(outputs.into_iter().zip(ids).map(|(v, id)| Var { value: v.value, id: Some(id) }).collect())
    }

    /// Gradients of a scalar with respect to all parameters that it depends on. `ready(key, gradient)` is
    /// called once for each as soon as its gradient is final.
    pub fn backward(&self, loss: &Var<E::Tensor>, ready: impl FnMut(usize, E::Tensor)) -> Result<()> {
        let shape = self.engine.shape(&loss.value).to_vec();
        if shape.iter().product::<usize>() != 1 {
            return bad_value("backward", format!("the loss has shape {shape:?}; it must be one number"));
        }
        let one = self.engine.full(&shape, 1.0)?;
        self.backward_from(&[(loss, one)], ready)
    }

    /// Like [`Tape::backward`], from given gradients of several values.
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

    /// The first node that uses a parameter is the last to add to its gradient. Inside a region that will
    /// run again, that node is the region's.
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

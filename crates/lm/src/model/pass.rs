//! One call of the model, as seen by its parts.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::vec::IntoIter;

use march_engine::ops::linear::{Product, linear_list};
use march_engine::ops::rms_norm::rms_norm_each;
use march_engine::{Device, Tensor};

use super::TraceCell;
use super::mixer::Streams;
use super::parameters::{Parameter, Projection};
use crate::anchors::AnchorPlan;
use crate::error::{Error, Result};
use crate::memory::Memory;

/// The parameters of a model, in the order of the layout, shared by threads. Matrices may be packed; see
/// [`super::Model::quantize`].
pub type Weights = Arc<[Tensor]>;

/// Data shared by all parts of a call.
pub(crate) struct Context {
    pub weights: Weights,
    /// With memories, one plan per sequence; without, a single plan for all sequences.
    pub rows: Vec<RowPlan>,
    pub norm_eps: f64,
    /// Where routing weights are recorded, for each of `rows`; empty if nowhere.
    pub traces: Vec<Option<TraceCell>>,
}

/// One sequence's part of a call.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowPlan {
    /// Number of text tokens before the call.
    pub position: usize,
    /// Number of text tokens in the call.
    pub tokens: usize,
    pub anchors: AnchorPlan,
}

/// One sequence's part of a call, as a mixer sees it; without memories, that of all sequences, which have equal length.
#[derive(Clone, Copy, Debug)]
pub struct Row<'p> {
    /// The sequence's index in the call.
    pub index: usize,
    /// Number of text tokens before the call.
    pub position: usize,
    /// Number of text tokens in the call.
    pub tokens: usize,
    /// The call's anchor plan; irrelevant to a mixer without anchors.
    pub anchors: &'p AnchorPlan,
}

/// What a mixer computes along the text of one sequence.
pub struct MixerOutput {
    /// One vector per token, [B, n, ..].
    pub readout: Tensor,
    /// One state for each of the call's new anchors, [N, ..], if the mixer has anchors.
    pub states: Option<Tensor>,
}

impl From<Tensor> for MixerOutput {
    fn from(readout: Tensor) -> Self {
        Self { readout, states: None }
    }
}

/// One call: the weights and the sequences. Cloning copies a handle.
#[derive(Clone)]
pub struct Pass(pub(crate) Arc<Context>);

impl Pass {
    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        self.0.weights[0].device()
    }

    /// A parameter. Matrices may be packed, so products and embeddings read them, nothing else does.
    pub fn weight(&self, parameter: Parameter) -> &Tensor {
        &self.0.weights[parameter.0]
    }

    /// The constant added to mean squares before the root.
    pub fn norm_eps(&self) -> f64 {
        self.0.norm_eps
    }

    /// x Wᵀ (+ b) for several linear layers, as one operation. The result has the form of what is asked for: a tensor for
    /// a [`Projection`], an array for an array, `None` for `None`, a tuple for a tuple.
    pub fn project<P: Projections>(&self, x: &Tensor, layers: P) -> Result<P::Output> {
        let mut list = Vec::new();
        layers.list(&mut list);
        let weights: Vec<&Tensor> = list.iter().map(|layer| self.weight(layer.weight)).collect();
        let product = |(i, layer): (usize, &Projection)| Product {
            bias: layer.bias.map(|bias| self.weight(bias)),
            ..Product::new(0, i)
        };
        let products: Vec<Product<&Tensor>> = list.iter().enumerate().map(product).collect();
        Ok(layers.take(&mut linear_list(&[x], &weights, &products)?.into_iter()))
    }

    /// x Wᵀ for both streams and two W, as one operation.
    pub(super) fn project_streams(&self, x: &Streams, layers: [Projection; 2]) -> Result<Vec<[Tensor; 2]>> {
        let weights = layers.map(|layer| self.weight(layer.weight));
        let x = x.list();
        let products: Vec<_> = (0..x.len()).flat_map(|i| [Product::new(i, 0), Product::new(i, 1)]).collect();
        let found = linear_list(&x, &weights, &products)?;
        Ok(found.chunks_exact(2).map(|two| [two[0].clone(), two[1].clone()]).collect())
    }

    /// x + h Wᵀ for each stream that h has.
    pub fn add_linear(&self, x: &Streams, h: &Streams, layer: Projection) -> Result<Streams> {
        let weights = [self.weight(layer.weight)];
        let bias = layer.bias.map(|bias| self.weight(bias));
        let product = |x: usize, residual| Product { residual, bias, ..Product::new(x, 0) };
        let (Some(anchors), Some(more)) = (&x.anchors, &h.anchors) else {
            let mut text = linear_list(&[&h.text], &weights, &[product(0, Some(&x.text))])?;
            return Ok(Streams { text: text.remove(0), anchors: None });
        };
        // While all anchors are equal, x has one row for all of them.
        let same = anchors.shape()[0] == more.shape()[0];
        let products = [product(0, Some(&x.text)), product(1, same.then_some(anchors))];
        let found = linear_list(&[&h.text, more], &weights, &products)?;
        let Ok([text, more]) = <[_; 2]>::try_from(found) else { unreachable!("two products") };
        let anchors = if same { more } else { anchors.add(&more)? };
        Ok(Streams { text, anchors: Some(anchors) })
    }

    /// x / rms(x) ∘ w for each stream.
    pub fn rms_norm(&self, x: &Streams, weight: Parameter) -> Result<Streams> {
        Ok(Streams::of(rms_norm_each(&x.list(), self.weight(weight), self.norm_eps())?))
    }

    /// Number of new anchors in the call, over all sequences.
    pub fn new_anchors(&self) -> usize {
        self.0.rows.last().map_or(0, |row| row.anchors.new.end)
    }

    /// Where routing weights of a sequence are recorded, if anywhere.
    pub fn trace(&self, row: Row<'_>) -> Option<&TraceCell> {
        self.0.traces.get(row.index)?.as_ref()
    }

    /// Runs the part of a mixer that works along the text.
    ///
    /// Without memories, `mix` is called once for all sequences, with inputs [B, n, ..]. With memories, the inputs are
    /// the concatenated tokens of the sequences, [1, N, ..], and `mix` is called once per sequence with that sequence's
    /// tokens and memory, so that the result of one sequence cannot depend on the others. Sequences run in parallel on
    /// the device's threads, except that one with a large share of the call's tokens runs alone, with its operations on
    /// all threads.
    pub fn each_row<I: RowInputs, M: Memory, O: Into<MixerOutput> + Send>(
        &self,
        inputs: I,
        memory: &mut [&mut dyn Memory],
        mix: impl Fn(I, Row<'_>, Option<&mut M>) -> Result<O> + Sync,
    ) -> Result<MixerOutput> {
        let rows = &self.0.rows;
        match memory {
            [] => return Ok(mix(inputs, rows[0].row(0), None)?.into()),
            [memory] => return Ok(mix(inputs, rows[0].row(0), Some(own_memory(*memory)?))?.into()),
            _ => {}
        }
        let mut tasks = Vec::with_capacity(rows.len());
        let mut start = 0;
        for (row, memory) in rows.iter().zip(memory) {
            let span = start..start + row.tokens;
            start = span.end;
            tasks.push((row, span, Mutex::new((own_memory::<M>(*memory)?, None))));
        }
        let run = |task: usize| {
            let (row, span, cell) = &tasks[task];
            let mut cell = cell.lock().unwrap_or_else(PoisonError::into_inner);
            let (memory, result) = &mut *cell;
            let mixed = inputs.tokens(span).and_then(|inputs| mix(inputs, row.row(task), Some(memory)));
            *result = Some(mixed);
        };
        let is_long = |row: &RowPlan| row.tokens >= LONG_TOKENS && 4 * row.tokens > start;
        let (long, short): (Vec<usize>, Vec<usize>) =
            (0..tasks.len()).partition(|&task| is_long(tasks[task].0));
        long.into_iter().for_each(&run);
        self.device().side_by_side(short.len(), &|i| run(short[i]));
        let (mut readouts, mut states) = (Vec::with_capacity(tasks.len()), Vec::new());
        for (_, _, cell) in tasks {
            let (_, result) = cell.into_inner().unwrap_or_else(PoisonError::into_inner);
            let Some(result) = result else { unreachable!("every task ran") };
            let mixed: MixerOutput = result?.into();
            readouts.push(mixed.readout);
            states.extend(mixed.states);
        }
        let join = |parts: &[Tensor], axis| Tensor::concat(&parts.iter().collect::<Vec<_>>(), axis);
        let states = if states.is_empty() { None } else { Some(join(&states, 0)?) };
        Ok(MixerOutput { readout: join(&readouts, 1)?, states })
    }
}

/// A sequence with at least this many tokens and more than a quarter of the call's tokens runs alone.
const LONG_TOKENS: usize = 64;

impl RowPlan {
    fn row(&self, index: usize) -> Row<'_> {
        let Self { position, tokens, anchors } = self;
        Row { index, position: *position, tokens: *tokens, anchors }
    }
}

/// Downcasts a memory to the type that its mixer created.
fn own_memory<M: Memory>(memory: &mut dyn Memory) -> Result<&mut M> {
    let any: &mut dyn Any = memory;
    any.downcast_mut().ok_or_else(|| Error::Request("the bank belongs to a model with other mixers".into()))
}

/// A range of a tensor's rows.
pub(super) fn slice_rows(x: &Tensor, rows: Range<usize>) -> Result<Tensor> {
    if rows == (0..x.shape()[0]) {
        return Ok(x.clone());
    }
    Ok(x.slice(0, rows)?)
}

/// Repeats x [1, D] to `count` rows; returns x unchanged if it already has `count` rows.
pub(super) fn repeat_rows(x: &Tensor, count: usize) -> Result<Tensor> {
    match *x.shape() {
        [1, width] if count != 1 => Ok(x.reshape(&[width])?.expand(0, count)?),
        _ => Ok(x.clone()),
    }
}

/// Linear layers that [`Pass::project`] applies as one operation.
pub trait Projections: Sized {
    /// The results, in the same form.
    type Output;
    /// Appends the layers, in order.
    fn list(&self, to: &mut Vec<Projection>);
    /// Takes the results, in order.
    fn take(self, from: &mut IntoIter<Tensor>) -> Self::Output;
}

impl Projections for Projection {
    type Output = Tensor;
    fn list(&self, to: &mut Vec<Projection>) {
        to.push(*self);
    }
    fn take(self, from: &mut IntoIter<Tensor>) -> Tensor {
        let Some(tensor) = from.next() else { unreachable!("one result for each layer") };
        tensor
    }
}

/// What [`Pass::each_row`] cuts into rows: a tensor [1, n, ..], or a collection of these.
pub trait RowInputs: Sized + Sync {
    /// The tokens of a range.
    fn tokens(&self, range: &Range<usize>) -> Result<Self>;
}

impl RowInputs for Tensor {
    fn tokens(&self, range: &Range<usize>) -> Result<Self> {
        Ok(self.slice(1, range.clone())?)
    }
}

impl<P: Projections, const N: usize> Projections for [P; N] {
    type Output = [P::Output; N];
    fn list(&self, to: &mut Vec<Projection>) {
        self.iter().for_each(|layer| layer.list(to));
    }
    fn take(self, from: &mut IntoIter<Tensor>) -> Self::Output {
        self.map(|layer| layer.take(from))
    }
}

impl<I: RowInputs, const N: usize> RowInputs for [I; N] {
    fn tokens(&self, range: &Range<usize>) -> Result<Self> {
        let all = self.iter().map(|input| input.tokens(range)).collect::<Result<Vec<I>>>()?;
        let Ok(all) = all.try_into() else { unreachable!("as many as before") };
        Ok(all)
    }
}

impl<P: Projections> Projections for Option<P> {
    type Output = Option<P::Output>;
    fn list(&self, to: &mut Vec<Projection>) {
        self.iter().for_each(|layer| layer.list(to));
    }
    fn take(self, from: &mut IntoIter<Tensor>) -> Self::Output {
        self.map(|layer| layer.take(from))
    }
}

impl<I: RowInputs> RowInputs for Option<I> {
    fn tokens(&self, range: &Range<usize>) -> Result<Self> {
        self.as_ref().map(|input| input.tokens(range)).transpose()
    }
}

/// Tuples of what is asked for, and of inputs.
macro_rules! tuples {
    ($($name:ident)+) => {
        #[allow(non_snake_case)]
        impl<$($name: Projections),+> Projections for ($($name,)+) {
            type Output = ($($name::Output,)+);
            fn list(&self, to: &mut Vec<Projection>) {
                let ($($name,)+) = self;
                $($name.list(to);)+
            }
            fn take(self, from: &mut IntoIter<Tensor>) -> Self::Output {
                let ($($name,)+) = self;
                ($($name.take(from),)+)
            }
        }

        #[allow(non_snake_case)]
        impl<$($name: RowInputs),+> RowInputs for ($($name,)+) {
            fn tokens(&self, range: &Range<usize>) -> Result<Self> {
                let ($($name,)+) = self;
                Ok(($($name.tokens(range)?,)+))
            }
        }
    };
}

tuples! { A B }
tuples! { A B C }
tuples! { A B C D }

//! One call of the model, as seen by its parts.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use march_engine::ops::linear::{Linear, LinearList, Product};
use march_engine::ops::rms_norm::RmsNormList;
use march_engine::{Engine, Tape, Var, Weight};

use super::TraceCell;
use super::mixer::Streams;
use super::parameters::Parameter;
use crate::anchors::AnchorPlan;
use crate::error::Result;

/// The parameters on a tape, in the order of the layout, shared by threads. Matrices may be packed; see
/// [`super::Model::quantize`].
pub type Weights<E> = Arc<[Weight<Var<<E as Engine>::Tensor>, <E as Engine>::Packed>]>;

/// Data shared by all parts of a call.
pub(crate) struct Context<E: Engine> {
    pub weights: Weights<E>,
    /// With memories, one plan per sequence; without, a single plan for all sequences.
    pub rows: Vec<RowPlan>,
    pub norm_eps: f64,
    /// Where routing weights are recorded, for each of `rows`; empty if nowhere.
    pub traces: Vec<Option<TraceCell<E>>>,
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
pub struct MixerOutput<T> {
    /// One vector per token, [B, n, ..].
    pub readout: Var<T>,
    /// One state for each of the call's new anchors, [N, ..], if the mixer has anchors.
    pub states: Option<Var<T>>,
}

/// One call: its tape, the weights, and the sequences.
pub struct Pass<'t, 'e, E: Engine> {
    /// The tape that operations run on.
    pub tape: &'t Tape<'e, E>,
    pub(crate) context: Arc<Context<E>>,
}

impl<E: Engine> Pass<'_, '_, E> {
    /// The engine.
    pub fn engine(&self) -> &E {
        self.tape.engine()
    }

    /// A parameter that is not used in a product or an embedding, such as a norm or a bias. These are never packed.
    ///
    /// # Panics
    /// If the parameter is a matrix that is packed: read it with [`Pass::matrix`].
    pub fn weight(&self, parameter: Parameter) -> &Var<E::Tensor> {
        let weight = self.context.weights[parameter.0].full();
        weight.expect("a packed matrix is read with Pass::matrix, Pass::linear or Pass::linear_each")
    }

    /// A matrix that is used in a product or an embedding: in full precision, or packed.
    pub fn matrix(&self, parameter: Parameter) -> Weight<&Var<E::Tensor>, &E::Packed> {
        self.context.weights[parameter.0].as_ref()
    }

    /// The constant added to mean squares before the root.
    pub fn norm_eps(&self) -> f64 {
        self.context.norm_eps
    }

    /// x Wᵀ.
    pub fn linear(&self, x: &Var<E::Tensor>, weight: Parameter) -> Result<Var<E::Tensor>> {
        Ok(self.tape.linear(Linear { x, weight: self.matrix(weight), bias: None })?)
    }

    /// x Wᵀ for each of several W.
    pub fn linear_each<const N: usize>(
        &self,
        x: &Var<E::Tensor>,
        weights: [Parameter; N],
    ) -> Result<[Var<E::Tensor>; N]> {
        Ok(self.tape.linear_each(x, weights.map(|weight| self.matrix(weight)))?)
    }

    /// Products of several x, as one operation; the products name x and weights by their places in the lists.
    pub fn linear_list(
        &self,
        x: &[&Var<E::Tensor>],
        weights: &[Parameter],
        products: &[Product<&Var<E::Tensor>>],
    ) -> Result<Vec<Var<E::Tensor>>> {
        let weights: Vec<_> = weights.iter().map(|&weight| self.matrix(weight)).collect();
        Ok(self.tape.linear_list(LinearList { x, weights: &weights, products })?)
    }

    /// x + h Wᵀ for each stream that h has.
    pub fn add_linear(
        &self,
        x: &Streams<E::Tensor>,
        h: &Streams<E::Tensor>,
        weight: Parameter,
    ) -> Result<Streams<E::Tensor>> {
        let shape = |x: &Var<E::Tensor>| self.engine().shape(x.value()).to_vec();
        let product = |x: usize, residual| Product { residual, ..Product::new(x, 0) };
        let (Some(anchors), Some(more)) = (&x.anchors, &h.anchors) else {
            let mut text = self.linear_list(&[&h.text], &[weight], &[product(0, Some(&x.text))])?;
            return Ok(Streams { text: text.remove(0), anchors: None });
        };
        // While all anchors are equal, x has one row for all of them.
        let same = shape(anchors)[0] == shape(more)[0];
        let products = [product(0, Some(&x.text)), product(1, same.then_some(anchors))];
        let found = self.linear_list(&[&h.text, more], &[weight], &products)?;
        let Ok([text, more]) = <[_; 2]>::try_from(found) else { unreachable!("two products") };
        let anchors = if same { more } else { self.tape.add(anchors, &more)? };
        Ok(Streams { text, anchors: Some(anchors) })
    }

    /// x / rms(x) ∘ w for each stream.
    pub fn rms_norm(&self, x: &Streams<E::Tensor>, weight: Parameter) -> Result<Streams<E::Tensor>> {
        let list = RmsNormList { x: &x.list(), weight: self.weight(weight) };
        Ok(Streams::of(self.tape.rms_norm_each(list, self.norm_eps())?))
    }

    /// Number of new anchors in the call, over all sequences.
    pub fn new_anchors(&self) -> usize {
        self.context.rows.last().map_or(0, |row| row.anchors.new.end)
    }

    /// Where routing weights of a sequence are recorded, if anywhere.
    pub fn trace(&self, row: Row<'_>) -> Option<&TraceCell<E>> {
        self.context.traces.get(row.index)?.as_ref()
    }

    /// A range of a tensor's rows.
    pub fn slice_rows(&self, x: &Var<E::Tensor>, rows: Range<usize>) -> Result<Var<E::Tensor>> {
        if rows == (0..self.engine().shape(x.value())[0]) {
            return Ok(x.clone());
        }
        Ok(self.tape.slice(x, 0, rows)?)
    }

    /// Repeats x [1, D] to `count` rows; returns x unchanged if it already has `count` rows.
    pub fn repeat_rows(&self, x: &Var<E::Tensor>, count: usize) -> Result<Var<E::Tensor>> {
        let &[1, width] = self.engine().shape(x.value()) else { return Ok(x.clone()) };
        if count == 1 {
            return Ok(x.clone());
        }
        let row = self.tape.reshape(x, &[width])?;
        Ok(self.tape.expand(&row, 0, count)?)
    }

    /// Runs the part of a mixer that works along the text.
    ///
    /// Without memories, `mix` is called once for all sequences, with inputs [B, n, ..]. With memories, the inputs are
    /// the concatenated tokens of the sequences, [1, N, ..], and `mix` is called once per sequence with that sequence's
    /// tokens and memory, so that the result of one sequence cannot depend on the others. Sequences run in parallel on
    /// the engine's threads, except that one with a large share of the call's tokens runs alone, with its operations on
    /// all threads. `mix` gets its own pass, because a tape belongs to one thread.
    pub fn each_row<const N: usize, M: Send>(
        &self,
        inputs: [&Var<E::Tensor>; N],
        memory: &mut [&mut M],
        mix: impl Fn(
            &Pass<'_, '_, E>,
            [&Var<E::Tensor>; N],
            Row<'_>,
            Option<&mut M>,
        ) -> Result<MixerOutput<E::Tensor>>
        + Sync,
    ) -> Result<MixerOutput<E::Tensor>> {
        let rows = &self.context.rows;
        match memory {
            [] => return mix(self, inputs, rows[0].row(0), None),
            [memory] => return mix(self, inputs, rows[0].row(0), Some(memory)),
            _ => {}
        }
        let mut start = 0;
        let tasks: Vec<_> = rows
            .iter()
            .zip(memory.iter_mut())
            .map(|(row, memory)| {
                let span = start..start + row.tokens;
                start = span.end;
                (row, span, Mutex::new((memory, None)))
            })
            .collect();
        let (engine, context) = (self.engine(), &self.context);
        let run = |task: usize| {
            let (row, span, cell) = &tasks[task];
            let tape = Tape::inference(engine);
            let pass = Pass { tape: &tape, context: Arc::clone(context) };
            let mut cell = cell.lock().unwrap_or_else(PoisonError::into_inner);
            let (memory, result) = &mut *cell;
            let cut = inputs.map(|x| tape.slice(x, 1, span.clone()));
            let mut slices = Vec::with_capacity(N);
            for slice in cut {
                match slice {
                    Ok(slice) => slices.push(slice),
                    Err(error) => return *result = Some(Err(error.into())),
                }
            }
            *result = Some(mix(&pass, std::array::from_fn(|i| &slices[i]), row.row(task), Some(memory)));
        };
        let is_long = |row: &RowPlan| row.tokens >= LONG_TOKENS && 4 * row.tokens > start;
        let (long, short): (Vec<usize>, Vec<usize>) =
            (0..tasks.len()).partition(|&task| is_long(tasks[task].0));
        long.into_iter().for_each(&run);
        self.engine().side_by_side(short.len(), &|i| run(short[i]));
        let (mut readouts, mut states) = (Vec::with_capacity(tasks.len()), Vec::new());
        for (_, _, cell) in tasks {
            let (_, result) = cell.into_inner().unwrap_or_else(PoisonError::into_inner);
            let Some(result) = result else { unreachable!("every task ran") };
            let mixed = result?;
            readouts.push(mixed.readout);
            states.extend(mixed.states);
        }
        let join = |parts: &[Var<E::Tensor>], axis| self.tape.concat(&parts.iter().collect::<Vec<_>>(), axis);
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

//! One call of the model, as its parts see it.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use march_engine::ops::linear::Linear;
use march_engine::{Engine, Tape, Var, Weight};

use super::TraceCell;
use super::parameters::Parameter;
use crate::anchors::AnchorPlan;
use crate::error::Result;
use crate::memory::LayerMemory;

/// The parameters on a tape, in the order of the layout. Matrices may be packed; see [`super::Model::quantize`].
pub type Weights<E> = Arc<[Weight<Var<<E as Engine>::Tensor>, <E as Engine>::Packed>]>;

/// What all parts of a call share.
pub(crate) struct Context<E: Engine> {
    pub weights: Weights<E>,
    /// One for all rows, or with memories one for each.
    pub plans: Vec<AnchorPlan>,
    pub norm_eps: f64,
    pub trace: Option<TraceCell<E>>,
}

/// One call: the tape it runs on, the weights, and the anchors.
pub struct Pass<'t, 'e, E: Engine> {
    /// Where operations run.
    pub tape: &'t Tape<'e, E>,
    pub(crate) context: Rc<Context<E>>,
}

impl<E: Engine> Pass<'_, '_, E> {
    /// What computes.
    pub fn engine(&self) -> &E {
        self.tape.engine()
    }

    /// A parameter that no product or embedding reads, such as a norm or a bias. These are never packed.
    ///
    /// # Panics
    /// If the parameter is a matrix that is packed: read it with [`Pass::matrix`].
    pub fn weight(&self, parameter: Parameter) -> &Var<E::Tensor> {
        let weight = self.context.weights[parameter.0].full();
        weight.expect("a packed matrix is read with Pass::matrix, Pass::linear or Pass::linear_each")
    }

    /// A matrix that a product or an embedding reads: in full, or packed.
    pub fn matrix(&self, parameter: Parameter) -> Weight<&Var<E::Tensor>, &E::Packed> {
        self.context.weights[parameter.0].as_ref()
    }

    /// Added to mean squares before the root.
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

    /// New anchors of the call, all rows'.
    pub fn new_anchors(&self) -> usize {
        self.context.plans.last().map_or(0, |plan| plan.new.end)
    }

    /// Where routing weights are noted, if anywhere.
    pub fn trace(&self) -> Option<&TraceCell<E>> {
        self.context.trace.as_ref()
    }

    /// Rows of a tensor.
    pub fn slice_rows(&self, x: &Var<E::Tensor>, rows: Range<usize>) -> Result<Var<E::Tensor>> {
        if rows == (0..self.engine().shape(x.value())[0]) {
            return Ok(x.clone());
        }
        Ok(self.tape.slice(x, 0, rows)?)
    }

    /// x [1, D] repeated to `count` rows; x of `count` rows as it is.
    pub fn repeat_rows(&self, x: &Var<E::Tensor>, count: usize) -> Result<Var<E::Tensor>> {
        let &[1, width] = self.engine().shape(x.value()) else { return Ok(x.clone()) };
        if count == 1 {
            return Ok(x.clone());
        }
        let row = self.tape.reshape(x, &[width])?;
        Ok(self.tape.expand(&row, 0, count)?)
    }

    /// Runs the part of a mixer that looks along the text: at once for all rows without memories, row by row with
    /// them, so that a row never depends on the others. Outputs are joined along their first dimension.
    pub fn each_row<const N: usize, const M: usize>(
        &self,
        inputs: [&Var<E::Tensor>; N],
        memory: &mut [&mut LayerMemory<E>],
        mix: impl Fn(
            [&Var<E::Tensor>; N],
            &AnchorPlan,
            Option<&mut LayerMemory<E>>,
        ) -> Result<[Var<E::Tensor>; M]>,
    ) -> Result<[Var<E::Tensor>; M]> {
        let plans = &self.context.plans;
        match memory {
            [] => return mix(inputs, &plans[0], None),
            [memory] => return mix(inputs, &plans[0], Some(memory)),
            _ => {}
        }
        let mut parts: [Vec<Var<E::Tensor>>; M] = std::array::from_fn(|_| Vec::new());
        for (row, (plan, memory)) in plans.iter().zip(memory.iter_mut()).enumerate() {
            let mut slices = Vec::with_capacity(N);
            for x in inputs {
                slices.push(self.tape.slice(x, 0, row..row + 1)?);
            }
            let slices: [&Var<E::Tensor>; N] = std::array::from_fn(|i| &slices[i]);
            for (parts, output) in parts.iter_mut().zip(mix(slices, plan, Some(memory))?) {
                parts.push(output);
            }
        }
        let mut joined = Vec::with_capacity(M);
        for parts in &parts {
            joined.push(self.tape.concat(&parts.iter().collect::<Vec<_>>(), 0)?);
        }
        let Ok(joined) = joined.try_into() else { unreachable!("as many as there are outputs") };
        Ok(joined)
    }
}

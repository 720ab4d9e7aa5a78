//! Root-mean-square normalisation, plain and gated.
//!
//! ```text
//! r = 1 / sqrt(mean(x²) + eps),   n = r x ∘ w            x [.., D]   w [d], d divides D: each d numbers are
//! rms_norm:        y = n                                 a row of their own (d = D, or one head's width)
//! gated_rms_norm:  y = n ∘ SiLU(g)                       g [.., D]
//!
//! dn = dy (∘ SiLU(g)),   dg = dy ∘ n ∘ SiLU'(g)
//! dw = Σ dn ∘ r x,   dx = r (dn ∘ w − r² x mean(dn ∘ w ∘ x))
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::{Error, Result, bad_shape, bad_value, expect_shape};
use crate::kernels::{Kernels, add_gradient};
use crate::tape::{Tape, Var};

/// Inputs of [`Tape::rms_norm`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<T> {
    /// Rows to normalise, [.., D].
    pub x: T,
    /// Weights, [d]; d must divide D.
    pub weight: T,
}

/// Inputs of [`Tape::gated_rms_norm`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct GatedRmsNorm<T> {
    /// Rows to normalise, [.., D].
    pub x: T,
    /// Gates before the SiLU activation, [.., D].
    pub gate: T,
    /// Weights, [d]; d must divide D.
    pub weight: T,
}

/// Inputs of [`Tape::rms_norm_each`]: tensors with the same weights.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormList<'a, T> {
    /// Rows to normalise, each [.., D].
    pub x: &'a [T],
    /// Weights, [d]; d must divide D.
    pub weight: T,
}

/// Inputs of [`Tape::gated_rms_norm_each`]: tensors with the same weights.
#[derive(Clone, Copy, Debug)]
pub struct GatedRmsNormList<'a, T> {
    /// Rows to normalise, each [.., D].
    pub x: &'a [T],
    /// Gates before the SiLU activation, each of the shape of its x.
    pub gates: &'a [T],
    /// Weights, [d]; d must divide D.
    pub weight: T,
}

/// Gradients of [`Tape::gated_rms_norm_each`].
#[derive(Clone, Debug)]
pub struct GatedRmsNormGradients<T> {
    /// Those of each x.
    pub x: Vec<T>,
    /// Those of each gate.
    pub gates: Vec<T>,
    /// That of the weights.
    pub weight: T,
}

/// Gradients of [`RmsNormList`] from those of its tensors, from the last to the first: the order in which a tape would
/// process separate operations.
pub(crate) fn backward_each<K: Kernels>(
    kernels: &K,
    dx: &mut [Option<K::Tensor>],
    one: impl Fn(usize) -> Result<RmsNorm<K::Tensor>>,
) -> Result<K::Tensor> {
    let mut weight = None;
    for (i, dx) in dx.iter_mut().enumerate().rev() {
        let d = one(i)?;
        add_gradient(kernels, dx, Some(d.x))?;
        add_gradient(kernels, &mut weight, Some(d.weight))?;
    }
    weight.ok_or(Error::Value { operation: "rms_norm", message: NO_TENSORS.into() })
}

/// Gradients of [`GatedRmsNormList`] from those of its tensors, from the last to the first.
pub(crate) fn gated_backward_each<K: Kernels>(
    kernels: &K,
    count: usize,
    one: impl Fn(usize) -> Result<GatedRmsNorm<K::Tensor>>,
) -> Result<GatedRmsNormGradients<K::Tensor>> {
    let (mut weight, mut x, mut gates) = (None, Vec::with_capacity(count), Vec::with_capacity(count));
    for i in (0..count).rev() {
        let d = one(i)?;
        x.push(d.x);
        gates.push(d.gate);
        add_gradient(kernels, &mut weight, Some(d.weight))?;
    }
    x.reverse();
    gates.reverse();
    let weight = weight.ok_or(Error::Value { operation: "gated_rms_norm", message: NO_TENSORS.into() })?;
    Ok(GatedRmsNormGradients { x, gates, weight })
}

const NO_TENSORS: &str = "got no tensors, expected at least one";

/// Validates the shapes and returns the row width d.
pub(crate) fn check(operation: &'static str, x: &[usize], weight: &[usize]) -> Result<usize> {
    let &[width] = weight else {
        return bad_shape(operation, "weight", weight, "one dimension [d]");
    };
    let last = x.last().copied().unwrap_or(1);
    if width == 0 || !last.is_multiple_of(width) {
        return bad_shape(
            operation,
            "x",
            x,
            format!("a last dimension that is a multiple of {width}, the weight's width"),
        );
    }
    Ok(width)
}

pub(crate) fn check_gated(x: &[usize], gate: &[usize], weight: &[usize]) -> Result<usize> {
    expect_shape("gated_rms_norm", "gate", gate, x, "the shape of x")?;
    check("gated_rms_norm", x, weight)
}

/// Validates a list; returns an error if it is empty.
pub(crate) fn check_list<'s>(
    operation: &'static str,
    mut x: impl ExactSizeIterator<Item = &'s [usize]>,
    weight: &[usize],
) -> Result<()> {
    if x.len() == 0 {
        return bad_value(operation, NO_TENSORS);
    }
    x.try_for_each(|x| check(operation, x, weight).map(|_| ()))
}

impl<'e, E: Engine> Tape<'e, E> {
    /// y = x / rms(x) ∘ w.
    pub fn rms_norm(&self, input: RmsNorm<&Var<E::Tensor>>, eps: f64) -> Result<Var<E::Tensor>> {
        Ok(self.rms_norm_each(RmsNormList { x: &[input.x], weight: input.weight }, eps)?.remove(0))
    }

    /// y = x / rms(x) ∘ w for several x, as one operation in both directions.
    pub fn rms_norm_each(
        &self,
        input: RmsNormList<'_, &Var<E::Tensor>>,
        eps: f64,
    ) -> Result<Vec<Var<E::Tensor>>> {
        let weight = input.weight.value().clone();
        let values: Vec<&E::Tensor> = input.x.iter().map(|x| x.value()).collect();
        let y = self.engine().rms_norm(RmsNormList { x: &values, weight: &weight }, eps)?;
        let inputs: Vec<&Var<E::Tensor>> = input.x.iter().copied().chain([input.weight]).collect();
        if self.is_constant(&inputs) {
            return Ok(y.into_iter().map(|y| self.constant(y)).collect());
        }
        let x: Vec<Var<E::Tensor>> = input.x.iter().map(|&x| x.clone()).collect();
        Ok(self.record(&inputs, y, move |tape, gradients| {
            let used: Vec<usize> = (0..x.len()).filter(|&i| gradients[i].is_some()).collect();
            let dy: Vec<&E::Tensor> = gradients.iter().flatten().collect();
            let values: Vec<&E::Tensor> = used.iter().map(|&i| x[i].value()).collect();
            let mut dx: Vec<Option<E::Tensor>> = used.iter().map(|&i| tape.take_gradient(&x[i])).collect();
            let input = RmsNormList { x: &values, weight: &weight };
            let weight = tape.engine().rms_norm_backward(input, eps, &dy, &mut dx)?;
            let mut result = vec![None; x.len()];
            used.into_iter().zip(dx).for_each(|(i, dx)| result[i] = dx);
            result.push(Some(weight));
            Ok(result)
        }))
    }

    /// y = x / rms(x) ∘ w ∘ SiLU(gate).
    pub fn gated_rms_norm(&self, input: GatedRmsNorm<&Var<E::Tensor>>, eps: f64) -> Result<Var<E::Tensor>> {
        let GatedRmsNorm { x, gate, weight } = input;
        Ok(self.gated_rms_norm_each(GatedRmsNormList { x: &[x], gates: &[gate], weight }, eps)?.remove(0))
    }

    /// y = x / rms(x) ∘ w ∘ SiLU(gate) for several x and their gates, as one operation in both directions.
    pub fn gated_rms_norm_each(
        &self,
        input: GatedRmsNormList<'_, &Var<E::Tensor>>,
        eps: f64,
    ) -> Result<Vec<Var<E::Tensor>>> {
        let weight = input.weight.value().clone();
        let [x, gates] = [input.x, input.gates]
            .map(|list| list.iter().map(|var| var.value().clone()).collect::<Vec<E::Tensor>>());
        let all: Vec<usize> = (0..x.len()).collect();
        let y = self.engine().gated_rms_norm(
            GatedRmsNormList { x: &chosen(&x, &all), gates: &chosen(&gates, &all), weight: &weight },
            eps,
        )?;
        let inputs: Vec<&Var<E::Tensor>> =
            input.x.iter().chain(input.gates).copied().chain([input.weight]).collect();
        Ok(self.record(&inputs, y, move |tape, gradients| {
            let used: Vec<usize> = all.into_iter().filter(|&i| gradients[i].is_some()).collect();
            let dy: Vec<&E::Tensor> = gradients.iter().flatten().collect();
            let input =
                GatedRmsNormList { x: &chosen(&x, &used), gates: &chosen(&gates, &used), weight: &weight };
            let d = tape.engine().gated_rms_norm_backward(input, eps, &dy)?;
            let mut result = vec![None; 2 * x.len()];
            for ((i, dx), dg) in used.into_iter().zip(d.x).zip(d.gates) {
                result[i] = Some(dx);
                result[x.len() + i] = Some(dg);
            }
            result.push(Some(d.weight));
            Ok(result)
        }))
    }
}

/// Some tensors of a list.
fn chosen<'a, T>(list: &'a [T], places: &[usize]) -> Vec<&'a T> {
    places.iter().filter_map(|&i| list.get(i)).collect()
}

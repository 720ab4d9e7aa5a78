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

use crate::error::{Result, bad_shape, bad_value, expect_lengths, expect_shape};
use crate::op::{Op, chosen, owned};
use crate::ops::accumulate::add_gradient;
use crate::tape::{record, records};
use crate::tensor::Tensor;

/// y = x / rms(x) ∘ w for each x; see [`Tensor::rms_norm`].
pub struct RmsNorm {
    /// Rows to normalise, each [.., D].
    pub x: Vec<Tensor>,
    /// Weights, [d]; d must divide D.
    pub weight: Tensor,
    /// Added to the mean square.
    pub eps: f64,
}

/// Gradients of [`RmsNorm`]: those of each x, and that of the weights.
pub struct RmsNormBackward {
    /// The inputs.
    pub forward: RmsNorm,
    /// Gradient of each result.
    pub gradients: Vec<Tensor>,
    /// What the gradient of each x is added to, if anything.
    pub dx: Vec<Option<Tensor>>,
}

/// y = x / rms(x) ∘ w ∘ SiLU(gate) for each x and its gate; see [`gated_rms_norm_each`].
pub struct GatedRmsNorm {
    /// Rows to normalise, each [.., D].
    pub x: Vec<Tensor>,
    /// Gates before the SiLU activation, each of the shape of its x.
    pub gates: Vec<Tensor>,
    /// Weights, [d]; d must divide D.
    pub weight: Tensor,
    /// Added to the mean square.
    pub eps: f64,
}

/// Gradients of [`GatedRmsNorm`]: those of each x, of each gate, and of the weights.
pub struct GatedRmsNormBackward {
    /// The inputs.
    pub forward: GatedRmsNorm,
    /// Gradient of each result.
    pub gradients: Vec<Tensor>,
}

impl Op for RmsNorm {
    const NAME: &'static str = "rms_norm";
    /// Row width d.
    type Sizes = usize;
    type Output = Vec<Tensor>;

    fn inputs(&self) -> Vec<&Tensor> {
        self.x.iter().chain([&self.weight]).collect()
    }
    fn check(&self) -> Result<usize> {
        check(Self::NAME, &self.x, &self.weight)
    }
}

impl Op for RmsNormBackward {
    const NAME: &'static str = "rms_norm_backward";
    type Sizes = usize;
    type Output = (Vec<Tensor>, Tensor);

    fn inputs(&self) -> Vec<&Tensor> {
        let mut inputs = self.forward.inputs();
        inputs.extend(self.gradients.iter().chain(self.dx.iter().flatten()));
        inputs
    }
    fn check(&self) -> Result<usize> {
        let x = &self.forward.x;
        expect_lengths(Self::NAME, x.len(), &[self.gradients.len(), self.dx.len()])?;
        for ((x, gradient), dx) in x.iter().zip(&self.gradients).zip(&self.dx) {
            for (name, found) in [("gradient", Some(gradient)), ("dx", dx.as_ref())] {
                let found = found.map_or(x.shape(), Tensor::shape);
                expect_shape(Self::NAME, name, found, x.shape(), "the shape of x")?;
            }
        }
        self.forward.check()
    }
}

impl Op for GatedRmsNorm {
    const NAME: &'static str = "gated_rms_norm";
    /// Row width d.
    type Sizes = usize;
    type Output = Vec<Tensor>;

    fn inputs(&self) -> Vec<&Tensor> {
        self.x.iter().chain(&self.gates).chain([&self.weight]).collect()
    }
    fn check(&self) -> Result<usize> {
        expect_lengths(Self::NAME, self.x.len(), &[self.gates.len()])?;
        for (x, gate) in self.x.iter().zip(&self.gates) {
            expect_shape(Self::NAME, "gate", gate.shape(), x.shape(), "the shape of x")?;
        }
        check(Self::NAME, &self.x, &self.weight)
    }
}

impl Op for GatedRmsNormBackward {
    const NAME: &'static str = "gated_rms_norm_backward";
    type Sizes = usize;
    type Output = (Vec<Tensor>, Vec<Tensor>, Tensor);

    fn inputs(&self) -> Vec<&Tensor> {
        let mut inputs = self.forward.inputs();
        inputs.extend(&self.gradients);
        inputs
    }
    fn check(&self) -> Result<usize> {
        let x = &self.forward.x;
        expect_lengths(Self::NAME, x.len(), &[self.gradients.len()])?;
        for (x, gradient) in x.iter().zip(&self.gradients) {
            expect_shape(Self::NAME, "gradient", gradient.shape(), x.shape(), "the shape of x")?;
        }
        self.forward.check()
    }
}

/// Validates the shapes and returns the row width d.
fn check(operation: &'static str, x: &[Tensor], weight: &Tensor) -> Result<usize> {
    let &[width] = weight.shape() else {
        return bad_shape(operation, "weight", weight.shape(), "one dimension [d]");
    };
    if x.is_empty() {
        return bad_value(operation, "got no tensors, expected at least one");
    }
    for x in x {
        let last = x.shape().last().copied().unwrap_or(1);
        if width == 0 || !last.is_multiple_of(width) {
            let expected = format!("a last dimension that is a multiple of {width}, the weight's width");
            return bad_shape(operation, "x", x.shape(), expected);
        }
    }
    Ok(width)
}

impl Tensor {
    /// y = x / rms(x) ∘ w.
    pub fn rms_norm(&self, weight: &Tensor, eps: f64) -> Result<Tensor> {
        Ok(rms_norm_each(&[self], weight, eps)?.remove(0))
    }

    /// y = x / rms(x) ∘ w ∘ SiLU(gate).
    pub fn gated_rms_norm(&self, gate: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
        Ok(gated_rms_norm_each(&[self], &[gate], weight, eps)?.remove(0))
    }
}

/// y = x / rms(x) ∘ w for several x, as one operation in both directions.
pub fn rms_norm_each(x: &[&Tensor], weight: &Tensor, eps: f64) -> Result<Vec<Tensor>> {
    let y = RmsNorm { x: owned(x), weight: weight.clone(), eps }.run()?;
    let inputs: Vec<&Tensor> = x.iter().copied().chain([weight]).collect();
    if !records(&inputs) {
        return Ok(y);
    }
    let (x, weight) = (owned(x), weight.clone());
    Ok(record(&inputs, y, move |tape, gradients| {
        // An x whose result received no gradient contributes nothing.
        let used: Vec<usize> = (0..x.len()).filter(|&i| gradients[i].is_some()).collect();
        let forward = RmsNorm { x: chosen(&x, &used), weight, eps };
        let dx = used.iter().map(|&i| tape.take_gradient(&x[i])).collect();
        let gradients = gradients.into_iter().flatten().collect();
        let (dx, dw) = RmsNormBackward { forward, gradients, dx }.run()?;
        let mut result = vec![None; x.len()];
        used.into_iter().zip(dx).for_each(|(i, dx)| result[i] = Some(dx));
        result.push(Some(dw));
        Ok(result)
    }))
}

/// y = x / rms(x) ∘ w ∘ SiLU(gate) for several x and their gates, as one operation in both directions.
pub fn gated_rms_norm_each(
    x: &[&Tensor],
    gates: &[&Tensor],
    weight: &Tensor,
    eps: f64,
) -> Result<Vec<Tensor>> {
    let y = GatedRmsNorm { x: owned(x), gates: owned(gates), weight: weight.clone(), eps }.run()?;
    let inputs: Vec<&Tensor> = x.iter().chain(gates).copied().chain([weight]).collect();
    if !records(&inputs) {
        return Ok(y);
    }
    let (x, gates, weight) = (owned(x), owned(gates), weight.clone());
    Ok(record(&inputs, y, move |_, gradients| {
        let used: Vec<usize> = (0..x.len()).filter(|&i| gradients[i].is_some()).collect();
        let forward = GatedRmsNorm { x: chosen(&x, &used), gates: chosen(&gates, &used), weight, eps };
        let gradients = gradients.into_iter().flatten().collect();
        let (dx, dg, dw) = GatedRmsNormBackward { forward, gradients }.run()?;
        let mut result = vec![None; 2 * x.len()];
        for ((i, dx), dg) in used.into_iter().zip(dx).zip(dg) {
            result[i] = Some(dx);
            result[x.len() + i] = Some(dg);
        }
        result.push(Some(dw));
        Ok(result)
    }))
}

/// Gradients of several x from a function that computes those of one x and of the weights. It goes from the last to the
/// first: the order in which a tape would process separate operations.
pub(crate) fn backward_each(
    dx: Vec<Option<Tensor>>,
    mut one: impl FnMut(usize) -> Result<(Tensor, Tensor)>,
) -> Result<(Vec<Tensor>, Tensor)> {
    let (mut dx, mut weight) = (dx, None);
    for (i, dx) in dx.iter_mut().enumerate().rev() {
        let (x, w) = one(i)?;
        add_gradient(dx, Some(x))?;
        add_gradient(&mut weight, Some(w))?;
    }
    let Some(weight) = weight else { unreachable!("a list is not empty") };
    Ok((dx.into_iter().flatten().collect(), weight))
}

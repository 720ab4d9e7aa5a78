//! Elementwise functions of one or two tensors.
//!
//! ```text
//! map:  y = f(x)                 dx = dy f'(x)                            x, y of one shape
//! zip:  y = a + b, a − b, …      da = Σ dy ∂y/∂a,  db = Σ dy ∂y/∂b        shapes of a and b broadcast as in
//!                                                                         numpy; Σ over repeated dimensions
//! ```

pub(crate) mod broadcast;
pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::Result;
use crate::tape::{Tape, Var};

/// Function of one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Map {
    /// −x
    Neg,
    /// e^x
    Exp,
    /// ln x
    Ln,
    /// 1 / (1 + e^−x)
    Sigmoid,
    /// x / (1 + e^−x)
    Silu,
    /// tanh x
    Tanh,
    /// max(x, 0)
    Relu,
    /// ln(1 + e^x)
    Softplus,
    /// x²
    Square,
    /// √x
    Sqrt,
    /// 1 / x
    Reciprocal,
    /// c x
    Scale(f64),
    /// x + c
    Shift(f64),
}

/// Tensors that a backward pass reads besides the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    Nothing,
    Input,
    Output,
}

impl Map {
    /// Which tensor [`Engine::map_backward`] reads; the other may have any contents of the right shape.
    pub(crate) fn reads(self) -> Reads {
        match self {
            Self::Neg | Self::Scale(_) | Self::Shift(_) => Reads::Nothing,
            Self::Ln | Self::Silu | Self::Relu | Self::Softplus | Self::Square => Reads::Input,
            Self::Exp | Self::Sigmoid | Self::Tanh | Self::Sqrt | Self::Reciprocal => Reads::Output,
        }
    }
}

/// Function of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zip {
    /// a + b
    Add,
    /// a − b
    Sub,
    /// a b
    Mul,
    /// a / b
    Div,
}

impl Zip {
    /// Name of the operation in error messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Sub => "sub",
            Self::Mul => "mul",
            Self::Div => "div",
        }
    }
}

/// Generates one method per kind of `map` and `zip`.
macro_rules! methods {
    ($($doc:literal $name:ident $kind:ident),+; $($doc2:literal $name2:ident $kind2:ident),+) => {
        $(
            #[doc = $doc]
            pub fn $name(&self, x: &Var<E::Tensor>) -> Result<Var<E::Tensor>> {
                self.map(Map::$kind, x)
            }
        )+
        $(
            #[doc = $doc2]
            pub fn $name2(&self, a: &Var<E::Tensor>, b: &Var<E::Tensor>) -> Result<Var<E::Tensor>> {
                self.zip(Zip::$kind2, a, b)
            }
        )+
    };
}

impl<'e, E: Engine> Tape<'e, E> {
    methods! {
        "−x" neg Neg, "e^x" exp Exp, "ln x" ln Ln, "1 / (1 + e^−x)" sigmoid Sigmoid, "x / (1 + e^−x)" silu Silu,
        "tanh x" tanh Tanh, "max(x, 0)" relu Relu, "ln(1 + e^x)" softplus Softplus, "x²" square Square,
        "√x" sqrt Sqrt, "1 / x" reciprocal Reciprocal;
        "a + b, broadcasting" add Add, "a − b, broadcasting" sub Sub, "a b, element by element, broadcasting" mul Mul,
        "a / b, broadcasting" div Div
    }

    /// c x
    pub fn scale(&self, x: &Var<E::Tensor>, factor: f64) -> Result<Var<E::Tensor>> {
        self.map(Map::Scale(factor), x)
    }

    /// x + c
    pub fn shift(&self, x: &Var<E::Tensor>, term: f64) -> Result<Var<E::Tensor>> {
        self.map(Map::Shift(term), x)
    }

    /// y = f(x) for every element.
    pub fn map(&self, kind: Map, x: &Var<E::Tensor>) -> Result<Var<E::Tensor>> {
        let y = self.engine().map(kind, x.value())?;
        // At most one tensor is saved; it is also passed in place of the other, which the backward pass does not
        // read.
        let kept = match kind.reads() {
            Reads::Nothing => None,
            Reads::Input => Some(x.value().clone()),
            Reads::Output => Some(y.clone()),
        };
        Ok(self.record_one(&[x], y, move |tape, dy| {
            let kept = kept.as_ref().unwrap_or(&dy);
            Ok(vec![Some(tape.engine().map_backward(kind, kept, kept, &dy)?)])
        }))
    }

    /// y = f(a, b) for every element, with numpy broadcasting.
    pub fn zip(&self, kind: Zip, a: &Var<E::Tensor>, b: &Var<E::Tensor>) -> Result<Var<E::Tensor>> {
        let y = self.engine().zip(kind, a.value(), b.value())?;
        if self.is_constant(&[a, b]) {
            return Ok(self.constant(y));
        }
        let needs = [self.records(&[a]), self.records(&[b])];
        if matches!(kind, Zip::Add | Zip::Sub) {
            // Only the shapes matter: a residual connection saves no tensors, and its gradient is passed on
            // unchanged.
            let shapes = [a, b].map(|v| self.engine().shape(v.value()).to_vec());
            return Ok(self.record_one(&[a, b], y, move |tape, dy| {
                let engine = tape.engine();
                let da = if needs[0] { Some(engine.sum_to(&dy, &shapes[0])?) } else { None };
                let db = match (needs[1], kind) {
                    (false, _) => None,
                    (true, Zip::Sub) => Some(engine.map(Map::Neg, &engine.sum_to(&dy, &shapes[1])?)?),
                    (true, _) => Some(engine.sum_to(&dy, &shapes[1])?),
                };
                Ok(vec![da, db])
            }));
        }
        let (left, right) = (a.value().clone(), b.value().clone());
        Ok(self.record_one(&[a, b], y, move |tape, dy| {
            Ok(tape.engine().zip_backward(kind, &left, &right, &dy, needs)?.into())
        }))
    }
}

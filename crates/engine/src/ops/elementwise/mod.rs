//! Elementwise functions of one or two tensors.
//!
//! ```text
//! map:  y = f(x)                 dx = dy f'(x)                            x, y of one shape
//! zip:  y = a + b, a − b, …      da = Σ dy ∂y/∂a,  db = Σ dy ∂y/∂b        shapes of a and b broadcast as in
//!                                                                         numpy; Σ over repeated dimensions
//! ```

#[doc(hidden)]
pub mod broadcast;
pub(crate) mod fast;
pub(crate) mod reference;

use crate::error::{Result, expect_shape};
use crate::op::Op;
use crate::ops::reduce::SumTo;
use crate::tape::record_one;
use crate::tensor::Tensor;
use broadcast::broadcast;

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

/// Tensor that a backward pass reads besides the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// None.
    Nothing,
    /// x
    Input,
    /// y = f(x)
    Output,
}

impl Map {
    /// Which tensor [`MapBackward`] reads.
    pub fn reads(self) -> Reads {
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

/// y = f(x) for every element.
pub struct MapForward {
    /// f
    pub kind: Map,
    /// Arguments.
    pub x: Tensor,
}

/// Gradient of [`MapForward`].
pub struct MapBackward {
    /// f
    pub kind: Map,
    /// x or y, as [`Map::reads`] says; the gradient if nothing is read.
    pub kept: Tensor,
    /// Gradient of y.
    pub gradient: Tensor,
}

/// y = f(a, b) for every element, with numpy broadcasting.
pub struct ZipForward {
    /// f
    pub kind: Zip,
    /// First arguments.
    pub a: Tensor,
    /// Second arguments.
    pub b: Tensor,
}

/// Gradients of [`ZipForward`].
pub struct ZipBackward {
    /// f
    pub kind: Zip,
    /// First arguments.
    pub a: Tensor,
    /// Second arguments.
    pub b: Tensor,
    /// Gradient of y.
    pub gradient: Tensor,
    /// Which of the gradients of a and b are computed.
    pub needs: [bool; 2],
}

impl Op for MapForward {
    const NAME: &'static str = "map";
    type Sizes = ();
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

impl Op for MapBackward {
    const NAME: &'static str = "map_backward";
    type Sizes = ();
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.kept, &self.gradient]
    }
    fn check(&self) -> Result<()> {
        expect_shape(Self::NAME, "gradient", self.gradient.shape(), self.kept.shape(), "the shape of x")
    }
}

impl Op for ZipForward {
    const NAME: &'static str = "zip";
    /// Shape of the result.
    type Sizes = Vec<usize>;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.a, &self.b]
    }
    fn check(&self) -> Result<Vec<usize>> {
        broadcast(self.kind.name(), self.a.shape(), self.b.shape())
    }
}

impl Op for ZipBackward {
    const NAME: &'static str = "zip_backward";
    type Sizes = ();
    type Output = [Option<Tensor>; 2];
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.a, &self.b, &self.gradient]
    }
    fn check(&self) -> Result<()> {
        let name = self.kind.name();
        let shape = broadcast(name, self.a.shape(), self.b.shape())?;
        expect_shape(name, "gradient", self.gradient.shape(), &shape, "the shape of the result")
    }
}

/// Generates one method per kind of `map` and `zip`, and the operators.
macro_rules! methods {
    ($($doc:literal $name:ident $kind:ident),+; $($doc2:literal $name2:ident $kind2:ident),+) => {
        impl Tensor {
            $(
                #[doc = $doc]
                pub fn $name(&self) -> Result<Tensor> {
                    self.map(Map::$kind)
                }
            )+
            $(
                #[doc = $doc2]
                pub fn $name2(&self, other: &Tensor) -> Result<Tensor> {
                    self.zip(Zip::$kind2, other)
                }
            )+
        }
        $(
            impl std::ops::$kind2 for &Tensor {
                type Output = Result<Tensor>;
                fn $name2(self, other: &Tensor) -> Result<Tensor> {
                    self.zip(Zip::$kind2, other)
                }
            }
        )+
    };
}

methods! {
    "−x" neg Neg, "e^x" exp Exp, "ln x" ln Ln, "1 / (1 + e^−x)" sigmoid Sigmoid, "x / (1 + e^−x)" silu Silu,
    "tanh x" tanh Tanh, "max(x, 0)" relu Relu, "ln(1 + e^x)" softplus Softplus, "x²" square Square,
    "√x" sqrt Sqrt, "1 / x" reciprocal Reciprocal;
    "a + b, broadcasting" add Add, "a − b, broadcasting" sub Sub, "a b, element by element, broadcasting" mul Mul,
    "a / b, broadcasting" div Div
}

impl Tensor {
    /// c x
    pub fn scale(&self, factor: f64) -> Result<Tensor> {
        self.map(Map::Scale(factor))
    }

    /// x + c
    pub fn shift(&self, term: f64) -> Result<Tensor> {
        self.map(Map::Shift(term))
    }

    /// y = f(x) for every element.
    pub fn map(&self, kind: Map) -> Result<Tensor> {
        let y = MapForward { kind, x: self.clone() }.run()?;
        let kept = match kind.reads() {
            Reads::Nothing => None,
            Reads::Input => Some(self.clone()),
            Reads::Output => Some(y.clone()),
        };
        Ok(record_one(&[self], y, move |gradient| {
            let kept = kept.unwrap_or_else(|| gradient.clone());
            Ok(vec![Some(MapBackward { kind, kept, gradient }.run()?)])
        }))
    }

    /// y = f(a, b) for every element, with numpy broadcasting.
    pub fn zip(&self, kind: Zip, other: &Tensor) -> Result<Tensor> {
        let (a, b) = (self.clone(), other.clone());
        let y = ZipForward { kind, a: a.clone(), b: b.clone() }.run()?;
        if matches!(kind, Zip::Add | Zip::Sub) {
            // Only the shapes matter: a residual connection saves no tensors, and its gradient is passed on unchanged.
            let shapes = [a, b].map(|t| t.is_recorded().then(|| t.shape().to_vec()));
            return Ok(record_one(&[self, other], y, move |dy| {
                let [da, db] =
                    shapes.map(|s| s.map(|shape| SumTo { x: dy.clone(), shape }.run()).transpose());
                let db = match (kind, db?) {
                    (Zip::Sub, Some(x)) => Some(MapForward { kind: Map::Neg, x }.run()?),
                    (_, db) => db,
                };
                Ok(vec![da?, db])
            }));
        }
        let needs = [a.is_recorded(), b.is_recorded()];
        Ok(record_one(&[self, other], y, move |gradient| {
            Ok(ZipBackward { kind, a, b, gradient, needs }.run()?.into())
        }))
    }
}

//! Names, shapes and initial values of parameters, laid out while a model is built.

use march_engine::Precision;

/// How a parameter is initialised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with standard deviation `initializer_range`.
    Normal,
    /// A constant.
    Constant(f64),
    /// `A_log`: ln of a uniform number in [0.01, 16].
    DecayRate,
    /// `dt_bias`: softplus⁻¹ of a log-uniform number in [0.001, 0.1].
    TimeStep,
}

/// A parameter's name, shape and initialisation.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// The name in a checkpoint.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// How it is initialised.
    pub init: Init,
}

impl ParameterSpec {
    /// The number of elements.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it is a matrix of [`Builder::linear`], used only in products and embeddings.
    pub fn is_matrix(&self) -> bool {
        self.shape.len() == 2 && self.init == Init::Normal
    }

    /// Size of the parameter in a model whose matrices have this precision, in bytes.
    pub fn bytes(&self, weights: Precision) -> usize {
        match self.shape[..] {
            [rows, width] if self.is_matrix() => weights.bytes(rows, width),
            _ => self.count() * size_of::<f32>(),
        }
    }
}

/// A parameter's index in the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter(pub(crate) usize);

/// A linear layer: its matrix, and a bias if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Projection {
    /// W, [out, in].
    pub weight: Parameter,
    /// Added to every row, [out].
    pub bias: Option<Parameter>,
}

/// Adds parameters to a layout under a common prefix.
pub struct Builder<'a> {
    layout: &'a mut Vec<ParameterSpec>,
    prefix: String,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(layout: &'a mut Vec<ParameterSpec>, prefix: &str) -> Self {
        Self { layout, prefix: prefix.into() }
    }

    /// A builder whose prefix is extended by `name`.
    pub fn child(&mut self, name: &str) -> Builder<'_> {
        Builder { prefix: format!("{}{name}", self.prefix), layout: self.layout }
    }

    /// Adds a parameter.
    pub fn add(&mut self, name: &str, shape: &[usize], init: Init) -> Parameter {
        let name = format!("{}{name}", self.prefix);
        self.layout.push(ParameterSpec { name, shape: shape.to_vec(), init });
        Parameter(self.layout.len() - 1)
    }

    /// Adds `name.weight`, [rows, columns], with normal initialisation.
    pub fn linear(&mut self, name: &str, rows: usize, columns: usize) -> Projection {
        Projection { weight: self.add(&format!("{name}.weight"), &[rows, columns], Init::Normal), bias: None }
    }

    /// Like [`Builder::linear`], with `name.bias`, [rows], which starts as a constant.
    pub fn linear_bias(&mut self, name: &str, rows: usize, columns: usize, bias: f64) -> Projection {
        let linear = self.linear(name, rows, columns);
        let bias = self.add(&format!("{name}.bias"), &[rows], Init::Constant(bias));
        Projection { bias: Some(bias), ..linear }
    }
}

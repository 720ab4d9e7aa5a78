//! State read: each row reads its own state. This is how an anchor position reads its checkpoint.
//!
//! ```text
//! q ← s q / sqrt(Σq² + 1e-6),  s = d_k^-½;   o_n = A_nᵀ q_n      per value head, with its key head's query
//! query [.., key_heads·d_k] with N rows   states [N, value_heads, d_k, d_v]   readout [.., value_heads·d_v]
//! dq = A do (then back through the norm),   dA = q doᵀ
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::op::Op;
use crate::tape::record_one;
use crate::tensor::Tensor;

/// Inputs of [`StateRead::state_read`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct StateRead<T> {
    /// Unnormalised queries, [.., key_heads·d_k].
    pub query: T,
    /// One state per row, [N, value_heads, d_k, d_v].
    pub states: T,
}

impl<T> StateRead<T> {
    /// Applies `f` to both inputs.
    pub fn map<U>(self, f: impl Fn(T) -> U) -> StateRead<U> {
        StateRead { query: f(self.query), states: f(self.states) }
    }

    /// Borrows both inputs.
    pub fn as_ref(&self) -> StateRead<&T> {
        StateRead { query: &self.query, states: &self.states }
    }
}

/// Validated dimensions of a call.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Number of rows N.
    pub rows: usize,
    /// Number of query heads.
    pub key_heads: usize,
    /// Number of value heads, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Rows of a state, d_k.
    pub key_dim: usize,
    /// Columns of a state, d_v.
    pub value_dim: usize,
}

impl Sizes {
    /// Shape of the readout, from the shape of the queries.
    pub fn readout_shape(&self, query: &[usize]) -> Vec<usize> {
        let leading = query.split_last().map_or(&[][..], |(_, leading)| leading);
        leading.iter().copied().chain([self.value_heads * self.value_dim]).collect()
    }
}

const NAME: &str = "state_read";

fn check(StateRead { query, states }: StateRead<&[usize]>, key_heads: usize) -> Result<Sizes> {
    let &[rows, value_heads, key_dim, value_dim] = states else {
        return bad_shape(NAME, "states", states, "[rows, value_heads, d_k, d_v]");
    };
    if key_heads == 0 || value_heads == 0 || !value_heads.is_multiple_of(key_heads) {
        return bad_value(
            NAME,
            format!(
                "{value_heads} value heads are not a multiple of {key_heads} key heads, or one of the two numbers is 0"
            ),
        );
    }
    match query.split_last() {
        Some((&width, leading))
            if width == key_heads * key_dim && leading.iter().product::<usize>() == rows =>
        {
            Ok(Sizes { rows, key_heads, value_heads, key_dim, value_dim })
        }
        _ => bad_shape(NAME, "query", query, format!("[.., {}] with {rows} rows", key_heads * key_dim)),
    }
}

/// The forward pass as a device runs it.
pub struct StateReadForward {
    /// The inputs.
    pub input: StateRead<Tensor>,
    /// Number of query heads.
    pub key_heads: usize,
}

/// Gradients of [`StateReadForward`] with respect to its inputs.
pub struct StateReadBackward {
    /// The inputs.
    pub input: StateRead<Tensor>,
    /// Number of query heads.
    pub key_heads: usize,
    /// Gradient of the readout.
    pub gradient: Tensor,
}

impl Op for StateReadForward {
    const NAME: &'static str = NAME;
    type Sizes = Sizes;
    type Output = Tensor;

    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.input.query, &self.input.states]
    }
    fn check(&self) -> Result<Sizes> {
        check(self.input.as_ref().map(Tensor::shape), self.key_heads)
    }
}

impl Op for StateReadBackward {
    const NAME: &'static str = "state_read_backward";
    type Sizes = Sizes;
    type Output = StateRead<Tensor>;

    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.input.query, &self.input.states, &self.gradient]
    }
    fn check(&self) -> Result<Sizes> {
        let input = self.input.as_ref().map(Tensor::shape);
        let sizes = check(input, self.key_heads)?;
        let expected = sizes.readout_shape(input.query);
        expect_shape(NAME, "gradient", self.gradient.shape(), &expected, "[.., value_heads·d_v]")?;
        Ok(sizes)
    }
}

impl StateRead<&Tensor> {
    /// Reads one state per row with that row's query.
    pub fn state_read(self, key_heads: usize) -> Result<Tensor> {
        let input = self.map(Tensor::detach);
        let readout = StateReadForward { input: input.clone(), key_heads }.run()?;
        Ok(record_one(&[self.query, self.states], readout, move |gradient| {
            let d = StateReadBackward { input, key_heads, gradient }.run()?;
            Ok(vec![Some(d.query), Some(d.states)])
        }))
    }
}

//! State read: each row reads its own state. This is how an anchor position reads its checkpoint.
//!
//! ```text
//! q ← s q / sqrt(Σq² + 1e-6),  s = d_k^-½;   o_n = A_nᵀ q_n      per value head, with its key head's query
//! query [.., key_heads·d_k] with N rows   states [N, value_heads, d_k, d_v]   readout [.., value_heads·d_v]
//! dq = A do (then back through the norm),   dA = q doᵀ
//! ```

pub(crate) mod fast;
pub(crate) mod reference;

use crate::engine::Engine;
use crate::error::{Result, bad_shape, bad_value};
use crate::tape::{Tape, Var};

/// Inputs of [`Tape::state_read`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct StateRead<T> {
    /// Unnormalised queries, [.., key_heads·d_k].
    pub query: T,
    /// One state per row, [N, value_heads, d_k, d_v].
    pub states: T,
}

/// Validated dimensions of a call.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub rows: usize,
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

pub(crate) fn check(query: &[usize], states: &[usize], key_heads: usize) -> Result<Sizes> {
    const NAME: &str = "state_read";
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

pub(crate) fn output_shape(query: &[usize], sizes: &Sizes) -> Vec<usize> {
    let mut shape = query.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = sizes.value_heads * sizes.value_dim;
    }
    shape
}

impl<'e, E: Engine> Tape<'e, E> {
    /// Reads one state per row with that row's query.
    pub fn state_read(&self, input: StateRead<&Var<E::Tensor>>, key_heads: usize) -> Result<Var<E::Tensor>> {
        let (query, states) = (input.query.value().clone(), input.states.value().clone());
        let out = self.engine().state_read(StateRead { query: &query, states: &states }, key_heads)?;
        Ok(self.record_one(&[input.query, input.states], out, move |tape, gradient| {
            let input = StateRead { query: &query, states: &states };
            let d = tape.engine().state_read_backward(input, key_heads, &gradient)?;
            Ok(vec![Some(d.query), Some(d.states)])
        }))
    }
}

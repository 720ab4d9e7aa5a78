//! Causal softmax attention.
//!
//! ```text
//! Q [B, Tq, H·d]   K [B, Tk, H·d]   V [B, Tk, H·e]   Tk ≥ Tq; the queries are the last Tq of Tk positions,
//!                                                    so query i sees keys j ≤ Tk − Tq + i
//! per batch entry and head:
//! S = d^-½ Q Kᵀ,   L_i = ln Σ_j e^S_ij,   P_ij = e^(S_ij − L_i) (0 where unseen),   O = P V   [B, Tq, H·e]
//!
//! D_i = Σ dO_i ∘ O_i,   dV = Pᵀ dO,   dS = P ∘ (dO Vᵀ − D),   dQ = d^-½ dS K,   dK = d^-½ dSᵀ Q
//! ```

pub(crate) mod fast;
mod fast_backward;
mod fast_decode;
pub(crate) mod reference;

use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::op::Op;
use crate::tape::{record_one, records};
use crate::tensor::Tensor;

/// Inputs of [`Attention::attention`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct Attention<T> {
    /// Queries, [B, Tq, H·d].
    pub query: T,
    /// Keys, [B, Tk, H·d].
    pub key: T,
    /// Values, [B, Tk, H·e].
    pub value: T,
}

impl<T> Attention<T> {
    /// Applies `f` to every input.
    pub(crate) fn map<U>(self, mut f: impl FnMut(T) -> U) -> Attention<U> {
        Attention { query: f(self.query), key: f(self.key), value: f(self.value) }
    }

    /// Borrows every input.
    pub(crate) fn as_ref(&self) -> Attention<&T> {
        Attention { query: &self.query, key: &self.key, value: &self.value }
    }
}

/// Keys and values of consecutive tokens, [1, tokens, H·d] and [1, tokens, H·e]: one block of a decoding cache.
///
/// A cache is a list of blocks, each with [`BLOCK_TOKENS`] tokens except the last. Sequences with a common prefix
/// can share its blocks, and appending to a sequence copies at most its last block.
#[derive(Clone, Copy, Debug)]
pub struct KeyValues<T> {
    /// Keys, already rotated.
    pub key: T,
    /// Values.
    pub value: T,
}

impl<T> KeyValues<T> {
    /// Applies `f` to keys and values.
    pub(crate) fn map<'a, U>(&'a self, f: impl Fn(&'a T) -> U) -> KeyValues<U> {
        KeyValues { key: f(&self.key), value: f(&self.value) }
    }
}

/// Tokens per full block of [`KeyValues`]: a multiple of the CPU's tile size, so that no tile crosses
/// blocks.
pub const BLOCK_TOKENS: usize = 2 * fast::TILE;

/// Validated dimensions of a call.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// B.
    pub batch: usize,
    /// Tq.
    pub queries: usize,
    /// Tk.
    pub keys: usize,
    /// H.
    pub heads: usize,
    /// Width of a query or key.
    pub dk: usize,
    /// Width of a value.
    pub dv: usize,
}

impl Sizes {
    /// Position of the first query among the keys.
    pub fn offset(&self) -> usize {
        self.keys - self.queries
    }

    /// Output shape, [B, Tq, H·e].
    pub fn output(&self) -> [usize; 3] {
        [self.batch, self.queries, self.heads * self.dv]
    }

    /// Score scale d^-½.
    pub fn scale(&self) -> f64 {
        1.0 / (self.dk as f64).sqrt()
    }
}

fn check(input: Attention<&[usize]>, heads: usize) -> Result<Sizes> {
    const NAME: &str = "attention";
    if heads == 0 {
        return bad_value(NAME, "heads is 0; it must be at least 1");
    }
    let &[batch, queries, width] = input.query else {
        return bad_shape(NAME, "query", input.query, "three dimensions [B, Tq, H·d]");
    };
    if width == 0 || !width.is_multiple_of(heads) {
        let expected = format!("a last dimension that is a multiple of {heads} (the number of heads)");
        return bad_shape(NAME, "query", input.query, expected);
    }
    let keys = match *input.key {
        [b, keys, w] if b == batch && w == width && keys >= queries => keys,
        _ => {
            let expected = format!("[{batch}, Tk, {width}] with Tk ≥ Tq = {queries}");
            return bad_shape(NAME, "key", input.key, expected);
        }
    };
    match *input.value {
        [b, t, w] if b == batch && t == keys && w > 0 && w.is_multiple_of(heads) => {
            Ok(Sizes { batch, queries, keys, heads, dk: width / heads, dv: w / heads })
        }
        _ => {
            let expected = format!("[{batch}, {keys}, H·e] (B, Tk) with H = {heads} heads");
            bad_shape(NAME, "value", input.value, expected)
        }
    }
}

/// Validates a query [1, Tq, H·d] against the blocks of a cache.
fn check_blocks(query: &[usize], blocks: &[KeyValues<&[usize]>], heads: usize) -> Result<Sizes> {
    const NAME: &str = "attention_blocks";
    let width = query.last().copied().unwrap_or(0);
    let (mut keys, mut value_width) = (0, 0);
    for (i, &KeyValues { key, value }) in blocks.iter().enumerate() {
        let (&[1, tokens, _], &[1, _, wide]) = (key, value) else {
            return bad_shape(NAME, "key", key, "[1, tokens, H·d], and values of as many tokens");
        };
        let fits = if i + 1 < blocks.len() { tokens == BLOCK_TOKENS } else { tokens <= BLOCK_TOKENS };
        if !fits || (i > 0 && wide != value_width) {
            let expected = format!("{BLOCK_TOKENS} tokens in every block except the last, and equal widths");
            return bad_shape(NAME, "key", key, expected);
        }
        check(Attention { query: &[1, 0, width], key, value }, heads)?;
        (keys, value_width) = (keys + tokens, wide);
    }
    check(Attention { query, key: &[1, keys, width], value: &[1, keys, value_width] }, heads)
}

/// The forward pass as a device runs it. Its result is the output and, with `keep`, what the backward pass needs.
pub struct AttentionForward {
    /// The inputs.
    pub input: Attention<Tensor>,
    /// Number of heads.
    pub heads: usize,
    /// Whether a backward pass will follow.
    pub keep: bool,
}

/// Gradients of [`AttentionForward`] with respect to its inputs.
pub struct AttentionBackward {
    /// The inputs.
    pub input: Attention<Tensor>,
    /// Number of heads.
    pub heads: usize,
    /// What the forward pass kept.
    pub kept: Vec<Tensor>,
    /// Gradient of the output.
    pub gradient: Tensor,
}

/// Attention over a key-value cache in blocks; see [`Tensor::attention_blocks`].
pub struct AttentionBlocks {
    /// Queries, [1, Tq, H·d].
    pub query: Tensor,
    /// The cache.
    pub blocks: Vec<KeyValues<Tensor>>,
    /// Number of heads.
    pub heads: usize,
}

impl Op for AttentionForward {
    const NAME: &'static str = "attention";
    type Sizes = Sizes;
    type Output = (Tensor, Vec<Tensor>);

    fn inputs(&self) -> Vec<&Tensor> {
        let Attention { query, key, value } = &self.input;
        vec![query, key, value]
    }
    fn check(&self) -> Result<Sizes> {
        check(self.input.as_ref().map(Tensor::shape), self.heads)
    }
}

impl Op for AttentionBackward {
    const NAME: &'static str = "attention_backward";
    type Sizes = Sizes;
    type Output = Attention<Tensor>;

    fn inputs(&self) -> Vec<&Tensor> {
        let Attention { query, key, value } = &self.input;
        [query, key, value, &self.gradient].into_iter().chain(&self.kept).collect()
    }
    fn check(&self) -> Result<Sizes> {
        let sizes = check(self.input.as_ref().map(Tensor::shape), self.heads)?;
        expect_shape(Self::NAME, "gradient", self.gradient.shape(), &sizes.output(), "[B, Tq, H·e]")?;
        Ok(sizes)
    }
}

impl Op for AttentionBlocks {
    const NAME: &'static str = "attention_blocks";
    type Sizes = Sizes;
    type Output = Tensor;

    fn inputs(&self) -> Vec<&Tensor> {
        let blocks = self.blocks.iter().flat_map(|block| [&block.key, &block.value]);
        std::iter::once(&self.query).chain(blocks).collect()
    }
    fn check(&self) -> Result<Sizes> {
        let blocks: Vec<_> = self.blocks.iter().map(|block| block.map(Tensor::shape)).collect();
        check_blocks(self.query.shape(), &blocks, self.heads)
    }
}

impl Attention<&Tensor> {
    /// Causal softmax attention; the `heads` heads are concatenated in the last dimension.
    pub fn attention(self, heads: usize) -> Result<Tensor> {
        let tensors = [self.query, self.key, self.value];
        let input = self.map(Tensor::clone);
        let op = AttentionForward { input: input.clone(), heads, keep: records(&tensors) };
        let (output, kept) = op.run()?;
        Ok(record_one(&tensors, output, move |gradient| {
            let d = AttentionBackward { input, heads, kept, gradient }.run()?;
            Ok(vec![Some(d.query), Some(d.key), Some(d.value)])
        }))
    }
}

impl Tensor {
    /// Attention of a query [1, Tq, H·d] over a key-value cache in blocks, bit-identical to [`Attention::attention`];
    /// for inference. It is not recorded.
    pub fn attention_blocks(&self, blocks: &[KeyValues<Tensor>], heads: usize) -> Result<Tensor> {
        AttentionBlocks { query: self.clone(), blocks: blocks.to_vec(), heads }.run()
    }
}

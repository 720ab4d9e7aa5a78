//! Causal softmax attention.
//!
//! ```text
//! Q [B, Tq, H·d]   K [B, Tk, G·d]   V [B, Tk, G·e]   G divides H: query head h reads key head h / (H / G)
//! Tk ≥ Tq; the queries are the last Tq of Tk positions, so query i is at p = Tk − Tq + i; it sees keys j ≤ p, with a
//! window w only p − w < j ≤ p
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
    /// Keys, [B, Tk, G·d].
    pub key: T,
    /// Values, [B, Tk, G·e].
    pub value: T,
}

/// Heads, and how far back a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionOptions {
    /// H, the number of query heads.
    pub heads: usize,
    /// G, the number of key and value heads; it divides H.
    pub kv_heads: usize,
    /// The number of keys that a query sees, its own included; `None` for all.
    pub window: Option<usize>,
}

/// As many key heads as query heads, and no window.
impl From<usize> for AttentionOptions {
    fn from(heads: usize) -> Self {
        Self { heads, kv_heads: heads, window: None }
    }
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

/// Keys and values of consecutive tokens, [1, tokens, G·d] and [1, tokens, G·e]: one block of a decoding cache.
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
    /// G.
    pub kv_heads: usize,
    /// Keys that a query sees at most.
    pub window: usize,
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

    /// The key head that a query head reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    /// The first key that the query at a position sees.
    pub fn first_key(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window)
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

fn check(input: Attention<&[usize]>, options: AttentionOptions) -> Result<Sizes> {
    const NAME: &str = "attention";
    let AttentionOptions { heads, kv_heads, window } = options;
    if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        let message = format!("{heads} heads and {kv_heads} key heads; the second must divide the first");
        return bad_value(NAME, message);
    }
    if window == Some(0) {
        return bad_value(NAME, "the window is 0; a query sees at least its own key");
    }
    let &[batch, queries, width] = input.query else {
        return bad_shape(NAME, "query", input.query, "three dimensions [B, Tq, H·d]");
    };
    if width == 0 || !width.is_multiple_of(heads) {
        let expected = format!("a last dimension that is a multiple of {heads} (the number of heads)");
        return bad_shape(NAME, "query", input.query, expected);
    }
    let dk = width / heads;
    let keys = match *input.key {
        [b, keys, w] if b == batch && w == kv_heads * dk && keys >= queries => keys,
        _ => {
            let expected = format!("[{batch}, Tk, {}] with Tk ≥ Tq = {queries}", kv_heads * dk);
            return bad_shape(NAME, "key", input.key, expected);
        }
    };
    match *input.value {
        [b, t, w] if b == batch && t == keys && w > 0 && w.is_multiple_of(kv_heads) => {
            let (window, dv) = (window.unwrap_or(usize::MAX), w / kv_heads);
            Ok(Sizes { batch, queries, keys, heads, kv_heads, window, dk, dv })
        }
        _ => {
            let expected = format!("[{batch}, {keys}, G·e] (B, Tk) with G = {kv_heads} key heads");
            bad_shape(NAME, "value", input.value, expected)
        }
    }
}

/// Validates a query [1, Tq, H·d] against the blocks of a cache.
fn check_blocks(query: &[usize], blocks: &[KeyValues<&[usize]>], options: AttentionOptions) -> Result<Sizes> {
    const NAME: &str = "attention_blocks";
    let width = query.last().copied().unwrap_or(0);
    let (mut keys, mut widths) = (0, [0, 0]);
    for (i, &KeyValues { key, value }) in blocks.iter().enumerate() {
        let (&[1, tokens, key_width], &[1, _, value_width]) = (key, value) else {
            return bad_shape(NAME, "key", key, "[1, tokens, G·d], and values of as many tokens");
        };
        let fits = if i + 1 < blocks.len() { tokens == BLOCK_TOKENS } else { tokens <= BLOCK_TOKENS };
        if !fits || (i > 0 && [key_width, value_width] != widths) {
            let expected = format!("{BLOCK_TOKENS} tokens in every block except the last, and equal widths");
            return bad_shape(NAME, "key", key, expected);
        }
        check(Attention { query: &[1, 0, width], key, value }, options)?;
        (keys, widths) = (keys + tokens, [key_width, value_width]);
    }
    let [key, value] = widths.map(|width| [1, keys, width]);
    check(Attention { query, key: &key, value: &value }, options)
}

/// The forward pass as a device runs it. Its result is the output and, with `keep`, what the backward pass needs.
pub struct AttentionForward {
    /// The inputs.
    pub input: Attention<Tensor>,
    /// Heads and window.
    pub options: AttentionOptions,
    /// Whether a backward pass will follow.
    pub keep: bool,
}

/// Gradients of [`AttentionForward`] with respect to its inputs.
pub struct AttentionBackward {
    /// The inputs.
    pub input: Attention<Tensor>,
    /// Heads and window.
    pub options: AttentionOptions,
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
    /// Heads and window.
    pub options: AttentionOptions,
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
        check(self.input.as_ref().map(Tensor::shape), self.options)
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
        let sizes = check(self.input.as_ref().map(Tensor::shape), self.options)?;
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
        check_blocks(self.query.shape(), &blocks, self.options)
    }
}

impl Attention<&Tensor> {
    /// Causal softmax attention; the heads are concatenated in the last dimension. A number stands for that many heads,
    /// all with keys of their own.
    pub fn attention(self, options: impl Into<AttentionOptions>) -> Result<Tensor> {
        let options = options.into();
        let tensors = [self.query, self.key, self.value];
        let input = self.map(Tensor::clone);
        let op = AttentionForward { input: input.clone(), options, keep: records(&tensors) };
        let (output, kept) = op.run()?;
        Ok(record_one(&tensors, output, move |gradient| {
            let d = AttentionBackward { input, options, kept, gradient }.run()?;
            Ok(vec![Some(d.query), Some(d.key), Some(d.value)])
        }))
    }
}

impl Tensor {
    /// Attention of a query [1, Tq, H·d] over a key-value cache in blocks, bit-identical to [`Attention::attention`];
    /// for inference. It is not recorded.
    pub fn attention_blocks(
        &self,
        blocks: &[KeyValues<Tensor>],
        options: impl Into<AttentionOptions>,
    ) -> Result<Tensor> {
        AttentionBlocks { query: self.clone(), blocks: blocks.to_vec(), options: options.into() }.run()
    }
}

//! Anchor reader: attention over saved recurrent states.
//!
//! An anchor is a snapshot of the recurrent state (see `gated_delta`) with a routing key. Each token computes a
//! softmax over the routing scores of the anchors visible to it, plus an optional null entry that reads zero,
//! applies its query to each of these states and sums the results with the softmax weights.
//!
//! ```text
//! per value head h (key head h / (value_heads / key_heads)), s = d_k^-½, anchors m visible to token t
//! q ← s q / sqrt(Σq² + 1e-6);   a_m = scale · ρ_t·κ_m;   π = softmax([a_m …, null])
//! o_t = Σ_m π_m A_mᵀ q                                  (the null reads zero; without it, softmax over anchors only)
//! top-K: the K highest a_m (the newer anchor wins ties) and the null
//!
//! query [.., key_heads·d_k]           routing_query [.., value_heads·d_r]     null_score [.., value_heads] or None
//! routing_keys [N, value_heads·d_r]   anchor_states [N, value_heads, d_k, d_v]
//! readout [.., value_heads·d_v]
//!
//! δ = <do, o>;   da_m = π_m (<do, A_mᵀq> − δ);   d null = −π_∅ δ
//! dρ = scale Σ_m da_m κ_m;   dκ_m = scale Σ_t da_m ρ_t;   dq = Σ_m π_m A_m do;   dA_m = Σ_t π_m q doᵀ
//! ```
//! Tokens are grouped into segments that share a list of visible anchors ([`ReadPlan`]). The readout of a token
//! that belongs to no segment is zero.

mod dense;
mod dense_backward;
pub(crate) mod fast;
mod numbers;
mod one;
mod plan;
pub(crate) mod reference;
mod sparse;
pub(crate) mod stored;
mod tile;

use std::sync::Arc;

pub use numbers::Source;
pub use plan::{ReadPlan, Segment, Visible};
pub use stored::{StatesToHost, Storage, StoreStates, StoredStates};

use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::op::Op;
use crate::tape::{record_one, records};
use crate::tensor::Tensor;

const NAME: &str = "anchor_read";

/// Inputs of [`AnchorRead::anchor_read`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct AnchorRead<T, A = T> {
    /// Unnormalised queries, [.., key_heads·d_k].
    pub query: T,
    /// Routing queries ρ, [.., value_heads·d_r].
    pub routing_query: T,
    /// Routing keys κ, [N, value_heads·d_r].
    pub routing_keys: T,
    /// Anchor states A, [N, value_heads, d_k, d_v]: a tensor, or for inference a list of stored states
    /// ([`Tensor::store`]) that are concatenated along N.
    pub anchor_states: A,
    /// Score of the null entry, [.., value_heads]; `None` omits the null entry.
    pub null_score: Option<T>,
}

/// Non-differentiable options of [`AnchorRead::anchor_read`].
#[derive(Clone, Debug)]
pub struct AnchorReadOptions {
    /// Number of query heads.
    pub key_heads: usize,
    /// Number of value heads; must be a multiple of `key_heads`.
    pub value_heads: usize,
    /// Maximum number of anchors a token reads; `None` reads all visible anchors.
    pub top_k: Option<usize>,
    /// Factor applied to every score except the null's.
    pub routing_scale: f64,
    /// Anchors visible to each token.
    pub plan: Arc<ReadPlan>,
}

/// Intermediate results that [`AnchorReadForward`] saves for its backward pass.
#[derive(Clone, Debug)]
pub struct AnchorReadKept<T> {
    /// log Σ exp of the scores for each token and head, [rows·value_heads].
    pub log_sum: T,
    /// Anchors selected by each token and head in ascending order, [rows·value_heads·K], padded with [`NO_ANCHOR`].
    /// Empty if every token reads all its visible anchors; otherwise the entries of such tokens are unspecified.
    pub chosen: Vec<u32>,
    /// Softmax weights of the selected anchors, in the order of `chosen`.
    pub weights: T,
}

impl<T> AnchorReadKept<T> {
    /// Applies `f` to every tensor.
    pub fn map<U>(self, f: impl Fn(T) -> U) -> AnchorReadKept<U> {
        AnchorReadKept { log_sum: f(self.log_sum), chosen: self.chosen, weights: f(self.weights) }
    }
}

/// Marks an unused entry of [`AnchorReadKept::chosen`].
pub const NO_ANCHOR: u32 = u32::MAX;

impl<T, A> AnchorRead<T, A> {
    /// Applies `f` to every input except the states, and `states` to these.
    pub fn map_with<U, B>(self, f: impl Fn(T) -> U, states: impl FnOnce(A) -> B) -> AnchorRead<U, B> {
        AnchorRead {
            query: f(self.query),
            routing_query: f(self.routing_query),
            routing_keys: f(self.routing_keys),
            anchor_states: states(self.anchor_states),
            null_score: self.null_score.map(f),
        }
    }

    /// Borrows every input.
    pub fn as_ref(&self) -> AnchorRead<&T, &A> {
        AnchorRead {
            query: &self.query,
            routing_query: &self.routing_query,
            routing_keys: &self.routing_keys,
            anchor_states: &self.anchor_states,
            null_score: self.null_score.as_ref(),
        }
    }

    /// Every input except the states.
    fn without_states(self) -> Vec<T> {
        [self.query, self.routing_query, self.routing_keys].into_iter().chain(self.null_score).collect()
    }
}

impl<T> AnchorRead<T> {
    /// Applies `f` to every input.
    pub fn map<U>(self, f: impl Fn(T) -> U) -> AnchorRead<U> {
        self.map_with(&f, &f)
    }

    fn into_list(self) -> Vec<T> {
        let mut list = vec![self.query, self.routing_query, self.routing_keys, self.anchor_states];
        list.extend(self.null_score);
        list
    }
}

/// Validated dimensions of a call.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Number of tokens.
    pub rows: usize,
    /// Number of anchors N.
    pub anchors: usize,
    /// Number of query heads.
    pub key_heads: usize,
    /// Number of value heads, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Rows of a state, d_k.
    pub key_dim: usize,
    /// Columns of a state, d_v.
    pub value_dim: usize,
    /// Length of a routing key of one head, d_r.
    pub routing_dim: usize,
}

impl Sizes {
    /// Number of value heads per query head.
    pub fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }
    /// Number of elements in one head's state.
    pub fn state(&self) -> usize {
        self.key_dim * self.value_dim
    }
    /// Shape of the readout, from the shape of the queries.
    pub fn readout_shape(&self, query: &[usize]) -> Vec<usize> {
        let leading = query.split_last().map_or(&[][..], |(_, leading)| leading);
        leading.iter().copied().chain([self.value_heads * self.value_dim]).collect()
    }
    /// Rejects an entry of a list of stored states that does not have these dimensions, or not `anchors` anchors.
    /// Kernels of [`AnchorReadStored`] call it for the entries that its check left out.
    pub fn check_stored(&self, found: &[usize], anchors: Option<usize>) -> Result<()> {
        check_stored(found, anchors, [self.value_heads, self.key_dim, self.value_dim])
    }
}

fn check(input: AnchorRead<&[usize]>, options: &AnchorReadOptions) -> Result<Sizes> {
    let (key_heads, value_heads) = (options.key_heads, options.value_heads);
    if key_heads == 0 || value_heads == 0 || !value_heads.is_multiple_of(key_heads) {
        return bad_value(
            NAME,
            format!(
                "{value_heads} value heads are not a multiple of {key_heads} key heads, or one of the two numbers is 0"
            ),
        );
    }
    if options.top_k == Some(0) {
        return bad_value(NAME, "top_k is 0; it must be at least 1, or none for dense routing");
    }
    let &[anchors, heads, key_dim, value_dim] = input.anchor_states else {
        return bad_shape(NAME, "anchor_states", input.anchor_states, "[anchors, value_heads, d_k, d_v]");
    };
    if heads != value_heads || key_dim == 0 || value_dim == 0 {
        return bad_shape(
            NAME,
            "anchor_states",
            input.anchor_states,
            format!("[anchors, {value_heads}, d_k, d_v]"),
        );
    }
    let Some((&width, leading)) = input.query.split_last() else {
        return bad_shape(NAME, "query", input.query, format!("[.., {}]", key_heads * key_dim));
    };
    if width != key_heads * key_dim {
        return bad_shape(
            NAME,
            "query",
            input.query,
            format!("[.., {}] (key_heads·d_k)", key_heads * key_dim),
        );
    }
    let rows = leading.iter().product();
    let with = |last: usize| -> Vec<usize> { leading.iter().copied().chain([last]).collect() };
    let routing = match input.routing_query.last() {
        Some(&w) if w > 0 && w.is_multiple_of(value_heads) => w,
        _ => {
            return bad_shape(NAME, "routing_query", input.routing_query, format!("[.., {value_heads}·d_r]"));
        }
    };
    expect_shape(
        NAME,
        "routing_query",
        input.routing_query,
        &with(routing),
        "rows of query, value_heads·d_r",
    )?;
    expect_shape(NAME, "routing_keys", input.routing_keys, &[anchors, routing], "anchors, value_heads·d_r")?;
    if let Some(null) = input.null_score {
        expect_shape(NAME, "null_score", null, &with(value_heads), "rows of query, value_heads")?;
    }
    options.plan.check(NAME, rows, anchors)?;
    Ok(Sizes {
        rows,
        anchors,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        routing_dim: routing / value_heads,
    })
}

/// Shape of a list of stored states concatenated along N. Rejects entries of different sizes. If the list has as many
/// entries as there are routing keys, each entry holds one anchor and only the first is checked here: a decoding step
/// may read few of many anchors, and the kernel checks those that it reads ([`Sizes::check_stored`]).
fn stored_list_shape(routing_keys: &[usize], list: &[Tensor]) -> Result<[usize; 4]> {
    let sizes = match list.first().map(Tensor::shape) {
        None => [0; 3],
        Some(&[_, heads, key_dim, value_dim]) => [heads, key_dim, value_dim],
        Some(found) => {
            return bad_shape(
                NAME,
                "anchor_states",
                found,
                "[anchors, value_heads, d_k, d_v] in every entry",
            );
        }
    };
    let mut anchors = list.len();
    if routing_keys.first() != Some(&list.len()) {
        list.iter().try_for_each(|stored| check_stored(stored.shape(), None, sizes))?;
        anchors = list.iter().map(|stored| stored.shape()[0]).sum();
    }
    let [heads, key_dim, value_dim] = sizes;
    Ok([anchors, heads, key_dim, value_dim])
}

fn check_stored(found: &[usize], anchors: Option<usize>, sizes: [usize; 3]) -> Result<()> {
    if let [count, rest @ ..] = found
        && *rest == sizes
        && anchors.is_none_or(|anchors| *count == anchors)
    {
        return Ok(());
    }
    let anchors = anchors.map_or("_".into(), |anchors| anchors.to_string());
    let expected = format!("[{anchors}, {}, {}, {}], as the first", sizes[0], sizes[1], sizes[2]);
    bad_shape(NAME, "anchor_states", found, expected)
}

/// The forward pass as a device runs it. Its result is the readout and, with `keep`, what the backward pass needs.
pub struct AnchorReadForward {
    /// The inputs.
    pub input: AnchorRead<Tensor>,
    /// The options.
    pub options: AnchorReadOptions,
    /// Whether a backward pass will follow.
    pub keep: bool,
}

/// Gradients of [`AnchorReadForward`] with respect to its inputs.
pub struct AnchorReadBackward {
    /// The inputs.
    pub input: AnchorRead<Tensor>,
    /// The options.
    pub options: AnchorReadOptions,
    /// The readout.
    pub readout: Tensor,
    /// What the forward pass saved.
    pub kept: Option<AnchorReadKept<Tensor>>,
    /// Gradient of the readout.
    pub gradient: Tensor,
}

/// Variant of [`AnchorReadForward`] for stored states, without a backward pass. If the list has as many entries as there
/// are anchors, each entry must hold one anchor.
pub struct AnchorReadStored {
    /// The inputs.
    pub input: AnchorRead<Tensor, Arc<Vec<Tensor>>>,
    /// The options.
    pub options: AnchorReadOptions,
}

/// Softmax weights π of every token, head and anchor, [rows, value_heads, N]; zero if not visible or not selected.
pub struct RoutingWeights {
    /// The inputs. The states are not read; their dimensions [d_k, d_v] are here instead.
    pub input: AnchorRead<Tensor, [usize; 2]>,
    /// The options.
    pub options: AnchorReadOptions,
}

impl Op for AnchorReadForward {
    const NAME: &'static str = NAME;
    type Sizes = Sizes;
    type Output = (Tensor, Option<AnchorReadKept<Tensor>>);

    fn inputs(&self) -> Vec<&Tensor> {
        self.input.as_ref().into_list()
    }
    fn check(&self) -> Result<Sizes> {
        check(self.input.as_ref().map(Tensor::shape), &self.options)
    }
}

impl Op for AnchorReadBackward {
    const NAME: &'static str = "anchor_read_backward";
    type Sizes = Sizes;
    type Output = AnchorRead<Tensor>;

    fn inputs(&self) -> Vec<&Tensor> {
        let mut inputs = self.input.as_ref().into_list();
        inputs.extend([&self.readout, &self.gradient]);
        inputs.extend(self.kept.iter().flat_map(|kept| [&kept.log_sum, &kept.weights]));
        inputs
    }
    fn check(&self) -> Result<Sizes> {
        let input = self.input.as_ref().map(Tensor::shape);
        let sizes = check(input, &self.options)?;
        let expected = sizes.readout_shape(input.query);
        for (name, tensor) in [("gradient", &self.gradient), ("readout", &self.readout)] {
            expect_shape(NAME, name, tensor.shape(), &expected, "[.., value_heads·d_v]")?;
        }
        Ok(sizes)
    }
}

impl Op for AnchorReadStored {
    const NAME: &'static str = "anchor_read_stored";
    type Sizes = Sizes;
    type Output = Tensor;

    fn inputs(&self) -> Vec<&Tensor> {
        self.input.as_ref().without_states()
    }
    /// Only the first entry: a decoding step may read few of many anchors.
    fn weights(&self) -> Vec<&Tensor> {
        self.input.anchor_states.iter().take(1).collect()
    }
    fn check(&self) -> Result<Sizes> {
        let states = stored_list_shape(self.input.routing_keys.shape(), &self.input.anchor_states)?;
        check(self.input.as_ref().map_with(Tensor::shape, |_| &states[..]), &self.options)
    }
}

impl Op for RoutingWeights {
    const NAME: &'static str = "routing_weights";
    type Sizes = Sizes;
    type Output = Tensor;

    fn inputs(&self) -> Vec<&Tensor> {
        self.input.as_ref().without_states()
    }
    fn check(&self) -> Result<Sizes> {
        let anchors = self.input.routing_keys.shape().first().copied().unwrap_or(0);
        let [key_dim, value_dim] = self.input.anchor_states;
        let states = [anchors, self.options.value_heads, key_dim, value_dim];
        check(self.input.as_ref().map_with(Tensor::shape, |_| &states[..]), &self.options)
    }
}

impl AnchorRead<&Tensor> {
    /// Reads the anchors that the plan makes visible to each token.
    pub fn anchor_read(self, options: &AnchorReadOptions) -> Result<Tensor> {
        let (tensors, input, options) = (self.into_list(), self.map(Tensor::detach), options.clone());
        let keep = records(&tensors);
        let op = AnchorReadForward { input: input.clone(), options: options.clone(), keep };
        let (readout, kept) = op.run()?;
        Ok(record_one(&tensors, readout.clone(), move |gradient| {
            let d = AnchorReadBackward { input, options, readout, kept, gradient }.run()?;
            Ok(d.into_list().into_iter().map(Some).collect())
        }))
    }
}

impl AnchorRead<&Tensor, &Arc<Vec<Tensor>>> {
    /// Variant of `anchor_read` for a list of stored states, in anchor order; for inference. If the list has as many
    /// entries as there are anchors, each entry must hold one anchor.
    pub fn anchor_read_stored(self, options: &AnchorReadOptions) -> Result<Tensor> {
        if self.without_states().iter().any(|tensor| tensor.is_recorded()) {
            return bad_value(AnchorReadStored::NAME, "stored states have no gradient: train with tensors");
        }
        AnchorReadStored { input: self.map_with(Tensor::clone, Arc::clone), options: options.clone() }.run()
    }
}

impl AnchorRead<&Tensor, [usize; 2]> {
    /// Softmax weights for inspection, [rows, value_heads, anchors]; zero where an anchor is not visible or not
    /// selected. The states are not read; their dimensions [d_k, d_v] are passed instead. It is not recorded.
    pub fn routing_weights(self, options: &AnchorReadOptions) -> Result<Tensor> {
        RoutingWeights { input: self.map_with(Tensor::clone, |sizes| sizes), options: options.clone() }.run()
    }
}

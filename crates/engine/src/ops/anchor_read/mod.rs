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
mod stored;
mod tile;

use std::sync::Arc;

pub use numbers::Source;
pub use plan::{ReadPlan, Segment, Visible};
pub use stored::{Storage, StoredStates};

use crate::engine::Engine;
use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::tape::{Tape, Var};

/// Inputs of [`Tape::anchor_read`], or the gradients of these inputs.
#[derive(Clone, Copy, Debug)]
pub struct AnchorRead<T, A = T> {
    /// Unnormalised queries, [.., key_heads·d_k].
    pub query: T,
    /// Routing queries ρ, [.., value_heads·d_r].
    pub routing_query: T,
    /// Routing keys κ, [N, value_heads·d_r].
    pub routing_keys: T,
    /// Anchor states A, [N, value_heads, d_k, d_v]: a tensor, or for inference a list of [`StoredStates`] that are
    /// concatenated along N.
    pub anchor_states: A,
    /// Score of the null entry, [.., value_heads]; `None` omits the null entry.
    pub null_score: Option<T>,
}

/// Non-differentiable options of [`Tape::anchor_read`].
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

/// Intermediate results that [`Engine::anchor_read`] saves for its backward pass.
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
    /// Applies `f` to every tensor and stops at the first error.
    pub(crate) fn try_map<U>(&self, mut f: impl FnMut(&T) -> Result<U>) -> Result<AnchorReadKept<U>> {
        let (log_sum, weights) = (f(&self.log_sum)?, f(&self.weights)?);
        Ok(AnchorReadKept { log_sum, chosen: self.chosen.clone(), weights })
    }
}

/// Marks an unused entry of [`AnchorReadKept::chosen`].
pub const NO_ANCHOR: u32 = u32::MAX;

impl<T, A> AnchorRead<T, A> {
    /// Returns the inputs with `anchor_states` replaced.
    pub(crate) fn with_states<B>(self, anchor_states: B) -> AnchorRead<T, B> {
        let Self { query, routing_query, routing_keys, null_score, .. } = self;
        AnchorRead { query, routing_query, routing_keys, anchor_states, null_score }
    }
}

impl<T> AnchorRead<T> {
    pub(crate) fn map<U>(self, mut f: impl FnMut(T) -> U) -> AnchorRead<U> {
        AnchorRead {
            query: f(self.query),
            routing_query: f(self.routing_query),
            routing_keys: f(self.routing_keys),
            anchor_states: f(self.anchor_states),
            null_score: self.null_score.map(f),
        }
    }

    /// Applies `f` to every input and stops at the first error.
    pub(crate) fn try_map<U>(self, mut f: impl FnMut(T) -> Result<U>) -> Result<AnchorRead<U>> {
        Ok(AnchorRead {
            query: f(self.query)?,
            routing_query: f(self.routing_query)?,
            routing_keys: f(self.routing_keys)?,
            anchor_states: f(self.anchor_states)?,
            null_score: self.null_score.map(f).transpose()?,
        })
    }

    pub(crate) fn as_ref(&self) -> AnchorRead<&T> {
        AnchorRead {
            query: &self.query,
            routing_query: &self.routing_query,
            routing_keys: &self.routing_keys,
            anchor_states: &self.anchor_states,
            null_score: self.null_score.as_ref(),
        }
    }

    pub(crate) fn into_list(self) -> Vec<T> {
        let mut list = vec![self.query, self.routing_query, self.routing_keys, self.anchor_states];
        list.extend(self.null_score);
        list
    }
}

/// Validated dimensions of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub rows: usize,
    pub anchors: usize,
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub routing_dim: usize,
}

impl Sizes {
    pub(crate) fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }
    pub(crate) fn state(&self) -> usize {
        self.key_dim * self.value_dim
    }
}

pub(crate) fn check(input: &AnchorRead<&[usize]>, options: &AnchorReadOptions) -> Result<Sizes> {
    const NAME: &str = "anchor_read";
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

/// Variant of [`check`] for calls that only compute the weights and pass [d_k, d_v] instead of the states.
pub(crate) fn check_weights(
    input: AnchorRead<&[usize], [usize; 2]>,
    options: &AnchorReadOptions,
) -> Result<Sizes> {
    let anchors = input.routing_keys.first().copied().unwrap_or(0);
    let [key_dim, value_dim] = input.anchor_states;
    let states = [anchors, options.value_heads, key_dim, value_dim];
    check(&input.with_states(&states[..]), options)
}

/// Shape of a list of stored states concatenated along N; `shape` returns the shape of one entry. Rejects entries
/// of different sizes. If the list has as many entries as there are routing keys, each entry holds one anchor and
/// only the first is checked here: a decoding step may read few of many anchors, and the kernel checks those that
/// it reads.
pub(crate) fn stored_list_shape<S>(
    routing_keys: &[usize],
    list: &[Arc<S>],
    shape: impl Fn(&S) -> [usize; 4],
) -> Result<[usize; 4]> {
    let [_, sizes @ ..] = list.first().map_or([0; 4], |first| shape(first));
    let mut anchors = list.len();
    if routing_keys.first() != Some(&list.len()) {
        anchors = 0;
        for stored in list {
            let found = shape(stored);
            check_stored(found, None, sizes)?;
            anchors += found[0];
        }
    }
    let [heads, key_dim, value_dim] = sizes;
    Ok([anchors, heads, key_dim, value_dim])
}

/// Rejects stored states whose dimensions differ from `sizes`, or whose number of anchors differs from `anchors`.
pub(crate) fn check_stored(found: [usize; 4], anchors: Option<usize>, sizes: [usize; 3]) -> Result<()> {
    if found[1..] == sizes && anchors.is_none_or(|anchors| found[0] == anchors) {
        return Ok(());
    }
    let anchors = anchors.map_or("_".into(), |anchors| anchors.to_string());
    let expected = format!("[{anchors}, {}, {}, {}], as the first", sizes[0], sizes[1], sizes[2]);
    bad_shape("anchor_read", "anchor_states", &found, expected)
}

/// Shape of the readout.
pub(crate) fn output_shape(query: &[usize], sizes: &Sizes) -> Vec<usize> {
    let mut shape = query.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = sizes.value_heads * sizes.value_dim;
    }
    shape
}

impl<'e, E: Engine> Tape<'e, E> {
    /// Reads the anchors that the plan makes visible to each token.
    pub fn anchor_read(
        &self,
        input: AnchorRead<&Var<E::Tensor>>,
        options: &AnchorReadOptions,
    ) -> Result<Var<E::Tensor>> {
        let vars = input.into_list();
        let values = input.map(|v| v.value().clone());
        let (readout, kept) = self.engine().anchor_read(values.as_ref(), options, self.records(&vars))?;
        let options = options.clone();
        let output = readout.clone();
        Ok(self.record_one(&vars, readout, move |tape, gradient| {
            let d = tape.engine().anchor_read_backward(
                values.as_ref(),
                &options,
                &output,
                kept.as_ref(),
                &gradient,
            )?;
            Ok(d.into_list().into_iter().map(Some).collect())
        }))
    }
}

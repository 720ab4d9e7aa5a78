//! The historical reader: every token takes a softmax over the anchors it sees (and the null), reads them with
//! its own query and adds up.
//!
//! ```text
//! per value head h (key head h / (value_heads / key_heads)), s = d_k^-½, anchors m that token t sees
//! q ← s q / sqrt(Σq² + 1e-6);   a_m = scale · ρ_t·κ_m;   π = softmax([a_m …, null])
//! o_t = Σ_m π_m A_mᵀ q                                  (the null reads zero; without it, softmax over anchors only)
//! top-K: the K best a_m, ties to the newer, and the null
//!
//! query [.., key_heads·d_k]           routing_query [.., value_heads·d_r]     null_score [.., value_heads] or none
//! routing_keys [N, value_heads·d_r]   anchor_states [N, value_heads, d_k, d_v]
//! readout [.., value_heads·d_v]
//!
//! δ = <do, o>;   da_m = π_m (<do, A_mᵀq> − δ);   d null = −π_∅ δ
//! dρ = scale Σ_m da_m κ_m;   dκ_m = scale Σ_t da_m ρ_t;   dq = Σ_m π_m A_m do;   dA_m = Σ_t π_m q doᵀ
//! ```
//! Tokens come in segments that share a list of anchors ([`ReadPlan`]); tokens without a segment read zero.

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

/// Inputs of [`Tape::anchor_read`], or their gradients.
#[derive(Clone, Copy, Debug)]
pub struct AnchorRead<T, A = T> {
    /// Queries before normalisation, [.., key_heads·d_k].
    pub query: T,
    /// ρ, [.., value_heads·d_r].
    pub routing_query: T,
    /// κ, [N, value_heads·d_r].
    pub routing_keys: T,
    /// A, [N, value_heads, d_k, d_v]: a tensor, or for inference a list of [`StoredStates`] that stand one
    /// after the other.
    pub anchor_states: A,
    /// The null's score, [.., value_heads]; none leaves the null out.
    pub null_score: Option<T>,
}

/// What does not carry a gradient.
#[derive(Clone, Debug)]
pub struct AnchorReadOptions {
    /// Heads of queries.
    pub key_heads: usize,
    /// Heads of values; a multiple of `key_heads`.
    pub value_heads: usize,
    /// How many anchors a token reads; none is all that it sees.
    pub top_k: Option<usize>,
    /// Factor on every score but the null's.
    pub routing_scale: f64,
    /// What every token sees.
    pub plan: Arc<ReadPlan>,
}

/// What [`Engine::anchor_read`] keeps for its backward pass.
#[derive(Clone, Debug)]
pub struct AnchorReadKept<T> {
    /// log Σ exp of the scores of each token and head, [rows·value_heads].
    pub log_sum: T,
    /// The anchors that each token and head chose, ascending, [rows·value_heads·K]. Empty where all tokens read
    /// everything that they see; meaningless for tokens that do. [`NO_ANCHOR`] stands for none.
    pub chosen: Vec<u32>,
    /// The weights of the chosen anchors, in the same order.
    pub weights: T,
}

impl<T> AnchorReadKept<T> {
    /// Applies `f` to every tensor; the first error ends it.
    pub(crate) fn try_map<U>(&self, mut f: impl FnMut(&T) -> Result<U>) -> Result<AnchorReadKept<U>> {
        let (log_sum, weights) = (f(&self.log_sum)?, f(&self.weights)?);
        Ok(AnchorReadKept { log_sum, chosen: self.chosen.clone(), weights })
    }
}

/// Stands for "no anchor" in [`AnchorReadKept::chosen`].
pub const NO_ANCHOR: u32 = u32::MAX;

impl<T, A> AnchorRead<T, A> {
    /// Replaces the states.
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

    /// Applies `f` to every input; the first error ends it.
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

/// Sizes of a call, once they are known to fit.
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
                "{value_heads} value heads and {key_heads} key heads came; the first must be a multiple of the second"
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

/// [`check`] for a call that wants only the weights and has [d_k, d_v] in place of the states.
pub(crate) fn check_weights(
    input: AnchorRead<&[usize], [usize; 2]>,
    options: &AnchorReadOptions,
) -> Result<Sizes> {
    let anchors = input.routing_keys.first().copied().unwrap_or(0);
    let [key_dim, value_dim] = input.anchor_states;
    let states = [anchors, options.value_heads, key_dim, value_dim];
    check(&input.with_states(&states[..]), options)
}

/// The shape that a list of stored states has as a whole; `shape` gives that of an entry. Refuses entries of different
/// sizes. Where the list is as long as there are routing keys, each entry holds one anchor; then only the first is
/// looked at, because a decoding step may read few of many, and the kernel compares those that it reads.
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

/// Refuses stored states of other sizes than the first have, or of another number of anchors.
pub(crate) fn check_stored(found: [usize; 4], anchors: Option<usize>, sizes: [usize; 3]) -> Result<()> {
    if found[1..] == sizes && anchors.is_none_or(|anchors| found[0] == anchors) {
        return Ok(());
    }
    let anchors = anchors.map_or("_".into(), |anchors| anchors.to_string());
    let expected = format!("[{anchors}, {}, {}, {}], as the first", sizes[0], sizes[1], sizes[2]);
    bad_shape("anchor_read", "anchor_states", &found, expected)
}

/// The shape of the readout.
pub(crate) fn output_shape(query: &[usize], sizes: &Sizes) -> Vec<usize> {
    let mut shape = query.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = sizes.value_heads * sizes.value_dim;
    }
    shape
}

impl<'e, E: Engine> Tape<'e, E> {
    /// Reads the anchors that the plan shows to each token.
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

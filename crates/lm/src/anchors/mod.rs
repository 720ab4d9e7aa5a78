//! Anchors: where they are placed, which of them are kept, and which kept anchors each token sees.
//!
//! Boundary m (from 1) is after text token b_m; the token at position t (from 0) sees the anchors with b_m ≤ t that are
//! still kept. The settings are independent of each other:
//!
//! | setting | who decides, and when |
//! |---|---|
//! | [`Policy::interval`], [`Placement`] | where boundaries are; for all layers at once, before the others run |
//! | [`Retention`] | what is kept; by number alone before any layer runs, or by each layer at its boundaries |
//! | [`Policy::top_k`] | how many of the kept anchors a token reads |
//! | [`Storage`] | the precision in which tokens read the kept states |
//!
//! [`AnchorPlan`] combines the settings for one call.

mod config;
mod placement;
mod plan;
mod retention;
mod settings;

use std::fmt::Display;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use config::MemoryConfig;
pub use march_engine::ops::anchor_read::Storage;
pub use placement::Placement;
pub(crate) use placement::frobenius;
#[doc(hidden)]
pub use placement::{Candidate, movement};
pub use plan::{AnchorPlan, Recording};
pub use retention::{Evictions, Retention};

use crate::error::{Error, Result};

/// How anchors are placed, kept and read. It may differ from the policy that a checkpoint was trained with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// C, the number of text tokens from one anchor to the next; `None` disables anchors.
    pub interval: Option<usize>,
    /// K, the number of anchors that a token reads; `None` reads all visible anchors.
    pub top_k: Option<usize>,
    /// Which anchors are kept.
    #[serde(with = "text")]
    pub retention: Retention,
    /// Where anchors are placed.
    #[serde(with = "text")]
    pub placement: Placement,
    /// The precision of kept states; the read at the anchor itself uses the exact state.
    #[serde(with = "text")]
    pub storage: Storage,
}

impl Policy {
    /// Rejects zeros, and candidate positions that are further apart than the requested anchors.
    pub fn check(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::Request(message));
        if self.interval == Some(0) {
            return refuse("the anchor interval of 0 tokens is too small; it must be at least 1".into());
        }
        if self.top_k == Some(0) {
            return refuse("top-K routing needs K of at least 1; K is 0 (dense routing has no K)".into());
        }
        match (self.placement, self.interval) {
            (Placement::Adaptive(0), _) => {
                return refuse(
                    "placement adaptive:0 is not valid; anchors must be at least 1 token apart".into(),
                );
            }
            (Placement::Adaptive(min), Some(interval)) if min > interval => {
                return refuse(format!(
                    "placement adaptive:{min} keeps anchors {min} tokens apart, but the interval asks for \
                     one every {interval}; use adaptive:{interval} or less, or a longer interval"
                ));
            }
            (Placement::Adaptive(_), None) => {
                return refuse("adaptive placement needs an interval: it sets the number of anchors".into());
            }
            _ => {}
        }
        match self.retention {
            Retention::Recent(0) => refuse("retention recent:0 keeps nothing; use recent:1 or more".into()),
            Retention::Budget(0) => refuse("retention budget:0 keeps nothing; use more bytes".into()),
            _ => Ok(()),
        }
    }

    /// The number of anchors kept after `tokens` tokens, where one anchor takes `anchor_bytes` in all layers together.
    /// This is an estimate with adaptive placement, because the number of placed anchors depends on the text.
    pub fn kept_after(&self, tokens: usize, anchor_bytes: usize) -> usize {
        let complete = self.interval.map_or(0, |interval| tokens / interval.max(1));
        self.retention.kept_of(complete, anchor_bytes)
    }

    /// The boundaries of the periodic grid after `position` and up to `position + tokens`.
    #[doc(hidden)]
    pub fn periodic(&self, position: usize, tokens: usize) -> Vec<usize> {
        self.interval.map_or(Vec::new(), |interval| multiples(interval, position, tokens).collect())
    }

    /// The memory budget in bytes for all anchors, if the retention rule has one.
    pub(crate) fn budget(&self) -> Option<usize> {
        match self.retention {
            Retention::Budget(bytes) => Some(bytes),
            _ => None,
        }
    }
}

/// The multiples of `step` after `position` and up to `position + tokens`.
fn multiples(step: usize, position: usize, tokens: usize) -> impl Iterator<Item = usize> {
    let step = step.max(1);
    (position / step + 1..=(position + tokens) / step).map(move |i| i * step)
}

/// The place of an anchor in the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Anchor {
    /// m, starting at 1.
    pub ordinal: usize,
    /// b_m, the number of text tokens before the anchor.
    pub position: usize,
}

/// How far one sequence has progressed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timeline {
    /// Text tokens so far.
    pub position: usize,
    /// Anchors placed so far, kept or not.
    pub complete: usize,
    /// The anchors that every layer keeps, oldest first.
    pub kept: Vec<Anchor>,
    /// Boundaries, kept or not, since the start of the current chunk. The next call recomputes that chunk and cuts it
    /// at these boundaries, so that the result is bit-identical wherever calls end.
    pub recent: Vec<usize>,
    /// With adaptive placement: the typical movement of the state at an anchor; 0 before the first.
    #[serde(with = "bits")]
    pub usual_movement: f64,
    /// All boundaries so far, if they are recorded.
    pub boundaries: Option<Vec<usize>>,
}

impl Timeline {
    /// Advances over tokens that contain no boundary; `chunk` is the device's chunk length.
    #[doc(hidden)]
    pub fn advance(&mut self, tokens: usize, chunk: usize) {
        self.position += tokens;
        let chunk_start = self.position / chunk.max(1) * chunk;
        self.recent.retain(|&boundary| boundary > chunk_start);
    }

    /// Text tokens since the last boundary, or since the start of the text. Every policy keeps the newest anchor.
    pub(crate) fn since_boundary(&self) -> usize {
        self.position - self.kept.last().map_or(0, |anchor| anchor.position)
    }
}

/// Serialises a setting in its command-line form.
mod text {
    use super::{Deserialize, Deserializer, Display, FromStr, Serializer};

    pub fn serialize<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub fn deserialize<'de, T: FromStr<Err = String>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Serialises a number by its bits, because a decimal form could change it.
pub(crate) mod bits {
    use super::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
        value.to_bits().serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        u64::deserialize(from).map(f64::from_bits)
    }
}

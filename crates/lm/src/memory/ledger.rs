//! Retention within a byte budget: which anchor a layer can drop at the least cost.
//!
//! Each of the L layers has an equal share of the bytes. An anchor takes the bytes of its state as stored, its routing
//! key and its convolution tails. At a boundary where the new anchor does not fit, the cheapest anchor is dropped:
//!
//! ```text
//! usage_m = (mass_m + 1) / (exposure_m + 1)     mean routing weight of anchor m over heads and the tokens that could
//!                                               see it, plus one token that reads it in full
//! redundancy: gap_m = min over m's kept neighbours in time n of ‖A_m − A_n‖ / ‖A_m‖        (of the stored states)
//! cost_m = usage_m · gap_m                      the newest is never dropped; of equal costs, the oldest is
//! ```
//! So the anchor that is dropped is one that tokens rarely read, or whose neighbour holds nearly the same state. Mass
//! and exposure are accumulated token by token and shrink by 1/64 at every boundary, so that old reads count less. Both
//! are f64 and summed in the order of the text, so that the result does not depend on where calls end.

use serde::{Deserialize, Serialize};

use crate::anchors::{Anchor, Evictions, bits};

/// The factor applied to mass and exposure at a boundary.
pub(crate) const DECAY: f64 = 1.0 - 1.0 / 64.0;

/// Bookkeeping of the anchors that a layer keeps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// One entry per anchor, oldest first.
    pub entries: Vec<LedgerEntry>,
    /// What was dropped and when, if that is recorded.
    pub evictions: Evictions,
}

/// Bookkeeping of one anchor in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// The anchor.
    pub anchor: Anchor,
    /// Sum over tokens of the routing weight averaged over heads, decayed.
    #[serde(with = "bits")]
    pub mass: f64,
    /// Number of tokens that could see the anchor, decayed.
    #[serde(with = "bits")]
    pub exposure: f64,
    /// ‖A‖, the norm of the state.
    #[serde(with = "bits")]
    pub norm: f64,
    /// Distance to the kept anchor before it; infinite for the oldest.
    #[serde(with = "bits")]
    pub distance: f64,
}

impl Ledger {
    /// The anchors, oldest first.
    pub fn anchors(&self) -> impl ExactSizeIterator<Item = Anchor> + '_ {
        self.entries.iter().map(|entry| entry.anchor)
    }

    /// The index of an anchor among those that this layer keeps.
    pub fn number(&self, ordinal: usize) -> Option<usize> {
        self.entries.binary_search_by_key(&ordinal, |entry| entry.anchor.ordinal).ok()
    }

    /// Adds what tokens read: routing weights [tokens, heads, columns], whose first columns belong to the entries.
    #[doc(hidden)]
    pub fn note(&mut self, weights: &[f32], heads: usize, columns: usize) {
        for token in weights.chunks_exact((heads * columns).max(1)) {
            for (m, entry) in self.entries.iter_mut().enumerate() {
                let weight: f64 = token.iter().skip(m).step_by(columns).map(|&w| f64::from(w)).sum();
                entry.mass += weight / heads as f64;
                entry.exposure += 1.0;
            }
        }
    }

    /// The entry with the lowest cost; never the newest.
    #[doc(hidden)]
    pub fn cheapest(&self) -> Option<usize> {
        let mut best: Option<(usize, f64)> = None;
        for (m, pair) in self.entries.windows(2).enumerate() {
            let LedgerEntry { mass, exposure, norm, distance, .. } = pair[0];
            let distance = distance.min(pair[1].distance);
            let gap = if norm > 0.0 { distance / norm } else { 0.0 };
            let cost = (mass + 1.0) / (exposure + 1.0) * gap;
            if best.is_none_or(|(_, least)| cost < least) {
                best = Some((m, cost));
            }
        }
        best.map(|(m, _)| m)
    }
}

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
    pub(crate) fn note(&mut self, weights: &[f32], heads: usize, columns: usize) {
        for token in weights.chunks_exact((heads * columns).max(1)) {
            for (m, entry) in self.entries.iter_mut().enumerate() {
                let weight: f64 = token.iter().skip(m).step_by(columns).map(|&w| f64::from(w)).sum();
                entry.mass += weight / heads as f64;
                entry.exposure += 1.0;
            }
        }
    }

    /// The entry with the lowest cost; never the newest.
    pub(crate) fn cheapest(&self) -> Option<usize> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(ordinal: usize, mass: f64, distance: f64) -> LedgerEntry {
        let anchor = Anchor { ordinal, position: 10 * ordinal };
        LedgerEntry { anchor, mass, exposure: 9.0, norm: 2.0, distance }
    }

    #[test]
    fn the_least_read_and_the_nearest_cost_least() {
        let ledger = |list: &[(f64, f64)]| {
            let entries = list.iter().enumerate().map(|(i, &(mass, distance))| entry(i + 1, mass, distance));
            Ledger { entries: entries.collect(), evictions: Vec::new() }
        };
        let inf = f64::INFINITY;
        assert_eq!(ledger(&[(1.0, inf)]).cheapest(), None);
        assert_eq!(ledger(&[(1.0, inf), (0.0, 0.1)]).cheapest(), Some(0));
        // Equal distances: the entry that is read least.
        assert_eq!(ledger(&[(3.0, inf), (1.0, 1.0), (2.0, 1.0), (0.0, 1.0)]).cheapest(), Some(1));
        // Equal mass: of the two that are close to each other, the older.
        assert_eq!(ledger(&[(1.0, inf), (1.0, 1.0), (1.0, 0.2), (1.0, 1.0)]).cheapest(), Some(1));
    }

    #[test]
    fn weights_are_added_by_token() {
        let mut ledger =
            Ledger { entries: vec![entry(1, 0.0, 1.0), entry(2, 0.5, 1.0)], evictions: Vec::new() };
        // Two tokens, two heads, three columns; the last column belongs to no entry.
        ledger.note(&[0.1, 0.2, 9.0, 0.3, 0.4, 9.0, 0.0, 1.0, 9.0, 0.0, 1.0, 9.0], 2, 3);
        assert!((ledger.entries[0].mass - 0.2).abs() < 1e-7 && (ledger.entries[1].mass - 1.8).abs() < 1e-7);
        assert_eq!(ledger.entries[0].exposure, 11.0);
    }
}

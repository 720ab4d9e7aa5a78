//! Retention by bytes: which anchor a layer can best do without.
//!
//! Each layer of L has an equal share of the bytes; an anchor takes those of its state as it is stored, its routing
//! key and its convolution tails. At a boundary, once the new anchor does not fit, the cheapest goes:
//!
//! ```text
//! usage_m = (mass_m + 1) / (exposure_m + 1)     mean routing weight of anchor m over heads and the tokens that could
//!                                               see it; one token that reads it in full is presumed
//! redundancy: gap_m = min over m's kept neighbours in time n of ‖A_m − A_n‖ / ‖A_m‖        (of the stored states)
//! cost_m = usage_m · gap_m                      the newest is never dropped; of equals the oldest goes
//! ```
//! So an anchor goes that tokens hardly read, or whose neighbour says nearly the same. Mass and exposure are added up
//! token by token and shrink by 1/64 at every boundary: what was read long ago counts less. Both are f64 and added in
//! the order of the text, so that nothing depends on where calls are cut.

use march_engine::Engine;
use serde::{Deserialize, Serialize};

use super::Anchors;
use crate::anchors::{Anchor, Evictions, bits, frobenius};
use crate::error::Result;

/// What is left of mass and exposure after a boundary.
const DECAY: f64 = 1.0 - 1.0 / 64.0;

/// What a layer knows of the anchors that it keeps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// One for each anchor, oldest first.
    pub entries: Vec<LedgerEntry>,
    /// What was dropped and when, where that is recorded.
    pub evictions: Evictions,
}

/// What a layer knows of one anchor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// Which it is.
    pub anchor: Anchor,
    /// Σ over tokens of the mean routing weight of the heads, decayed.
    #[serde(with = "bits")]
    pub mass: f64,
    /// Tokens that could see it, decayed.
    #[serde(with = "bits")]
    pub exposure: f64,
    /// ‖A‖.
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

    /// The number of an anchor among those that this layer keeps.
    pub fn number(&self, ordinal: usize) -> Option<usize> {
        self.entries.binary_search_by_key(&ordinal, |entry| entry.anchor.ordinal).ok()
    }

    /// Adds what tokens read: routing weights [tokens, heads, columns], the first columns those of the entries.
    pub(crate) fn note(&mut self, weights: &[f32], heads: usize, columns: usize) {
        for token in weights.chunks_exact((heads * columns).max(1)) {
            for (m, entry) in self.entries.iter_mut().enumerate() {
                let weight: f64 = token.iter().skip(m).step_by(columns).map(|&w| f64::from(w)).sum();
                entry.mass += weight / heads as f64;
                entry.exposure += 1.0;
            }
        }
    }

    /// The entry that costs least; never the newest.
    fn cheapest(&self) -> Option<usize> {
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

impl<E: Engine> Anchors<E> {
    /// Enters the anchor that was pushed last into the ledger, and drops others until `budget` bytes hold the rest.
    pub(crate) fn settle(&mut self, engine: &E, anchor: Anchor, budget: usize, record: bool) -> Result<()> {
        for entry in &mut self.ledger.entries {
            entry.mass *= DECAY;
            entry.exposure *= DECAY;
        }
        let new = self.len() - 1;
        let norm = frobenius(&self.numbers(engine, new)?, None);
        let distance = self.distance(engine, new.checked_sub(1), new)?;
        self.ledger.entries.push(LedgerEntry { anchor, mass: 0.0, exposure: 0.0, norm, distance });
        let room = budget / (self.bytes(engine) / self.len()).max(1);
        let mut dropped = Vec::new();
        while self.len() > room.max(1) {
            let Some(m) = self.ledger.cheapest() else { break };
            let kept: Vec<usize> = (0..self.len()).filter(|&n| n != m).collect();
            dropped.push(self.ledger.entries[m].anchor.ordinal);
            self.ledger.entries[m + 1].distance = self.distance(engine, m.checked_sub(1), m + 1)?;
            self.ledger.entries.remove(m);
            self.keep(engine, &kept)?;
        }
        if record && !dropped.is_empty() {
            dropped.sort_unstable();
            self.ledger.evictions.push((anchor.ordinal, dropped));
        }
        Ok(())
    }

    /// ‖A_a − A_b‖; infinite where there is no a.
    fn distance(&self, engine: &E, a: Option<usize>, b: usize) -> Result<f64> {
        let Some(a) = a else { return Ok(f64::INFINITY) };
        Ok(frobenius(&self.numbers(engine, a)?, Some(&self.numbers(engine, b)?)))
    }

    /// A state as it is stored.
    fn numbers(&self, engine: &E, n: usize) -> Result<Vec<f32>> {
        Ok(engine.stored_to_host(&self.states[n])?.to_f32()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::anchors::Storage;
    use march_engine::Reference;

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
        // Equal distances: the one that is read least.
        assert_eq!(ledger(&[(3.0, inf), (1.0, 1.0), (2.0, 1.0), (0.0, 1.0)]).cheapest(), Some(1));
        // Equal mass: one of the two that are near each other, the older.
        assert_eq!(ledger(&[(1.0, inf), (1.0, 1.0), (1.0, 0.2), (1.0, 1.0)]).cheapest(), Some(1));
    }

    #[test]
    fn weights_are_added_by_token() {
        let mut ledger =
            Ledger { entries: vec![entry(1, 0.0, 1.0), entry(2, 0.5, 1.0)], evictions: Vec::new() };
        // Two tokens, two heads, three columns; the last column is no entry's.
        ledger.note(&[0.1, 0.2, 9.0, 0.3, 0.4, 9.0, 0.0, 1.0, 9.0, 0.0, 1.0, 9.0], 2, 3);
        assert!((ledger.entries[0].mass - 0.2).abs() < 1e-7 && (ledger.entries[1].mass - 1.8).abs() < 1e-7);
        assert_eq!(ledger.entries[0].exposure, 11.0);
    }

    /// States on a line, none read: what goes is what lies nearest to its neighbour, and distances follow.
    #[test]
    fn distances_follow_what_is_dropped() {
        let engine = Reference;
        let mut anchors: Anchors<Reference> = Anchors::default();
        let values = [1.0, 2.0, 2.1, 5.0, 9.0];
        for (i, value) in values.iter().enumerate() {
            let state = engine.full(&[1, 1, 1, 1], *value).unwrap();
            let key = engine.full(&[1, 1], 0.0).unwrap();
            anchors.push(&engine, &state, &key, Storage::F32).unwrap();
            let anchor = Anchor { ordinal: i + 1, position: i + 1 };
            // An anchor has 8 bytes: a state and a key of one number each.
            anchors.settle(&engine, anchor, 24, true).unwrap();
            assert!(anchors.bytes(&engine) <= 24);
        }
        // At the fourth 2.1 goes (0.1 / 2.1 is least), at the fifth 2 (1 / 2 is less than 1 / 1 and 3 / 5).
        assert_eq!(anchors.ledger.evictions, [(4, vec![3]), (5, vec![2])]);
        assert_eq!(anchors.ledger.anchors().map(|a| a.ordinal).collect::<Vec<_>>(), [1, 4, 5]);
        let states: Vec<f32> =
            anchors.states().iter().map(|s| engine.stored_to_host(s).unwrap().to_f32().unwrap()[0]).collect();
        for (i, entry) in anchors.ledger.entries.iter().enumerate() {
            assert_eq!(values[entry.anchor.ordinal - 1] as f32, states[i]);
            let want = if i == 0 { f64::INFINITY } else { f64::from((states[i] - states[i - 1]).abs()) };
            assert_eq!(entry.distance, want);
        }
    }
}

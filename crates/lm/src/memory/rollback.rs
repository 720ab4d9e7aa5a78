//! Rollback to a kept anchor: restores the bank as it was right after that boundary.

use std::fmt::Write;

use march_engine::ops::anchor_read::Storage;

use super::StateBank;
use crate::anchors::{Anchor, Placement, Retention};
use crate::error::{Error, Result};

/// How exactly [`StateBank::rollback`] restored the bank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rollback {
    /// Exactly: continuing is bit-identical to a text that never went further.
    Exact,
    /// Approximately, and why.
    Approximate(String),
}

impl StateBank {
    /// Returns to the point right after kept anchor `ordinal`: position and memories are those of that boundary, and
    /// later anchors are removed. Anchors that were dropped in the meantime stay dropped. On an error the bank is
    /// unchanged.
    pub fn rollback(&mut self, ordinal: usize) -> Result<Rollback> {
        self.check_whole()?;
        let kept = &self.timeline.kept;
        let Some(place) = kept.iter().position(|anchor| anchor.ordinal == ordinal) else {
            return Err(self.not_kept(ordinal));
        };
        let anchor = kept[place];
        let budget = self.policy.budget().is_some();
        let mut layers = Vec::with_capacity(self.layers.len());
        let mut storage = Storage::F32;
        for layer in &self.layers {
            let mut back = layer.fork();
            let stored = back.rollback(anchor, place)?;
            if stored != Storage::F32 {
                storage = stored;
            }
            layers.push(back);
        }
        let then = match self.policy.retention {
            // The number of anchors at that time is unknown.
            Retention::Budget(_) => 0,
            retention => retention.kept_of(anchor.ordinal, 1),
        };
        self.layers = layers;
        self.timeline.position = anchor.position;
        self.timeline.complete = anchor.ordinal;
        self.timeline.kept.truncate(place + 1);
        if let Some(boundaries) = &mut self.timeline.boundaries {
            boundaries.retain(|&boundary| boundary <= anchor.position);
        }
        self.timeline.recent.clear();
        let mut why = Vec::new();
        if storage != Storage::F32 {
            why.push(format!("anchor {ordinal} was stored as {storage}, so the restored state is rounded"));
        }
        if then > place + 1 {
            why.push(format!("{} of the {then} anchors kept at that point are gone", then - place - 1));
        }
        if budget {
            why.push("the budget has scored anchors, and may have dropped some, by later reads".into());
        }
        if self.policy.placement != Placement::Periodic {
            why.push(
                "adaptive placement continues from the anchor's state, which was rounded differently".into(),
            );
        }
        Ok(if why.is_empty() { Rollback::Exact } else { Rollback::Approximate(why.join("; ")) })
    }

    /// Applies [`StateBank::rollback`] to the last kept anchor that is at most `tokens` tokens into the text. Returns
    /// that anchor, at which the text now ends.
    pub fn rollback_to(&mut self, tokens: usize) -> Result<(Anchor, Rollback)> {
        let kept = &self.timeline.kept;
        if let Some(&anchor) = kept.iter().rev().find(|anchor| anchor.position <= tokens) {
            return Ok((anchor, self.rollback(anchor.ordinal)?));
        }
        let first = match kept.first() {
            Some(first) => format!("the first kept anchor is at {} tokens", first.position),
            None => "the bank keeps no anchors".into(),
        };
        Err(Error::Request(format!("no anchor to roll back to at or before {tokens} tokens: {first}")))
    }

    /// The error that explains why a rollback to an anchor is impossible.
    fn not_kept(&self, ordinal: usize) -> Error {
        let complete = self.timeline.complete;
        let ordinals: Vec<usize> = self.timeline.kept.iter().map(|anchor| anchor.ordinal).collect();
        let message = if ordinals.is_empty() {
            format!("no anchor {ordinal} to roll back to: the bank keeps no anchors")
        } else {
            let what = match (1..=complete).contains(&ordinal) {
                true => "is no longer kept",
                false => "does not exist",
            };
            format!("anchor {ordinal} {what}; the bank keeps {}", runs(&ordinals))
        };
        Error::Request(message)
    }
}

/// Formats ascending numbers as ranges: 1–4, 6, 8. If there are many ranges, only the last ones.
#[doc(hidden)]
pub fn runs(numbers: &[usize]) -> String {
    const SHOWN: usize = 12;
    let mut list: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match list.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => list.push((number, number)),
        }
    }
    let mut text = String::new();
    if list.len() > SHOWN {
        let _ = write!(text, "{} anchors, the last ones ", numbers.len());
    }
    let shown: Vec<String> = list[list.len().saturating_sub(SHOWN)..]
        .iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}–{last}") })
        .collect();
    text + &shown.join(", ")
}

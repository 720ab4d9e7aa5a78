//! Back to a kept anchor: the bank as it was right after that boundary.

use std::fmt::Write;

use march_engine::Engine;
use march_engine::ops::anchor_read::{Storage, StoredStates};
use march_engine::ops::gated_delta::CHUNK_TOKENS;

use super::file::storage_name;
use super::{LayerMemory, PLACEMENT_ANCHOR, PLACEMENT_STATE, StateBank};
use crate::anchors::{Anchor, Placement, Retention};
use crate::error::{Error, Result};
use crate::model::mixer::gated_delta_net::{CHUNK, TAILS};

/// What a bank is after [`StateBank::rollback`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rollback {
    /// As it was: what follows has the bits that it would have had if the text had never gone further.
    Exact,
    /// Near what it was, and why not that itself.
    Approximate(String),
}

impl<E: Engine> StateBank<E> {
    /// Goes back to right after kept anchor `ordinal`: state, convolution tails and position are those of that
    /// boundary, later anchors are gone. Anchors that were dropped in the meantime stay dropped. Nothing changes where
    /// it is refused.
    pub fn rollback(&mut self, engine: &E, ordinal: usize) -> Result<Rollback> {
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
            let anchors = &layer.anchors;
            let place = if budget { anchors.ledger.number(ordinal).unwrap_or(usize::MAX) } else { place };
            let (Some(state), Some(tails)) = (anchors.states.get(place), anchors.tails.get(place)) else {
                let message = format!("anchor {ordinal} is listed, but a layer does not have it");
                return Err(Error::Request(message));
            };
            let state = engine.stored_to_host(state)?;
            if state.storage() != Storage::F32 {
                storage = state.storage();
            }
            let state = engine.from_f32(&state.to_f32()?, &state.shape())?;
            let [q, k, v] = tails;
            let tails = [tail(engine, q)?, tail(engine, k)?, tail(engine, v)?];
            let mut back = LayerMemory { anchors: anchors.clone(), ..LayerMemory::default() };
            back.anchors.keep(engine, &(0..=place).collect::<Vec<_>>())?;
            back.anchors.ledger.entries.truncate(place + 1);
            back.anchors.ledger.evictions.retain(|(at, _)| *at <= ordinal);
            if layer.get(PLACEMENT_STATE).is_some() {
                back.set(PLACEMENT_STATE, state.clone());
                back.set(PLACEMENT_ANCHOR, state.clone());
            }
            restore(engine, &mut back, state, tails, anchor.position)?;
            layers.push(back);
        }
        let then = match self.policy.retention {
            // How many there were is not known.
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
        // The chunk is cut here again, as it was.
        let within = !anchor.position.is_multiple_of(CHUNK_TOKENS);
        self.timeline.recent = if within { vec![anchor.position] } else { vec![] };
        let mut why = Vec::new();
        if storage != Storage::F32 {
            why.push(format!(
                "anchor {ordinal} was stored as {}, so the state is its rounded copy",
                storage_name(storage)
            ));
        }
        if then > place + 1 {
            why.push(format!("{} of the {then} anchors that were kept then are gone", then - place - 1));
        }
        if budget {
            why.push("the budget has weighed, and perhaps dropped, anchors by what later tokens read".into());
        }
        if self.policy.placement != Placement::Periodic {
            why.push(
                "adaptive placement goes on from the anchor's state, which it had rounded otherwise".into(),
            );
        }
        Ok(if why.is_empty() { Rollback::Exact } else { Rollback::Approximate(why.join("; ")) })
    }

    /// [`StateBank::rollback`] to the last kept anchor that is at most `tokens` tokens into the text. Gives the anchor,
    /// after which the text now ends.
    pub fn rollback_to(&mut self, engine: &E, tokens: usize) -> Result<(Anchor, Rollback)> {
        let kept = &self.timeline.kept;
        if let Some(&anchor) = kept.iter().rev().find(|anchor| anchor.position <= tokens) {
            return Ok((anchor, self.rollback(engine, anchor.ordinal)?));
        }
        let first = match kept.first() {
            Some(first) => format!("the first kept one is after {} tokens", first.position),
            None => "the bank keeps none".into(),
        };
        Err(Error::Request(format!("there is no anchor at or before {tokens} tokens to go back to: {first}")))
    }

    /// Why there is no going back to an anchor.
    fn not_kept(&self, ordinal: usize) -> Error {
        let complete = self.timeline.complete;
        let ordinals: Vec<usize> = self.timeline.kept.iter().map(|anchor| anchor.ordinal).collect();
        let message = if ordinals.is_empty() {
            format!("there is no anchor {ordinal} to go back to: the bank keeps none")
        } else {
            let what = match (1..=complete).contains(&ordinal) {
                true => "is no longer kept",
                false => "has never been",
            };
            format!("anchor {ordinal} {what}; the bank keeps {}", runs(&ordinals))
        };
        Error::Request(message)
    }
}

/// A convolution's tail [1, conv_size − 1, channels].
fn tail<E: Engine>(engine: &E, stored: &E::Stored) -> Result<E::Tensor> {
    let stored = engine.stored_to_host(stored)?;
    Ok(engine.from_f32(&stored.to_f32()?, &tail_shape(&stored))?)
}

fn tail_shape(stored: &StoredStates) -> [usize; 3] {
    let [_, rest @ ..] = stored.shape();
    rest
}

/// A retention input after which nothing is forgotten: softplus of it is 0, whatever the bias.
const KEEP_ALL: f64 = -1e9;

/// Makes a memory that of a text of `position` tokens which has just this state [1, value_heads, d_k, d_v] and these
/// tails. Where the position is within a chunk, the chunk's earlier tokens are made such that they write nothing and
/// forget nothing (k = v = 0, α = 1): computed again up to the position, where the chunk must be cut, they give the
/// state with its bits.
fn restore<E: Engine>(
    engine: &E,
    memory: &mut LayerMemory<E>,
    state: E::Tensor,
    tails: [E::Tensor; 3],
    position: usize,
) -> Result<()> {
    let heads = engine.shape(&state).get(1).copied().unwrap_or(0);
    let width = |tail: &E::Tensor| engine.shape(tail).last().copied().unwrap_or(0);
    let [_, key, value] = tails.each_ref().map(width);
    let inputs = [(key, 0.0), (value, 0.0), (heads, KEEP_ALL), (heads, 0.0)];
    for (name, (width, number)) in CHUNK.into_iter().zip(inputs) {
        memory.set(name, engine.full(&[1, position % CHUNK_TOKENS, width], number)?);
    }
    for (name, tail) in TAILS.into_iter().zip(tails) {
        memory.set(name, tail);
    }
    memory.set("state", state);
    Ok(())
}

/// Ascending numbers as runs: 1–4, 6, 8. Of many runs the last.
fn runs(numbers: &[usize]) -> String {
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
        let _ = write!(text, "{} anchors, the last of them ", numbers.len());
    }
    let shown: Vec<String> = list[list.len().saturating_sub(SHOWN)..]
        .iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}–{last}") })
        .collect();
    text + &shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_runs() {
        assert_eq!(runs(&[1, 2, 3, 4, 6, 8, 9]), "1–4, 6, 8–9");
        assert_eq!(runs(&[5]), "5");
        let odd: Vec<usize> = (0..40).map(|i| 2 * i + 1).collect();
        assert!(runs(&odd).starts_with("40 anchors, the last of them 57, 59"));
    }
}

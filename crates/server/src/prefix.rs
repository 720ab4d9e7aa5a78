//! States of earlier texts, from which a prompt that begins alike continues.
//!
//! An entry is a text with all of its tokens. A prompt that begins with the whole of an entry continues from it. One that
//! shares only a part continues
//!
//! - from the last shared token, if every layer keeps each token apart (attention),
//! - else from the last anchor in that part, if the model keeps anchors and can be rolled back to it exactly,
//! - else from the longest entry that is a beginning of it. A recurrent layer forgets its earlier states, so while a prompt
//!   is read its state is kept at places where later prompts are likely to depart: at the ends of messages, where this
//!   prompt departed from an earlier one, and at distances that the byte limit sets
//!   ([`PrefixCache::distances`]).
//!
//! What continues from an entry has the bits of a prompt that is read from its beginning.
//!
//! Entries of one text share most of their tensors, such as keys and values. Each tensor is counted once.

use std::collections::HashMap;

use march_lm::anchors::{Placement, Policy, Retention, Storage};
use march_lm::generate::{GRID, Text};
use march_lm::memory::{Rollback, StateBank};

/// A prefix that is shorter is read again: that is faster than to look for it.
const SHORTEST: usize = 16;

/// The smallest distance between states that are kept only because of their distance.
const LEAST_SPACING: usize = 512;

/// By how many later uses an entry that is kept for its distance alone counts as older.
const LESS_WORTH: u64 = 32;

/// A text with all of its tokens.
#[derive(Clone)]
pub struct CachedPrefix {
    /// The tokens.
    pub ids: Vec<u32>,
    /// The text.
    pub text: Text,
}

/// Why a state is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A text ends here, or a message of it, or another text departed here.
    End,
    /// The last state is far away.
    Distance,
}

struct Entry {
    prefix: CachedPrefix,
    reason: Reason,
    /// Its tensors by identity, with their bytes.
    parts: Vec<(usize, usize)>,
    /// When it was last used.
    used: u64,
}

impl Entry {
    /// What only this entry has: the tokens, and the logits after them.
    fn own_bytes(&self) -> usize {
        size_of_val(&self.prefix.ids[..]) + self.prefix.text.logit_bytes()
    }
}

/// The entries, the least recently used of which are dropped when there are too many bytes.
pub struct PrefixCache {
    entries: Vec<Entry>,
    limit: usize,
    bytes: usize,
    /// How many entries have a tensor.
    owners: HashMap<usize, usize>,
    clock: u64,
}

/// What the cache has of a prompt.
pub struct PrefixMatch {
    /// A text of the first tokens of the prompt.
    pub text: Option<Text>,
    /// The number of these tokens.
    pub tokens: usize,
    /// Where the prompt parts from an entry that it could not continue from; its state is worth keeping.
    pub branch: Option<usize>,
}

impl PrefixCache {
    /// An empty cache of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { entries: Vec::new(), limit, bytes: 0, owners: HashMap::new(), clock: 0 }
    }

    /// Bytes of all entries.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where states are kept in a prompt of `tokens` tokens only because the last one is far away. A state takes `state`
    /// bytes, 0 if none is needed; the states share what each token adds, `per_token` bytes. The tokens take at most half
    /// of the cache, and all states together half of what is left.
    pub fn distances(&self, tokens: usize, state: usize, per_token: usize) -> Vec<usize> {
        let reach = (self.limit / 2).checked_div(per_token).map_or(tokens, |most| tokens.min(most));
        let left = (self.limit - per_token * reach) / 2;
        let spacing = left.checked_div(state).and_then(|most| reach.checked_div(most));
        let Some(spacing) = spacing else { return Vec::new() };
        let spacing = spacing.max(LEAST_SPACING).next_multiple_of(GRID);
        (spacing..=reach).step_by(spacing).filter(|&at| at < tokens).collect()
    }

    /// The longest beginning of a prompt that the cache has.
    pub fn find(&mut self, prompt: &[u32], policy: &Policy) -> PrefixMatch {
        let (mut usable, mut shared): (Vec<(usize, usize)>, usize) = (Vec::new(), 0);
        for (i, entry) in self.entries.iter().enumerate() {
            if entry.prefix.text.bank().policy() != policy {
                continue;
            }
            let common = entry.prefix.common(prompt);
            shared = shared.max(common);
            usable.push((entry.prefix.usable(common, prompt.len()), i));
        }
        usable.retain(|&(tokens, _)| tokens >= SHORTEST);
        usable.sort_by(|a, b| b.cmp(a));
        let best = usable.into_iter().find_map(|(at, i)| Some((at, i, self.entries[i].prefix.at(at)?)));
        let tokens = best.as_ref().map_or(0, |&(tokens, ..)| tokens);
        // A state in the middle of a chunk may not be one that reading in long calls has; on the grid it always is.
        let branch = Some(shared / GRID * GRID).filter(|&at| at > tokens && at < prompt.len());
        let Some((_, used, text)) = best else { return PrefixMatch { text: None, tokens, branch } };
        self.clock += 1;
        self.entries[used].used = self.clock;
        // Earlier states of the same text are in use as well.
        let beginnings = self.entries.iter_mut().filter(|entry| prompt.starts_with(&entry.prefix.ids));
        beginnings.for_each(|entry| entry.used = self.clock);
        PrefixMatch { text: Some(text), tokens, branch }
    }

    /// Keeps a text whose tokens are `ids`.
    pub fn keep(&mut self, ids: &[u32], text: &Text, reason: Reason) {
        if ids.len() < SHORTEST || text.tokens() != ids.len() {
            return;
        }
        self.clock += 1;
        let policy = text.bank().policy();
        let same = |entry: &Entry| entry.prefix.ids == ids && entry.prefix.text.bank().policy() == policy;
        let mut reason = reason;
        if let Some(number) = self.entries.iter().position(same) {
            let entry = &mut self.entries[number];
            entry.used = self.clock;
            if reason == Reason::End {
                entry.reason = reason;
            }
            // It may have been kept without the logits after it.
            if !text.can_continue() || entry.prefix.text.can_continue() {
                return;
            }
            reason = entry.reason;
            self.drop_entry(number);
        }
        let prefix = CachedPrefix { ids: ids.to_vec(), text: text.clone() };
        let entry = Entry { parts: text.bank().parts().collect(), prefix, reason, used: self.clock };
        let bytes: usize = entry.parts.iter().map(|(_, bytes)| bytes).sum();
        if bytes + entry.own_bytes() > self.limit {
            return;
        }
        self.bytes += entry.own_bytes();
        for &(part, bytes) in &entry.parts {
            let owners = self.owners.entry(part).or_default();
            *owners += 1;
            if *owners == 1 {
                self.bytes += bytes;
            }
        }
        self.entries.push(entry);
        while self.bytes > self.limit {
            let worth = |entry: &Entry| match entry.reason {
                Reason::End => entry.used + LESS_WORTH,
                Reason::Distance => entry.used,
            };
            let Some(least) = (0..self.entries.len()).min_by_key(|&i| worth(&self.entries[i])) else { break };
            self.drop_entry(least);
        }
        #[cfg(test)]
        assert_eq!(self.bytes, self.counted());
    }

    /// The bytes, counted again.
    #[cfg(test)]
    fn counted(&self) -> usize {
        let parts: HashMap<usize, usize> = self.entries.iter().flat_map(|it| it.parts.clone()).collect();
        let own = self.entries.iter().map(Entry::own_bytes);
        own.sum::<usize>() + parts.values().sum::<usize>()
    }

    fn drop_entry(&mut self, number: usize) {
        let entry = self.entries.swap_remove(number);
        self.bytes -= entry.own_bytes();
        for (part, bytes) in entry.parts {
            if let Some(owners) = self.owners.get_mut(&part) {
                *owners -= 1;
                if *owners == 0 {
                    self.owners.remove(&part);
                    self.bytes -= bytes;
                }
            }
        }
    }
}

/// Whether a text can go back to each of its anchors, exactly.
pub fn goes_back(bank: &StateBank) -> bool {
    let Policy { storage, placement, retention, .. } = bank.policy();
    let exact = (Storage::F32, Placement::Periodic, Retention::All);
    (*storage, *placement, *retention) == exact && bank.can_roll_back()
}

impl CachedPrefix {
    /// How many first tokens it shares with a prompt.
    pub fn common(&self, prompt: &[u32]) -> usize {
        self.ids.iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }

    /// How many of the first `common` tokens, which a prompt of `prompt` tokens shares, it can continue from.
    pub fn usable(&self, common: usize, prompt: usize) -> usize {
        // The whole prompt needs the logits after it, or a token that is still to be read.
        let whole = common == self.ids.len() && (common < prompt || self.text.can_continue());
        if whole {
            return common;
        }
        let (bank, before) = (self.text.bank(), common.min(prompt - 1));
        let timeline = bank.timeline();
        if bank.can_truncate() {
            return before.min(timeline.position);
        }
        if !goes_back(bank) {
            return 0;
        }
        timeline.kept.iter().rev().map(|anchor| anchor.position).find(|&at| at <= before).unwrap_or(0)
    }

    /// The text of its first `tokens` tokens, if it is exact.
    pub fn at(&self, tokens: usize) -> Option<Text> {
        if tokens == self.ids.len() {
            return Some(self.text.clone());
        }
        let mut bank = self.text.bank().clone();
        if bank.truncate(tokens).ok()? {
            return Some(Text::new(bank).with_recent(&self.ids[..tokens]));
        }
        match bank.rollback_to(tokens) {
            Ok((anchor, Rollback::Exact)) if anchor.position == tokens => {
                Some(Text::new(bank).with_recent(&self.ids[..tokens]))
            }
            _ => None,
        }
    }
}

//! States of earlier texts, from which a prompt that begins alike continues.
//!
//! An entry is a text with all of its tokens. A prompt that begins with the whole of an entry continues from it; one
//! that shares only a part continues from the last anchor in that part, if the model keeps anchors and can be rolled
//! back to it exactly. A model without anchors cannot be rolled back; the place where two texts part is therefore
//! reported, so that the state there is kept for the next.
//!
//! What continues from an entry has the bits of a prompt that is read from its beginning.

use march_lm::anchors::{Placement, Policy, Retention, Storage};
use march_lm::generate::{GRID, Text};
use march_lm::memory::Rollback;

/// A prefix that is shorter is read again: that is faster than to look for it.
const SHORTEST: usize = 16;

/// A text with all of its tokens.
#[derive(Clone)]
pub struct CachedPrefix {
    /// The tokens.
    pub ids: Vec<u32>,
    /// The text.
    pub text: Text,
}

struct Entry {
    prefix: CachedPrefix,
    bytes: usize,
    /// When it was last used.
    used: u64,
}

/// The entries, the least recently used of which is dropped when there are too many bytes. Entries that share states
/// are counted as if they did not.
pub struct PrefixCache {
    entries: Vec<Entry>,
    limit: usize,
    bytes: usize,
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
        Self { entries: Vec::new(), limit, bytes: 0, clock: 0 }
    }

    /// Bytes of all entries.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The longest beginning of a prompt that the cache has.
    pub fn find(&mut self, prompt: &[u32], policy: &Policy) -> PrefixMatch {
        let (mut best, mut tokens, mut shared) = (None, 0, 0);
        for (i, entry) in self.entries.iter().enumerate() {
            if entry.prefix.text.bank().policy() != policy {
                continue;
            }
            let common = entry.prefix.common(prompt);
            let usable = entry.prefix.usable(common, prompt.len());
            shared = shared.max(common);
            if usable >= SHORTEST && usable > tokens {
                (best, tokens) = (Some(i), usable);
            }
        }
        // A state in the middle of a chunk may not be one that reading in long calls has; on the grid it always is.
        let branch = Some(shared / GRID * GRID).filter(|&branch| branch > tokens && branch < prompt.len());
        let Some(entry) = best.and_then(|i| self.entries.get_mut(i)) else {
            return PrefixMatch { text: None, tokens: 0, branch };
        };
        self.clock += 1;
        entry.used = self.clock;
        match entry.prefix.at(tokens) {
            Some(text) => PrefixMatch { text: Some(text), tokens, branch },
            None => {
                let branch = Some(shared / GRID * GRID).filter(|&at| at > 0 && at < prompt.len());
                PrefixMatch { text: None, tokens: 0, branch }
            }
        }
    }

    /// Keeps a text whose tokens are `ids`.
    pub fn keep(&mut self, ids: &[u32], text: &Text) {
        let bytes = text.bank().bytes() + size_of_val(ids);
        if bytes > self.limit || ids.len() < SHORTEST || text.tokens() != ids.len() {
            return;
        }
        self.clock += 1;
        let policy = text.bank().policy();
        let same =
            |entry: &&mut Entry| entry.prefix.ids == ids && entry.prefix.text.bank().policy() == policy;
        if let Some(entry) = self.entries.iter_mut().find(same) {
            entry.used = self.clock;
            return;
        }
        while self.bytes + bytes > self.limit {
            let oldest = (0..self.entries.len()).min_by_key(|&i| self.entries[i].used);
            let Some(oldest) = oldest else { break };
            self.bytes -= self.entries.swap_remove(oldest).bytes;
        }
        self.bytes += bytes;
        let prefix = CachedPrefix { ids: ids.to_vec(), text: text.clone() };
        self.entries.push(Entry { prefix, bytes, used: self.clock });
    }
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
        let bank = self.text.bank();
        let Policy { storage, placement, retention, .. } = bank.policy();
        if (*storage, *placement, *retention) != (Storage::F32, Placement::Periodic, Retention::All) {
            return 0;
        }
        let timeline = bank.timeline();
        let before = common.min(prompt - 1);
        timeline.kept.iter().rev().map(|anchor| anchor.position).find(|&at| at <= before).unwrap_or(0)
    }

    /// The text of its first `tokens` tokens, if it is exact.
    pub fn at(&self, tokens: usize) -> Option<Text> {
        if tokens == self.ids.len() {
            return Some(self.text.clone());
        }
        let mut bank = self.text.bank().clone();
        match bank.rollback_to(tokens) {
            Ok((anchor, Rollback::Exact)) if anchor.position == tokens => {
                Some(Text::new(bank).with_recent(&self.ids[..tokens]))
            }
            _ => None,
        }
    }
}

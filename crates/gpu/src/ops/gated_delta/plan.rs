//! How a call is split: into chunks of at most [`CHUNK`] tokens that end at boundaries, for the backward pass; and into
//! several dispatches, for devices that limit what one may do.

use std::ops::Range;

use march_engine::ops::gated_delta::GatedDeltaOptions;

use super::{CHUNK, Sizes};

/// Chunks of a call, as the kernels read them.
pub(super) struct Plan {
    /// Number of chunks.
    pub chunks: usize,
    /// The first chunk of each batch row and the number of chunks, then (start, end, boundary) of each chunk, where
    /// boundary − 1 is the index of the boundary state at its end; 0 if there is none.
    pub list: Vec<u32>,
}

impl Plan {
    pub fn new(sizes: &Sizes, options: &GatedDeltaOptions) -> Self {
        let mut first = Vec::with_capacity(sizes.batch + 1);
        let mut chunks = Vec::new();
        let mut boundary = 0;
        for row in 0..sizes.batch {
            first.push((chunks.len() / 3) as u32);
            let mut ends = options.boundaries.get(row).map_or(&[][..], Vec::as_slice).iter().peekable();
            let mut start = 0;
            while start < sizes.tokens {
                let mut end = sizes.tokens.min(start + CHUNK);
                let mut index = 0;
                if let Some(&at) = ends.next_if(|&&at| at <= end) {
                    end = at;
                    boundary += 1;
                    index = boundary;
                }
                chunks.extend([start as u32, end as u32, index]);
                start = end;
            }
        }
        let count = chunks.len() / 3;
        first.push(count as u32);
        first.extend(chunks);
        Self { chunks: count, list: first }
    }
}

/// Turns that all loops of an invocation may make in one dispatch. lavapipe ends every loop after 65,535 turns in total,
/// without an error; and graphics drivers stop dispatches that take seconds. Some turns are left for what is not counted.
pub(crate) const TURNS: usize = 50_000;

impl Sizes {
    /// Ranges of tokens for one dispatch of a scan each, at least one. `plan` is `None` for a scan without chunks.
    pub fn segments(&self, plan: Option<&Plan>) -> Vec<Range<usize>> {
        let (fours, tile) = (self.key_dim.div_ceil(4), self.tile());
        let token = 4 + 2 * fours + (4 + 2 * fours + tile * fours / self.columns()).div_ceil(tile);
        let mut ends = vec![false; self.tokens + 1];
        if let Some(plan) = plan {
            plan.list[self.batch + 1..].chunks_exact(3).for_each(|chunk| ends[chunk[1] as usize] = true);
        }
        let mut list = Vec::new();
        let (mut begin, mut turns) = (0, 0);
        for t in 1..=self.tokens {
            let cost = token + if ends[t] { 2 * self.key_dim } else { 0 };
            if turns + cost > TURNS && t - 1 > begin {
                list.push(begin..t - 1);
                (begin, turns) = (t - 1, 0);
            }
            turns += cost;
        }
        list.push(begin..self.tokens);
        list
    }
}

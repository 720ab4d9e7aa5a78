//! How a call is split into chunks: every [`CHUNK`] tokens, and at every boundary.

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

//! The plan of a call as indices for the kernels: tiles of tokens, and for each anchor the tiles that see it.

use march_engine::ops::anchor_read::{ReadPlan, Visible};

/// Words of a tile in the plan; see `common.wgsl`.
const TILE_WORDS: usize = 6;

/// Position of an anchor that follows from the tiles' runs; see `anchors.wgsl`.
const ANY: u32 = u32::MAX;

/// A tile: consecutive tokens that see the same anchors.
struct Tile {
    row: usize,
    count: usize,
    /// The segment that it belongs to; `None` if its tokens see nothing.
    segment: Option<usize>,
    /// Rows of the matrix of weights before this tile's, within its slice.
    matrix: usize,
}

/// The tiles of a plan. They cover all tokens of the call, also those that see nothing.
pub(super) struct Tiles<'a> {
    plan: &'a ReadPlan,
    tiles: Vec<Tile>,
}

impl<'a> Tiles<'a> {
    /// Cuts the segments of a plan for `rows` tokens into tiles of up to `size` tokens.
    pub fn new(plan: &'a ReadPlan, rows: usize, size: usize) -> Self {
        let mut tiles = Vec::with_capacity(rows.div_ceil(size) + plan.segments.len());
        let mut cut = |from: usize, to: usize, segment| {
            for row in (from..to).step_by(size) {
                tiles.push(Tile { row, count: size.min(to - row), segment, matrix: 0 });
            }
        };
        let mut end = 0;
        for (i, segment) in plan.segments.iter().enumerate() {
            cut(end, segment.start, None);
            end = segment.start + segment.len;
            cut(segment.start, end, Some(i));
        }
        cut(end, rows, None);
        Self { plan, tiles }
    }

    pub fn len(&self) -> usize {
        self.tiles.len()
    }

    fn visible(&self, tile: &Tile) -> usize {
        tile.segment.map_or(0, |i| self.plan.segments[i].visible.len())
    }

    /// Cuts the tiles into slices whose matrix of weights has at most `most` rows of one anchor for one tile and head,
    /// but at least one tile each. Returns the end of each slice and the rows of the largest.
    pub fn slices(&mut self, heads: usize, most: usize) -> (Vec<usize>, usize) {
        let (mut ends, mut used, mut largest) = (Vec::new(), 0, 0);
        for i in 0..self.tiles.len() {
            let rows = heads * self.visible(&self.tiles[i]);
            if used > 0 && used + rows > most {
                ends.push(i);
                used = 0;
            }
            self.tiles[i].matrix = used;
            used += rows;
            largest = largest.max(used);
        }
        ends.push(self.tiles.len());
        (ends, largest)
    }

    /// Records of the tiles, followed by the lists of anchors.
    pub fn words(&self) -> Vec<u32> {
        let mut words = Vec::with_capacity(self.tiles.len() * TILE_WORDS);
        let mut end = self.tiles.len() * TILE_WORDS;
        let starts: Vec<usize> = (self.plan.segments.iter())
            .map(|segment| match &segment.visible {
                Visible::Run(run) => run.start,
                Visible::List(list) => {
                    end += list.len();
                    end - list.len()
                }
            })
            .collect();
        for tile in &self.tiles {
            let (start, listed) = tile.segment.map_or((0, false), |i| {
                (starts[i], matches!(self.plan.segments[i].visible, Visible::List(_)))
            });
            let visible = self.visible(tile);
            let numbers = [tile.row, tile.count, start, visible, usize::from(listed), tile.matrix];
            words.extend(numbers.map(|n| n as u32));
        }
        for segment in &self.plan.segments {
            if let Visible::List(list) = &segment.visible {
                words.extend(list.iter().map(|&m| m as u32));
            }
        }
        words
    }

    /// For each anchor the entries of `anchors.wgsl`, for the tiles in `from..to`.
    pub fn seen(&self, anchors: usize, from: usize, to: usize) -> Vec<u32> {
        let mut entries: Vec<Vec<[u32; 3]>> = vec![Vec::new(); anchors];
        let mut i = from;
        while i < to {
            let segment = self.tiles[i].segment;
            let count = self.tiles[i..to].iter().take_while(|tile| tile.segment == segment).count();
            match segment.map(|s| &self.plan.segments[s].visible) {
                None => {}
                Some(Visible::Run(run)) => {
                    for list in &mut entries[run.clone()] {
                        match list.last_mut() {
                            Some([first, tiles, ANY]) if *first + *tiles == i as u32 => {
                                *tiles += count as u32
                            }
                            _ => list.push([i as u32, count as u32, ANY]),
                        }
                    }
                }
                Some(Visible::List(list)) => {
                    for (position, &m) in list.iter().enumerate() {
                        entries[m].push([i as u32, count as u32, position as u32]);
                    }
                }
            }
            i += count;
        }
        flatten(&entries)
    }

    /// For each anchor the ranges of tokens that see it, as (first token, tokens).
    pub fn seen_rows(plan: &ReadPlan, anchors: usize) -> Vec<u32> {
        let mut entries: Vec<Vec<[u32; 2]>> = vec![Vec::new(); anchors];
        for segment in plan.segments.iter().filter(|segment| segment.len > 0) {
            for m in segment.visible.iter() {
                match entries[m].last_mut() {
                    Some([first, rows]) if *first + *rows == segment.start as u32 => {
                        *rows += segment.len as u32;
                    }
                    _ => entries[m].push([segment.start as u32, segment.len as u32]),
                }
            }
        }
        flatten(&entries)
    }
}

/// Where each anchor's entries start, one more for the end of the last, then the entries.
fn flatten<const N: usize>(entries: &[Vec<[u32; N]>]) -> Vec<u32> {
    let mut at = entries.len() + 1;
    let mut words = vec![at as u32];
    for list in entries {
        at += N * list.len();
        words.push(at as u32);
    }
    words.extend(entries.iter().flatten().flatten());
    words
}

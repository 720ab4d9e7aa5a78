//! Read plan: which anchors each token may read, as segments of tokens that share one list of visible anchors.

use std::ops::Range;

use crate::error::{Result, bad_value};

/// Anchors visible to a segment, oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Visible {
    /// A range of consecutive anchors.
    Run(Range<usize>),
    /// Arbitrary anchors in ascending order.
    List(Vec<usize>),
}

impl Visible {
    /// Number of visible anchors.
    pub fn len(&self) -> usize {
        match self {
            Self::Run(run) => run.len(),
            Self::List(list) => list.len(),
        }
    }

    /// Whether no anchor is visible.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over the visible anchors, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..self.len()).map(|i| self.get(i))
    }

    /// The `i`-th oldest visible anchor, as a row index into the anchor tensors.
    pub fn get(&self, i: usize) -> usize {
        match self {
            Self::Run(run) => run.start + i,
            Self::List(list) => list[i],
        }
    }
}

/// Consecutive tokens with the same visible anchors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First token, as a row index into the flattened token tensors.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
    /// Anchors visible to these tokens.
    pub visible: Visible,
}

/// Visible anchors of every token of a call. Tokens outside all segments see no anchors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadPlan {
    /// Non-overlapping segments in ascending token order.
    pub segments: Vec<Segment>,
}

impl ReadPlan {
    /// Plan in which every token sees all earlier anchors of its batch row. `boundaries` holds one list per row in
    /// the format that `gated_delta` takes, and anchors are numbered in the order in which it returns them.
    pub fn from_boundaries(tokens: usize, boundaries: &[Vec<usize>]) -> Self {
        let mut segments = Vec::new();
        let mut first = 0;
        for (row, list) in boundaries.iter().enumerate() {
            for (m, &boundary) in list.iter().enumerate() {
                let end = list.get(m + 1).copied().unwrap_or(tokens).min(tokens);
                if boundary < end {
                    let visible = Visible::Run(first..first + m + 1);
                    segments.push(Segment { start: row * tokens + boundary, len: end - boundary, visible });
                }
            }
            first += list.len();
        }
        Self { segments }
    }

    /// Rejects segments or anchors that are out of order or out of bounds.
    #[doc(hidden)]
    pub fn check(&self, operation: &'static str, rows: usize, anchors: usize) -> Result<()> {
        let mut end = 0;
        for (i, segment) in self.segments.iter().enumerate() {
            let last = segment.start.checked_add(segment.len);
            if segment.start < end || last.is_none_or(|last| last > rows) {
                return bad_value(
                    operation,
                    format!(
                        "segment {i} (tokens {}, {} of them) must start at {end} or later and end within {rows}",
                        segment.start, segment.len
                    ),
                );
            }
            end = segment.start + segment.len;
            let fits = match &segment.visible {
                Visible::Run(run) => run.start <= run.end && run.end <= anchors,
                Visible::List(list) => {
                    list.windows(2).all(|w| w[0] < w[1]) && list.last().is_none_or(|&last| last < anchors)
                }
            };
            if !fits {
                return bad_value(
                    operation,
                    format!("segment {i} must list anchors in ascending order, each below {anchors}"),
                );
            }
        }
        Ok(())
    }

    /// Partitions the segments into groups such that no anchor is visible to two groups (in training, the batch
    /// rows). Groups, and the segments within a group, are in ascending order.
    #[doc(hidden)]
    pub fn groups(&self, anchors: usize) -> Vec<Vec<usize>> {
        let mut owner: Vec<Option<usize>> = vec![None; anchors];
        let mut root: Vec<usize> = (0..self.segments.len()).collect();
        fn find(root: &mut [usize], mut i: usize) -> usize {
            while root[i] != i {
                root[i] = root[root[i]];
                i = root[i];
            }
            i
        }
        for (i, segment) in self.segments.iter().enumerate() {
            for v in (0..segment.visible.len()).rev() {
                let anchor = segment.visible.get(v);
                match owner[anchor] {
                    None => owner[anchor] = Some(i),
                    Some(other) => {
                        let (a, b) = (find(&mut root, i), find(&mut root, other));
                        root[a.max(b)] = a.min(b);
                    }
                }
            }
        }
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut place: Vec<Option<usize>> = vec![None; self.segments.len()];
        for i in 0..self.segments.len() {
            let r = find(&mut root, i);
            let at = *place[r].get_or_insert_with(|| {
                groups.push(Vec::new());
                groups.len() - 1
            });
            groups[at].push(i);
        }
        groups
    }
}

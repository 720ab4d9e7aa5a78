//! Where anchors are placed, which of them are kept, and which of those each token sees.
//!
//! Boundary m (from 1) is after text token m·C; the token at position t (from 0) sees anchors 1 ..= floor(t / C)
//! that are still kept. All of this is decided before any layer runs and is the same for all layers.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use march_engine::ops::anchor_read::{ReadPlan, Segment, Visible};
use march_engine::ops::gated_delta::CHUNK_TOKENS;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Which anchors outlive the next boundary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Retention {
    /// Every anchor.
    #[default]
    All,
    /// With c complete intervals c, c & (c − 1), …: a number of anchors that is logarithmic in the text.
    Fenwick,
}

impl Retention {
    /// Whether the anchor with number `ordinal` is kept once `complete` intervals are.
    fn keeps(self, ordinal: usize, complete: usize) -> bool {
        match self {
            Self::All => true,
            Self::Fenwick => {
                // c with its lowest bits cleared one by one: what is left of c above `ordinal`'s lowest bit.
                let low = ordinal & ordinal.wrapping_neg();
                ordinal > 0 && complete & !(low - 1) == ordinal
            }
        }
    }
}

impl FromStr for Retention {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            "fenwick" => Ok(Self::Fenwick),
            _ => Err(format!("is `{text}`; it must be `all` or `fenwick`")),
        }
    }
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "all",
            Self::Fenwick => "fenwick",
        })
    }
}

/// How anchors are placed, kept and read. Independent of how a checkpoint was trained.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// C, text tokens from one anchor to the next; none for no anchors.
    pub interval: Option<usize>,
    /// K, how many anchors a token reads; none is all that it sees.
    pub top_k: Option<usize>,
    /// Which anchors are kept.
    pub retention: Retention,
}

impl Policy {
    /// Refuses an interval or a K of 0.
    pub fn check(&self) -> Result<()> {
        let refuse = |message: &str| Err(Error::Request(message.into()));
        match self {
            Self { interval: Some(0), .. } => refuse("an anchor interval of 0 tokens; it must be at least 1"),
            Self { top_k: Some(0), .. } => {
                refuse("top-K routing with K = 0; it must be at least 1, or dense routing")
            }
            _ => Ok(()),
        }
    }

    /// Anchors that are kept after `tokens` tokens.
    pub fn kept_after(&self, tokens: usize) -> usize {
        let complete = self.interval.map_or(0, |interval| tokens / interval.max(1));
        match self.retention {
            Retention::All => complete,
            Retention::Fenwick => complete.count_ones() as usize,
        }
    }
}

/// An anchor's place in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Anchor {
    /// m, from 1.
    pub ordinal: usize,
    /// b_m, text tokens before it.
    pub position: usize,
}

/// How far one sequence has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Text tokens so far.
    pub position: usize,
    /// Anchors so far, kept or not.
    pub complete: usize,
    /// Those that are kept, oldest first.
    pub kept: Vec<Anchor>,
    /// Boundaries, kept or not, since the chunk began that the position is in: the next call cuts the chunk there
    /// again, so that its bits do not depend on where calls end.
    pub recent: Vec<usize>,
}

/// What one call does with anchors, for the rows that go through the mixers together. Anchors are numbered: those
/// kept before the call first, then the call's new ones, row by row.
#[derive(Clone, Debug, Default)]
pub struct AnchorPlan {
    /// Text tokens before the call.
    pub position: usize,
    /// Text tokens of the call, in each row.
    pub tokens: usize,
    /// For each row its boundaries, counted from the call's first token.
    pub boundaries: Arc<Vec<Vec<usize>>>,
    /// Earlier boundaries in the chunk that the call continues, counted from that chunk's first token.
    pub replay: Vec<usize>,
    /// Where these rows' new anchors stand in the call's anchor stream.
    pub new: Range<usize>,
    /// What each token sees.
    pub read: Arc<ReadPlan>,
    /// What each token sees of that where all scores are equal: with top-K the K newest, else the same.
    pub read_newest: Arc<ReadPlan>,
    /// K.
    pub top_k: Option<usize>,
    /// Numbers of the anchors that are kept after the call.
    pub keep: Vec<usize>,
    /// The ordinal of each numbered anchor of the first row.
    pub ordinals: Vec<usize>,
}

/// One row's part of a plan.
struct Walk {
    boundaries: Vec<usize>,
    /// First token, tokens, and the numbers of the anchors they see.
    segments: Vec<(usize, usize, Vec<usize>)>,
    keep: Vec<usize>,
    ordinals: Vec<usize>,
    after: Timeline,
}

/// Follows one row over `tokens` tokens. Without `end`, an anchor at the very end is left out.
fn walk(policy: &Policy, start: &Timeline, tokens: usize, end: bool) -> Walk {
    let stop = start.position + tokens;
    let mut boundaries = Vec::new();
    let mut segments = Vec::new();
    let mut anchors = start.kept.clone();
    let mut kept: Vec<usize> = (0..anchors.len()).collect();
    let (mut complete, mut position) = (start.complete, start.position);
    while position < stop {
        let next = policy.interval.map_or(usize::MAX, |c| (position / c + 1).saturating_mul(c));
        let until = next.min(stop);
        if !kept.is_empty() {
            segments.push((position - start.position, until - position, kept.clone()));
        }
        if next < stop || (next == stop && end) {
            complete += 1;
            boundaries.push(next - start.position);
            kept.push(anchors.len());
            anchors.push(Anchor { ordinal: complete, position: next });
            kept.retain(|&number| policy.retention.keeps(anchors[number].ordinal, complete));
        }
        position = until;
    }
    let chunk = stop / CHUNK_TOKENS * CHUNK_TOKENS;
    let new = boundaries.iter().map(|boundary| start.position + boundary);
    let recent = start.recent.iter().copied().chain(new).filter(|&b| b > chunk).collect();
    let kept_anchors = kept.iter().map(|&n| anchors[n]).collect();
    let after = Timeline { position: stop, complete, kept: kept_anchors, recent };
    let ordinals = anchors.iter().map(|anchor| anchor.ordinal).collect();
    Walk { boundaries, segments, keep: kept, ordinals, after }
}

/// Numbers as the reader wants them, a run where they are consecutive.
fn visible(numbers: &[usize], offset: usize) -> Visible {
    match (numbers.first(), numbers.last()) {
        (Some(&first), Some(&last)) if last - first + 1 == numbers.len() => {
            Visible::Run(offset + first..offset + last + 1)
        }
        _ => Visible::List(numbers.iter().map(|number| offset + number).collect()),
    }
}

impl AnchorPlan {
    /// `rows` sequences of `tokens` tokens from their beginning: what training computes. An anchor at the very end
    /// is read by nobody and left out.
    pub fn fresh(policy: &Policy, rows: usize, tokens: usize) -> Self {
        let row = walk(policy, &Timeline::default(), tokens, false);
        let count = row.boundaries.len();
        Self { new: 0..rows * count, ..Self::of(policy, &row, 0, rows, tokens, count) }
    }

    /// The next `tokens` tokens of one sequence, and where it stands after them. `first_new` anchors of the call's
    /// stream belong to earlier rows.
    pub fn next(policy: &Policy, timeline: &Timeline, tokens: usize, first_new: usize) -> (Self, Timeline) {
        let row = walk(policy, timeline, tokens, true);
        let plan = Self {
            new: first_new..first_new + row.boundaries.len(),
            replay: timeline.recent.iter().map(|b| b % CHUNK_TOKENS).collect(),
            ..Self::of(policy, &row, timeline.position, 1, tokens, 0)
        };
        (plan, row.after)
    }

    /// The plan of `rows` rows that all walk alike, each with `stride` anchors of its own.
    fn of(policy: &Policy, row: &Walk, position: usize, rows: usize, tokens: usize, stride: usize) -> Self {
        let read = |newest: Option<usize>| {
            let segments = (0..rows).flat_map(|r| {
                row.segments.iter().map(move |(start, len, numbers)| {
                    let skip = newest.map_or(0, |k| numbers.len().saturating_sub(k));
                    let visible = visible(&numbers[skip..], r * stride);
                    Segment { start: r * tokens + start, len: *len, visible }
                })
            });
            Arc::new(ReadPlan { segments: segments.collect() })
        };
        let all = read(None);
        Self {
            position,
            tokens,
            boundaries: Arc::new(vec![row.boundaries.clone(); rows]),
            replay: Vec::new(),
            new: 0..0,
            read_newest: if policy.top_k.is_some() { read(policy.top_k) } else { Arc::clone(&all) },
            read: all,
            top_k: policy.top_k,
            keep: row.keep.clone(),
            ordinals: row.ordinals.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fenwick_clears_the_lowest_bits() {
        for complete in 1usize..200 {
            let mut want = Vec::new();
            let mut c = complete;
            while c > 0 {
                want.push(c);
                c &= c - 1;
            }
            want.reverse();
            let got: Vec<usize> = (1..=complete).filter(|&m| Retention::Fenwick.keeps(m, complete)).collect();
            assert_eq!(got, want, "{complete} intervals");
        }
    }

    /// The visible ordinals of every token, from a plan of one row.
    fn seen(plan: &AnchorPlan) -> Vec<Vec<usize>> {
        let mut list = vec![Vec::new(); plan.tokens];
        for segment in &plan.read.segments {
            for token in segment.start..segment.start + segment.len {
                list[token] =
                    (0..segment.visible.len()).map(|i| plan.ordinals[segment.visible.get(i)]).collect();
            }
        }
        list
    }

    #[test]
    fn cuts_change_nothing() {
        for retention in [Retention::All, Retention::Fenwick] {
            for interval in [1, 3, 7, 20] {
                let policy = Policy { interval: Some(interval), top_k: None, retention };
                let whole = seen(&AnchorPlan::fresh(&policy, 1, 61));
                for (t, ordinals) in whole.iter().enumerate() {
                    let complete = t / interval;
                    let want: Vec<usize> = (1..=complete).filter(|&m| retention.keeps(m, complete)).collect();
                    assert_eq!(*ordinals, want, "{policy:?}, token {t}");
                }
                for cut in [1, 2, 5, 20, 60] {
                    let (mut timeline, mut parts) = (Timeline::default(), Vec::new());
                    while timeline.position < 61 {
                        let tokens = cut.min(61 - timeline.position);
                        let (plan, after) = AnchorPlan::next(&policy, &timeline, tokens, 0);
                        parts.extend(seen(&plan));
                        assert_eq!(plan.keep.len(), after.kept.len());
                        timeline = after;
                    }
                    assert_eq!(parts, whole, "{policy:?}, calls of {cut}");
                    assert_eq!(timeline.kept.len(), policy.kept_after(61));
                }
            }
        }
    }

    #[test]
    fn rows_have_anchors_of_their_own() {
        let policy = Policy { interval: Some(4), top_k: Some(1), ..Policy::default() };
        let plan = AnchorPlan::fresh(&policy, 2, 12);
        assert_eq!(plan.new, 0..4);
        assert_eq!(*plan.boundaries, [vec![4, 8], vec![4, 8]]);
        let runs = |plan: &ReadPlan| plan.segments.iter().map(|s| s.visible.clone()).collect::<Vec<_>>();
        let run = |a, b| Visible::Run(a..b);
        assert_eq!(runs(&plan.read), [run(0, 1), run(0, 2), run(2, 3), run(2, 4)]);
        assert_eq!(runs(&plan.read_newest), [run(0, 1), run(1, 2), run(2, 3), run(3, 4)]);
        assert!(AnchorPlan::fresh(&Policy::default(), 2, 12).read.segments.is_empty());
    }
}

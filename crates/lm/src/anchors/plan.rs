//! The effect of the anchor settings on one call: its boundaries, and what each token sees.

use std::ops::Range;
use std::sync::Arc;

use march_engine::ops::anchor_read::{ReadPlan, Segment, Storage, Visible};
use serde::{Deserialize, Serialize};

use super::{Anchor, Evictions, Policy, Timeline};
use crate::error::{Error, Result};

/// The anchor plan of one call, for the rows that pass through the mixers together. Anchors are numbered: those kept
/// before the call come first, then the call's new ones, row by row.
#[derive(Clone, Debug, Default)]
pub struct AnchorPlan {
    /// The boundaries of each row, relative to the call's first token.
    pub boundaries: Arc<Vec<Vec<usize>>>,
    /// Boundaries shortly before the call, kept or not, as counts of text tokens before them. The recurrence recomputes
    /// its last chunk and cuts it at these boundaries, as it did before.
    pub recent: Vec<usize>,
    /// Text tokens from the last boundary, or from the start of the text, to the call's first token.
    pub since: usize,
    /// The range of these rows' new anchors in the call's anchor stream.
    pub new: Range<usize>,
    /// The anchors that each token sees.
    pub read: Arc<ReadPlan>,
    /// The anchors that each token reads where all scores are equal: the K newest with top-K, otherwise the same as
    /// `read`.
    pub read_newest: Arc<ReadPlan>,
    /// `read` and `read_newest` per layer, if layers differ.
    pub read_by_layer: Vec<[Arc<ReadPlan>; 2]>,
    /// K, the number of anchors that a token reads.
    pub top_k: Option<usize>,
    /// Numbers of the anchors that are kept after the call.
    pub keep: Vec<usize>,
    /// The ordinal of each numbered anchor of the first row.
    pub ordinals: Vec<usize>,
    /// The new anchors of the first row.
    pub placed: Vec<Anchor>,
    /// The precision of kept states.
    pub storage: Storage,
    /// Memory budget in bytes for the anchors of all layers, if each layer decides what it keeps. Such a call sees what
    /// was kept before it and has at most one boundary, at its end.
    pub budget: Option<usize>,
    /// Whether layers record what they drop.
    pub record: bool,
}

/// The decisions of a bank, so that a forward pass can replay them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recording {
    /// Text tokens before each anchor.
    pub boundaries: Vec<usize>,
    /// What each layer dropped, if there is a budget.
    pub evictions: Vec<Evictions>,
}

/// The part of a plan that belongs to one row.
struct Walk {
    boundaries: Vec<usize>,
    /// First token, number of tokens, and the numbers of the anchors that they see.
    segments: Vec<(usize, usize, Vec<usize>)>,
    keep: Vec<usize>,
    anchors: Vec<Anchor>,
    after: Timeline,
}

/// Follows one row over `tokens` tokens with anchors at `boundaries`. `evictions` lists what a layer dropped in
/// addition to what the policy drops; `chunk` is the device's chunk length.
fn walk(
    policy: &Policy,
    start: &Timeline,
    tokens: usize,
    boundaries: &[usize],
    evictions: &[(usize, Vec<usize>)],
    chunk: usize,
) -> Walk {
    let stop = start.position + tokens;
    let mut segments = Vec::new();
    let mut anchors = start.kept.clone();
    let mut kept: Vec<usize> = (0..anchors.len()).collect();
    let (mut complete, mut position) = (start.complete, start.position);
    for boundary in boundaries.iter().copied().map(Some).chain([None]) {
        let until = boundary.unwrap_or(stop);
        if !kept.is_empty() && position < until {
            segments.push((position - start.position, until - position, kept.clone()));
        }
        position = until;
        if boundary.is_some() {
            complete += 1;
            kept.push(anchors.len());
            anchors.push(Anchor { ordinal: complete, position });
            let gone = evictions.binary_search_by_key(&complete, |(at, _)| *at);
            let gone = gone.map_or(&[][..], |at| &evictions[at].1);
            kept.retain(|&number| {
                let ordinal = anchors[number].ordinal;
                policy.retention.keeps(ordinal, complete) && !gone.contains(&ordinal)
            });
        }
    }
    let chunk_start = stop / chunk.max(1) * chunk;
    let recent = start.recent.iter().chain(boundaries).copied().filter(|&b| b > chunk_start).collect();
    let mut recorded = start.boundaries.clone();
    if let Some(recorded) = &mut recorded {
        recorded.extend(boundaries);
    }
    let after = Timeline {
        position: stop,
        complete,
        kept: kept.iter().map(|&n| anchors[n]).collect(),
        recent,
        usual_movement: start.usual_movement,
        boundaries: recorded,
    };
    let boundaries = boundaries.iter().map(|boundary| boundary - start.position).collect();
    Walk { boundaries, segments, keep: kept, anchors, after }
}

/// Anchor numbers in the reader's form: a range if they are consecutive.
fn visible(numbers: &[usize], offset: usize) -> Visible {
    match (numbers.first(), numbers.last()) {
        (Some(&first), Some(&last)) if last - first + 1 == numbers.len() => {
            Visible::Run(offset + first..offset + last + 1)
        }
        _ => Visible::List(numbers.iter().map(|number| offset + number).collect()),
    }
}

/// What the tokens see in rows that each have their own anchors, optionally only the `newest` of them.
fn read_plan(rows: &[Walk], tokens: usize, newest: Option<usize>) -> Arc<ReadPlan> {
    let (mut segments, mut offset) = (Vec::new(), 0);
    for (r, row) in rows.iter().enumerate() {
        for (start, len, numbers) in &row.segments {
            let skip = newest.map_or(0, |k| numbers.len().saturating_sub(k));
            let visible = visible(&numbers[skip..], offset);
            segments.push(Segment { start: r * tokens + start, len: *len, visible });
        }
        offset += row.anchors.len();
    }
    Arc::new(ReadPlan { segments })
}

/// A plan in which every token of one row sees the `newest` of `count` anchors.
fn newest_of(count: usize, newest: usize, tokens: usize) -> Arc<ReadPlan> {
    let visible = Visible::Run(count - newest.min(count)..count);
    let segment = Segment { start: 0, len: tokens, visible };
    Arc::new(ReadPlan { segments: if count > 0 { vec![segment] } else { Vec::new() } })
}

impl AnchorPlan {
    /// A plan for `rows` sequences of `tokens` tokens from their beginning, with periodic anchors, as in training. An
    /// anchor at the very end is omitted because no token reads it.
    pub fn fresh(policy: &Policy, rows: usize, tokens: usize) -> Self {
        let boundaries = policy.periodic(0, tokens.saturating_sub(1));
        let row = || walk(policy, &Timeline::default(), tokens, &boundaries, &[], 1);
        Self::of(policy, &(0..rows).map(|_| row()).collect::<Vec<_>>(), tokens)
    }

    /// A plan for sequences from their beginning whose anchors were recorded, one recording per row, in a model of
    /// `layers` layers.
    pub fn replayed(policy: &Policy, rows: &[Recording], tokens: usize, layers: usize) -> Result<Self> {
        rows.iter().try_for_each(|row| row.check(policy, layers))?;
        let walks = |layer: Option<usize>| -> Vec<Walk> {
            let walk = |row: &Recording| {
                let end = row.boundaries.partition_point(|&boundary| boundary < tokens);
                let evictions =
                    layer.and_then(|layer| row.evictions.get(layer)).map_or(&[][..], Vec::as_slice);
                walk(policy, &Timeline::default(), tokens, &row.boundaries[..end], evictions, 1)
            };
            rows.iter().map(walk).collect()
        };
        let mut plan = Self::of(policy, &walks(None), tokens);
        if policy.budget().is_some() {
            let reads = |layer| {
                let walks = walks(Some(layer));
                [read_plan(&walks, tokens, None), read_plan(&walks, tokens, policy.top_k)]
            };
            plan.read_by_layer = (0..layers).map(reads).collect();
        }
        Ok(plan)
    }

    /// A plan for the next `tokens` tokens of one sequence with anchors at `boundaries`, and the sequence's timeline
    /// after them. The first `first_new` anchors of the call's stream belong to earlier rows.
    #[doc(hidden)]
    pub fn next(
        policy: &Policy,
        timeline: &Timeline,
        tokens: usize,
        boundaries: &[usize],
        first_new: usize,
        chunk: usize,
    ) -> (Self, Timeline) {
        let row = walk(policy, timeline, tokens, boundaries, &[], chunk);
        let plan = Self {
            new: first_new..first_new + boundaries.len(),
            recent: timeline.recent.clone(),
            since: timeline.since_boundary(),
            placed: row.anchors[timeline.kept.len()..].to_vec(),
            storage: policy.storage,
            budget: policy.budget(),
            record: timeline.boundaries.is_some(),
            ..Self::of(policy, std::slice::from_ref(&row), tokens)
        };
        (plan, row.after)
    }

    /// A plan for the next `tokens` tokens of one sequence without a boundary, which is what most decoding steps are.
    /// It lists nothing that grows with the number of anchors, so `keep` and `ordinals` are empty. The caller then only
    /// advances the timeline ([`Timeline::advance`]).
    #[doc(hidden)]
    pub fn quiet(policy: &Policy, timeline: &Timeline, tokens: usize, first_new: usize) -> Self {
        let count = timeline.kept.len();
        Self {
            boundaries: Arc::new(vec![Vec::new()]),
            recent: timeline.recent.clone(),
            since: timeline.since_boundary(),
            new: first_new..first_new,
            read: newest_of(count, count, tokens),
            read_newest: newest_of(count, policy.top_k.unwrap_or(count), tokens),
            top_k: policy.top_k,
            storage: policy.storage,
            budget: policy.budget(),
            record: timeline.boundaries.is_some(),
            ..Self::default()
        }
    }

    fn of(policy: &Policy, rows: &[Walk], tokens: usize) -> Self {
        let read = read_plan(rows, tokens, None);
        let newest = |k| read_plan(rows, tokens, Some(k));
        Self {
            boundaries: Arc::new(rows.iter().map(|row| row.boundaries.clone()).collect()),
            new: 0..rows.iter().map(|row| row.boundaries.len()).sum(),
            read_newest: policy.top_k.map_or_else(|| Arc::clone(&read), newest),
            read,
            top_k: policy.top_k,
            keep: rows.first().map_or(Vec::new(), |row| row.keep.clone()),
            ordinals: rows.first().map_or(Vec::new(), |row| row.anchors.iter().map(|a| a.ordinal).collect()),
            ..Self::default()
        }
    }

    /// This plan for a layer that decided by itself to keep the anchors `kept`: every token sees all of them.
    pub(crate) fn seeing(&self, kept: impl ExactSizeIterator<Item = Anchor>, tokens: usize) -> Self {
        let count = kept.len();
        Self {
            read: newest_of(count, count, tokens),
            read_newest: newest_of(count, self.top_k.unwrap_or(count), tokens),
            ordinals: kept.chain(self.placed.iter().copied()).map(|anchor| anchor.ordinal).collect(),
            ..self.clone()
        }
    }

    /// What the tokens see in one layer, and how many of those anchors they read. With `equal_scores` the newest K are
    /// chosen here instead of by comparing scores, because the order of equal scores would depend on rounding.
    pub fn read_in(&self, layer: usize, equal_scores: bool) -> (&Arc<ReadPlan>, Option<usize>) {
        let own = self.read_by_layer.get(layer);
        match equal_scores {
            true => (own.map_or(&self.read_newest, |[_, newest]| newest), None),
            false => (own.map_or(&self.read, |[all, _]| all), self.top_k),
        }
    }
}

impl Recording {
    /// Rejects lists that no bank writes.
    fn check(&self, policy: &Policy, layers: usize) -> Result<()> {
        let refuse = |message: String| Err(Error::Request(format!("a recording of anchors {message}")));
        let ascend = self.boundaries.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascend || self.boundaries.first() == Some(&0) {
            return refuse("must have ascending boundaries, all above 0".into());
        }
        if policy.budget().is_some() && self.evictions.len() != layers {
            let count = self.evictions.len();
            return refuse(format!("has evictions of {count} layers; the model has {layers}"));
        }
        for (layer, list) in self.evictions.iter().enumerate() {
            if !list.windows(2).all(|pair| pair[0].0 < pair[1].0) {
                return refuse(format!("must have the evictions of layer {layer} in ascending order"));
            }
        }
        Ok(())
    }
}

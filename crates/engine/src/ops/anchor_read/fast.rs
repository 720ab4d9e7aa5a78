//! Entry points of the optimised anchor reader.
//!
//! Reading one anchor for a whole tile of tokens is a dense [tokens, d_k] × [d_k, d_v] product, which is much
//! faster than reading token by token. Dense segments use a streaming softmax; with top-K, the tokens that selected
//! an anchor are gathered first. The forward pass distributes tiles over threads. The backward pass distributes
//! pairs of segment group and key head, because all tokens that see an anchor add to its gradient.

use super::dense::DenseTile;
use super::dense_backward::{Backward, BackwardInputs, Outputs};
use super::one::{ChooseOne, DenseOne, ReadOne};
use super::sparse::{Choose, Groups, ReadBlock, blocks};
use super::stored::host;
use super::tile::{Call, Padded, States, TOKENS};
use super::{
    AnchorRead, AnchorReadBackward, AnchorReadForward, AnchorReadKept, AnchorReadOptions, AnchorReadStored,
    NAME, NO_ANCHOR, RoutingWeights, Segment, Sizes,
};
use crate::array::Array;
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::error::{Result, bad_value};
use crate::simd;
use crate::tensor::Tensor;

type T = Array<f32>;

pub(crate) fn forward(
    cpu: &Cpu,
    op: AnchorReadForward,
    sizes: Sizes,
) -> Result<(Tensor, Option<AnchorReadKept<Tensor>>)> {
    let query = &op.input.query;
    let states = States::Tensor(op.input.anchor_states.f32().data());
    let call = Call::new(sizes, &op.input, states, &op.options);
    let (readout, kept, _) = read(cpu, &call, &op.options, query.shape(), op.keep, false)?;
    Ok((query.like(readout), kept.map(|kept| kept.map(|array| query.like(array)))))
}

pub(crate) fn weights(cpu: &Cpu, op: RoutingWeights, sizes: Sizes) -> Result<Tensor> {
    let query = &op.input.query;
    let call = Call::new(sizes, &op.input, States::Absent, &op.options);
    let (_, _, weights) = read(cpu, &call, &op.options, query.shape(), false, true)?;
    let none = || cpu.zeros(&[sizes.rows, sizes.value_heads, sizes.anchors]);
    Ok(query.like(weights.unwrap_or_else(none)))
}

/// Forward pass over a list of stored states, concatenated along N.
pub(crate) fn forward_stored(cpu: &Cpu, op: AnchorReadStored, sizes: Sizes) -> Result<Tensor> {
    let (query, states) = (&op.input.query, &op.input.anchor_states[..]);
    let mut list = Vec::new();
    // A decoding step may read few of many anchors; with one anchor per entry, only the entries it reads are
    // checked.
    let single = states.len() == sizes.anchors;
    if !single {
        let mut first = 0;
        for tensor in states.iter().filter(|tensor| tensor.shape()[0] > 0) {
            list.push((first, &**host(tensor)?));
            first += tensor.shape()[0];
        }
    }
    let from = if single { States::Single(states) } else { States::Stored(&list) };
    let call = Call::new(sizes, &op.input, from, &op.options);
    let (readout, ..) = read(cpu, &call, &op.options, query.shape(), false, false)?;
    list.iter().try_for_each(|(_, stored)| stored.check())?;
    Ok(query.like(readout))
}

impl Call<'_> {
    /// Checks the dimensions of single-anchor entries before they are read, and loads those that are not in memory
    /// yet, using all threads.
    fn prepare(&self, cpu: &Cpu, anchors: impl Iterator<Item = usize>) -> Result<()> {
        let States::Single(list) = self.states else { return Ok(()) };
        let mut distant = Vec::new();
        for anchor in anchors {
            self.sizes.check_stored(list[anchor].shape(), Some(1))?;
            let stored = host(&list[anchor])?;
            if !stored.is_here() {
                distant.push(stored);
            }
        }
        cpu.parallel(distant.len(), |i| distant[i].fetch());
        Ok(())
    }

    /// After the given single-anchor entries were read: returns an error if one could not be loaded or was corrupt.
    fn check_sound(&self, mut anchors: impl Iterator<Item = usize>) -> Result<()> {
        let States::Single(list) = self.states else { return Ok(()) };
        anchors.try_for_each(|anchor| host(&list[anchor])?.check())
    }
}

/// Whether a segment reads all its visible anchors.
fn is_dense(segment: &Segment, options: &AnchorReadOptions) -> bool {
    options.top_k.is_none_or(|k| k >= segment.visible.len())
}

/// All tiles as (segment, first token, number of tokens).
fn tiles<'a>(segments: impl Iterator<Item = &'a Segment>) -> Vec<(&'a Segment, usize, usize)> {
    segments
        .flat_map(|segment| {
            (0..segment.len)
                .step_by(TOKENS)
                .map(move |o| (segment, segment.start + o, TOKENS.min(segment.len - o)))
        })
        .collect()
}

/// Forward pass of all segments for queries of shape `query`: the readout, with `keep` what the backward pass needs,
/// and with `want_weights` the weights π.
fn read(
    cpu: &Cpu,
    call: &Call<'_>,
    options: &AnchorReadOptions,
    query: &[usize],
    keep: bool,
    want_weights: bool,
) -> Result<(T, Option<AnchorReadKept<T>>, Option<T>)> {
    let Sizes { rows, value_heads: heads, anchors, .. } = call.sizes;
    let segments = &options.plan.segments[..];
    let mut readout = cpu.zeros(&call.sizes.readout_shape(query));
    let (dense, sparse): (Vec<usize>, Vec<usize>) =
        (0..segments.len()).partition(|&i| is_dense(&segments[i], options));
    let top_k = options.top_k.unwrap_or(0);
    let chosen_len = if sparse.is_empty() { 0 } else { rows * heads * top_k };
    let mut log_sum = cpu.zeros(&[rows * heads]);
    let mut chosen = vec![0; chosen_len];
    let mut weights = cpu.uninit(&[chosen_len]);
    let mut all = want_weights.then(|| cpu.zeros(&[rows, heads, anchors]));
    let reader = Reader { cpu, call, segments, dense: &dense, sparse: &sparse, top_k };
    {
        let readout = Shared::new(readout.data_mut());
        let log_sum = Shared::new(log_sum.data_mut());
        let all = all.as_mut().map(|t| Shared::new(t.data_mut()));
        dense.iter().try_for_each(|&i| call.prepare(cpu, segments[i].visible.iter()))?;
        reader.read_dense(&readout, keep.then_some(&log_sum), all.as_ref());
        if !sparse.is_empty() {
            reader.choose(&mut chosen, weights.data_mut(), &log_sum);
            call.prepare(cpu, reader.chosen_anchors(&chosen))?;
            reader.read_chosen(&chosen, weights.data(), &readout);
            call.check_sound(reader.chosen_anchors(&chosen))?;
        }
        dense.iter().try_for_each(|&i| call.check_sound(segments[i].visible.iter()))?;
    }
    if let Some(all) = &mut all {
        reader.spread(&chosen, weights.data(), all.data_mut());
    }
    let kept = keep.then_some(AnchorReadKept { log_sum, chosen, weights });
    Ok((readout, kept, all))
}

/// The steps of a forward pass, each of which distributes its tasks over the threads.
struct Reader<'a> {
    cpu: &'a Cpu,
    call: &'a Call<'a>,
    segments: &'a [Segment],
    /// Indices of the segments that read all their visible anchors.
    dense: &'a [usize],
    /// Indices of the segments that read the K best.
    sparse: &'a [usize],
    /// K
    top_k: usize,
}

impl Reader<'_> {
    /// Dense segments: p = softmax([ρ·κ_1 … ρ·κ_c, null]);   Oh = Σ_m diag(p_m) (sQ) A_m
    fn read_dense(&self, readout: &Shared<'_>, log_sum: Option<&Shared<'_>>, weights: Option<&Shared<'_>>) {
        let Self { cpu, call, .. } = *self;
        let heads = call.sizes.value_heads;
        let list = tiles(self.dense.iter().map(|&i| &self.segments[i]));
        // Later tiles of a sequence see more anchors; start the longest tasks first to balance the load.
        cpu.parallel(list.len() * heads, |task| {
            let (segment, first, count) = list[list.len() - 1 - task / heads];
            let head = task % heads;
            if count == 1 {
                with_scratch(DenseOne::scratch(call, segment), |scratch| {
                    let row = first;
                    cpu.level().run(DenseOne {
                        call,
                        segment,
                        row,
                        head,
                        readout,
                        log_sum,
                        weights,
                        scratch,
                    });
                });
                return;
            }
            with_scratch(DenseTile::scratch(call), |scratch| {
                cpu.level().run(DenseTile {
                    call,
                    segment,
                    first,
                    count,
                    head,
                    readout,
                    log_sum,
                    weights,
                    scratch,
                });
            });
        });
    }

    /// Top-K segments: the K anchors with the largest ρ·κ_m for every token and head, [rows, value_heads, K],
    /// and p = softmax of their scores and the null.
    #[allow(unsafe_code)]
    fn choose(&self, chosen: &mut [u32], weights: &mut [f32], log_sum: &Shared<'_>) {
        let Self { cpu, call, top_k, .. } = *self;
        let heads = call.sizes.value_heads;
        let (chosen, weights) = (Shared::new(chosen), Shared::new(weights));
        let list = tiles(self.sparse.iter().map(|&i| &self.segments[i]));
        cpu.parallel(list.len() * heads, |task| {
            let (segment, first, count) = list[list.len() - 1 - task / heads];
            if count == 1 {
                let (row, head) = (first, task % heads);
                let at = (row * heads + head) * top_k;
                // SAFETY: this token and head belong to this task only.
                let (chosen, weights) = unsafe { (chosen.part(at, top_k), weights.part(at, top_k)) };
                with_scratch(ChooseOne::scratch(call, segment), |scratch| {
                    let one = ChooseOne { call, segment, row, head, chosen, weights, log_sum, scratch };
                    cpu.level().run(one);
                });
                return;
            }
            with_scratch(Choose::scratch(call, top_k), |scratch| {
                cpu.level().run(Choose {
                    call,
                    segment,
                    first,
                    count,
                    head: task % heads,
                    top_k,
                    chosen: &chosen,
                    weights: &weights,
                    log_sum,
                    scratch,
                });
            });
        });
    }

    /// The anchors that the tokens of top-K segments selected, with repetitions.
    fn chosen_anchors<'c>(&'c self, chosen: &'c [u32]) -> impl Iterator<Item = usize> + 'c {
        let each = self.call.sizes.value_heads * self.top_k;
        let of_segment = move |&i: &usize| {
            let Segment { start, len, .. } = self.segments[i];
            &chosen[start * each..(start + len) * each]
        };
        self.sparse.iter().flat_map(of_segment).filter(|&&id| id != NO_ANCHOR).map(|&id| id as usize)
    }

    /// Top-K segments: Oh = Σ_m diag(p_m) (sQ) A_m, with m over the selected anchors.
    fn read_chosen(&self, chosen: &[u32], weights: &[f32], readout: &Shared<'_>) {
        let Self { cpu, call, top_k, .. } = *self;
        let heads = call.sizes.value_heads;
        let blocks = blocks(self.segments, self.sparse.iter().copied());
        cpu.parallel(blocks.len() * heads, |task| {
            let (block, head) = (&blocks[task / heads], task % heads);
            if let [rows] = &block[..]
                && rows.len() == 1
            {
                let row = rows.start;
                let at = (row * heads + head) * top_k;
                let (chosen, weights) = (&chosen[at..at + top_k], &weights[at..at + top_k]);
                with_scratch(ReadOne::scratch(call), |scratch| {
                    cpu.level().run(ReadOne { call, row, head, chosen, weights, readout, scratch });
                });
                return;
            }
            let groups = Groups::new(call, block, head, top_k, chosen);
            with_scratch(ReadBlock::scratch(call, block), |scratch| {
                let groups = &groups;
                cpu.level().run(ReadBlock { call, block, groups, head, top_k, weights, readout, scratch });
            });
        });
    }

    /// Writes the weights of the selected anchors of top-K segments into π, [rows, value_heads, N].
    fn spread(&self, chosen: &[u32], weights: &[f32], all: &mut [f32]) {
        let Self { segments, top_k, .. } = *self;
        let Sizes { value_heads: heads, anchors, .. } = self.call.sizes;
        for row in self.sparse.iter().flat_map(|&i| segments[i].start..segments[i].start + segments[i].len) {
            for at in row * heads..(row + 1) * heads {
                for k in at * top_k..(at + 1) * top_k {
                    if chosen[k] != NO_ANCHOR {
                        all[at * anchors + chosen[k] as usize] = weights[k];
                    }
                }
            }
        }
    }
}

#[allow(unsafe_code)]
pub(crate) fn backward(cpu: &Cpu, op: AnchorReadBackward, sizes: Sizes) -> Result<AnchorRead<Tensor>> {
    let (input, options) = (op.input.as_ref().map(Tensor::f32), &op.options);
    let Sizes { rows, value_heads: heads, key_heads, anchors, .. } = sizes;
    let segments = &options.plan.segments;
    let any_sparse = segments.iter().any(|s| !is_dense(s, options));
    let top_k = options.top_k.unwrap_or(0);
    let chosen_len = if any_sparse { rows * heads * top_k } else { 0 };
    let fits = |kept: &&AnchorReadKept<Tensor>| {
        kept.log_sum.len() == rows * heads
            && [kept.chosen.len(), kept.weights.len()] == [chosen_len; 2]
            && kept.chosen.iter().all(|&id| id == NO_ANCHOR || (id as usize) < anchors)
    };
    let Some(AnchorReadKept { log_sum, chosen, weights }) = op.kept.as_ref().filter(fits) else {
        return bad_value(NAME, "the saved tensors do not match the forward pass of this call");
    };
    let call = Call::new(sizes, &op.input, States::Tensor(input.anchor_states.data()), options);
    let pad = Padded::of(&sizes);
    let mut d = AnchorRead {
        query: cpu.zeros(input.query.shape()),
        routing_query: cpu.zeros(input.routing_query.shape()),
        routing_keys: cpu.zeros(input.routing_keys.shape()),
        anchor_states: cpu.uninit(input.anchor_states.shape()),
        null_score: input.null_score.map(|t| cpu.zeros(t.shape())),
    };
    let mut states = cpu.zeros(&[anchors * heads * pad.state()]);
    {
        let out = Outputs {
            query: Shared::new(d.query.data_mut()),
            routing_query: Shared::new(d.routing_query.data_mut()),
            routing_keys: Shared::new(d.routing_keys.data_mut()),
            states: Shared::new(states.data_mut()),
            null_score: d.null_score.as_mut().map(|t| Shared::new(t.data_mut())),
        };
        let given = BackwardInputs {
            readout: op.readout.f32().data(),
            gradient: op.gradient.f32().data(),
            log_sum: log_sum.f32().data(),
            chosen,
            weights: weights.f32().data(),
            top_k,
        };
        let groups: Vec<(Vec<usize>, Vec<usize>)> = options
            .plan
            .groups(anchors)
            .into_iter()
            .map(|group| group.into_iter().partition(|&i| is_dense(&segments[i], options)))
            .collect();
        let per_key = sizes.group();
        cpu.parallel(groups.len() * key_heads, |task| {
            let (dense, sparse) = &groups[task / key_heads];
            let key_head = task % key_heads;
            for head in key_head * per_key..(key_head + 1) * per_key {
                let blocks = blocks(segments, sparse.iter().copied());
                with_scratch(Backward::scratch(&call, &blocks, top_k), |scratch| {
                    cpu.level().run(Backward {
                        call: &call,
                        given,
                        head,
                        segments,
                        dense,
                        blocks: &blocks,
                        out: &out,
                        scratch,
                    });
                });
            }
        });
    }
    let out = Shared::new(d.anchor_states.data_mut());
    let size = sizes.state();
    cpu.for_rows(cpu.row_parts(anchors * heads, size), |_, range| {
        for i in range {
            // SAFETY: each pair of anchor and head has its own disjoint part.
            let to = unsafe { out.part(i * size, size) };
            simd::unpack(sizes.key_dim, sizes.value_dim, &states.data()[i * pad.state()..], to);
        }
    });
    Ok(d.map(|array| op.gradient.like(array)))
}

//! Tiles of tokens against anchors one at a time, so that each anchor is a dense [tokens, d_k] × [d_k, d_v]
//! product; softmax by streaming; top-K by grouping the tokens that chose an anchor. Forward: tiles over threads.
//! Backward: (group of segments, key head) over threads, because later tokens add to earlier anchors.

use super::dense::DenseTile;
use super::dense_backward::{Backward, Given, Outputs};
use super::sparse::{Choose, Groups, ReadBlock, blocks};
use super::stored::StoredStates;
use super::tile::{Call, Padded, States, TOKENS};
use super::{AnchorRead, AnchorReadOptions, Segment, Sizes, check, check_weights, output_shape};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::error::{Result, bad_shape, bad_value, expect_shape};
use crate::simd;
use crate::tensor::Tensor;

type T = Tensor<f32>;

pub(crate) fn forward(
    cpu: &Cpu,
    input: AnchorRead<&T>,
    options: &AnchorReadOptions,
    keep: bool,
) -> Result<(T, Vec<T>)> {
    let sizes = check(&input.map(Tensor::shape), options)?;
    let call = Call::new(sizes, input, States::Tensor(input.anchor_states.data()), options);
    let (readout, kept, _) =
        read(cpu, &call, options, &output_shape(input.query.shape(), &sizes), keep, false);
    Ok((readout, kept))
}

/// π for every token, head and anchor: [rows, value_heads, N], zero where unseen or not chosen.
pub(crate) fn weights(
    cpu: &Cpu,
    input: AnchorRead<&T, [usize; 2]>,
    options: &AnchorReadOptions,
) -> Result<T> {
    let sizes = check_weights(input, options)?;
    let call = Call::new(sizes, input, States::Absent, options);
    let shape = output_shape(input.query.shape(), &sizes);
    let (_, _, weights) = read(cpu, &call, options, &shape, false, true);
    Ok(weights.unwrap_or_else(|| cpu.zeros(&[sizes.rows, sizes.value_heads, sizes.anchors])))
}

/// Reads stored states that stand one after the other.
pub(crate) fn forward_stored(
    cpu: &Cpu,
    input: AnchorRead<&T, &[&StoredStates]>,
    options: &AnchorReadOptions,
) -> Result<T> {
    let mut list = Vec::with_capacity(input.anchor_states.len());
    let mut shape = [0, 0, 0, 0];
    for stored in input.anchor_states {
        let [n, rest @ ..] = stored.shape();
        if list.is_empty() {
            shape[1..].copy_from_slice(&rest);
        } else if shape[1..] != rest {
            return bad_shape(
                "anchor_read",
                "anchor_states",
                &stored.shape(),
                format!("[_, {}, {}, {}], as the first", shape[1], shape[2], shape[3]),
            );
        }
        if n > 0 {
            list.push((shape[0], *stored));
        }
        shape[0] += n;
    }
    let shapes = AnchorRead {
        query: input.query.shape(),
        routing_query: input.routing_query.shape(),
        routing_keys: input.routing_keys.shape(),
        anchor_states: &shape[..],
        null_score: input.null_score.map(Tensor::shape),
    };
    let sizes = check(&shapes, options)?;
    let call = Call::new(sizes, input, States::Stored(&list), options);
    let (readout, ..) = read(cpu, &call, options, &output_shape(input.query.shape(), &sizes), false, false);
    list.iter().try_for_each(|(_, stored)| stored.check())?;
    Ok(readout)
}

/// Whether a segment reads all that it sees.
fn is_dense(segment: &Segment, options: &AnchorReadOptions) -> bool {
    options.top_k.is_none_or(|k| k >= segment.visible.len())
}

/// (segment, first token, tokens) of every tile.
fn tiles<'a>(segments: impl Iterator<Item = &'a Segment>) -> Vec<(&'a Segment, usize, usize)> {
    segments
        .flat_map(|segment| {
            (0..segment.len)
                .step_by(TOKENS)
                .map(move |o| (segment, segment.start + o, TOKENS.min(segment.len - o)))
        })
        .collect()
}

fn read(
    cpu: &Cpu,
    call: &Call<'_>,
    options: &AnchorReadOptions,
    shape: &[usize],
    keep: bool,
    want_weights: bool,
) -> (T, Vec<T>, Option<T>) {
    let Sizes { rows, value_heads: heads, anchors, .. } = call.sizes;
    let segments = &options.plan.segments;
    let mut readout = cpu.zeros(shape);
    let (dense, sparse): (Vec<usize>, Vec<usize>) =
        (0..segments.len()).partition(|&i| is_dense(&segments[i], options));
    let top_k = options.top_k.unwrap_or(0);
    let chosen_shape = [if sparse.is_empty() { 0 } else { rows * heads * top_k }];
    let mut log_sum = cpu.zeros(&[rows * heads]);
    let mut chosen = cpu.uninit(&chosen_shape);
    let mut weights = cpu.uninit(&chosen_shape);
    let mut all = want_weights.then(|| cpu.zeros(&[rows, heads, anchors]));
    {
        let readout = Shared::new(readout.data_mut());
        let log_sum = Shared::new(log_sum.data_mut());
        let all = all.as_mut().map(|t| Shared::new(t.data_mut()));
        let list = tiles(dense.iter().map(|&i| &segments[i]));
        // The longest lists come last in a sequence; they start first.
        cpu.parallel(list.len() * heads, |task| {
            let (segment, first, count) = list[list.len() - 1 - task / heads];
            with_scratch(DenseTile::scratch(call), |scratch| {
                cpu.level().run(DenseTile {
                    call,
                    segment,
                    first,
                    count,
                    head: task % heads,
                    readout: &readout,
                    log_sum: keep.then_some(&log_sum),
                    weights: all.as_ref(),
                    scratch,
                });
            });
        });
        if !sparse.is_empty() {
            {
                let (chosen, weights) = (Shared::new(chosen.data_mut()), Shared::new(weights.data_mut()));
                let list = tiles(sparse.iter().map(|&i| &segments[i]));
                cpu.parallel(list.len() * heads, |task| {
                    let (segment, first, count) = list[list.len() - 1 - task / heads];
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
                            log_sum: &log_sum,
                            scratch,
                        });
                    });
                });
            }
            let blocks = blocks(segments, sparse.iter().copied());
            cpu.parallel(blocks.len() * heads, |task| {
                let (block, head) = (&blocks[task / heads], task % heads);
                let groups = Groups::new(call, block, head, top_k, chosen.data());
                with_scratch(ReadBlock::scratch(call), |scratch| {
                    cpu.level().run(ReadBlock {
                        call,
                        groups: &groups,
                        head,
                        top_k,
                        weights: weights.data(),
                        readout: &readout,
                        scratch,
                    });
                });
            });
        }
    }
    if let (Some(all), false) = (&mut all, sparse.is_empty()) {
        let all = all.data_mut();
        for row in sparse.iter().flat_map(|&i| segments[i].start..segments[i].start + segments[i].len) {
            for at in row * heads..(row + 1) * heads {
                for k in at * top_k..(at + 1) * top_k {
                    if chosen.data()[k] >= 0.0 {
                        all[at * anchors + chosen.data()[k] as usize] = weights.data()[k];
                    }
                }
            }
        }
    }
    let kept = if keep { vec![log_sum, chosen, weights] } else { Vec::new() };
    (readout, kept, all)
}

#[allow(unsafe_code)]
pub(crate) fn backward(
    cpu: &Cpu,
    input: AnchorRead<&T>,
    options: &AnchorReadOptions,
    readout: &T,
    kept: &[T],
    gradient: &T,
) -> Result<AnchorRead<T>> {
    const NAME: &str = "anchor_read";
    let sizes = check(&input.map(Tensor::shape), options)?;
    let shape = output_shape(input.query.shape(), &sizes);
    expect_shape(NAME, "gradient", gradient.shape(), &shape, "[.., value_heads·d_v]")?;
    expect_shape(NAME, "readout", readout.shape(), &shape, "[.., value_heads·d_v]")?;
    let Sizes { rows, value_heads: heads, key_heads, anchors, .. } = sizes;
    let segments = &options.plan.segments;
    let any_sparse = segments.iter().any(|s| !is_dense(s, options));
    let top_k = options.top_k.unwrap_or(0);
    let chosen_len = if any_sparse { rows * heads * top_k } else { 0 };
    let (log_sum, chosen, weights) = match kept {
        [l, c, w] if l.len() == rows * heads && c.len() == chosen_len && w.len() == chosen_len => (l, c, w),
        _ => return bad_value(NAME, "the backward pass needs what the forward pass kept for it"),
    };
    let call = Call::new(sizes, input, States::Tensor(input.anchor_states.data()), options);
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
        let given = Given {
            readout: readout.data(),
            gradient: gradient.data(),
            log_sum: log_sum.data(),
            chosen: chosen.data(),
            weights: weights.data(),
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
                let blocks: Vec<_> = blocks(segments, sparse.iter().copied())
                    .into_iter()
                    .map(|block| {
                        let groups = Groups::new(&call, &block, head, top_k, given.chosen);
                        (block, groups)
                    })
                    .collect();
                with_scratch(Backward::scratch(&call), |scratch| {
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
            // SAFETY: each anchor and head has its own part.
            let to = unsafe { out.part(i * size, size) };
            simd::unpack(sizes.key_dim, sizes.value_dim, &states.data()[i * pad.state()..], to);
        }
    });
    Ok(d)
}

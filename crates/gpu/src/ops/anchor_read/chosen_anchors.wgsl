// dA_m = Σ_t π_m q doᵀ;   dκ_m = scale Σ_t da_m ρ_t      over the tokens that chose anchor m
//
// Shapes as in read.wgsl; numbers as in delta.wgsl; lists as in choose.wgsl; d_scores as in chosen_tokens.wgsl.
// seen: for each anchor where its entries start (N + 1 numbers), each (first token, tokens) of a range that sees it.
//
// A workgroup owns an anchor, a head, and a block of 64 × 64 elements of dA, or, as the last of the blocks, dκ.
// It looks at 256 tokens that see the anchor at a time, an invocation at one; those that chose it are collected in
// ascending order, so the sums have one order.

//!include group

@group(0) @binding(0) var<storage, read> seen: array<u32>;
@group(0) @binding(1) var<storage, read> query: array<f32>;
@group(0) @binding(2) var<storage, read> routing_query: array<f32>;
@group(0) @binding(3) var<storage, read> numbers: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> gradient: array<f32>;
@group(0) @binding(5) var<storage, read> lists: array<u32>;
@group(0) @binding(6) var<storage, read> d_scores: array<f32>;
@group(0) @binding(7) var<storage, read_write> d_states: array<f32>;
@group(0) @binding(8) var<storage, read_write> d_keys: array<f32>;

var<workgroup> flags: array<u32, 256>;      // whether a token chose the anchor
var<workgroup> sets: array<u32, 8>;         // the same, 32 to a word
var<workgroup> found_row: array<u32, 256>;  // those that did, in ascending order
var<workgroup> found_at: array<u32, 256>;   // and their places in the lists

// Collects the tokens of first..first + count, at most 256, that chose the anchor; returns how many. Has barriers: two
// before it writes what the caller reads, so a caller may call it again at once, and one after that.
fn collect(anchor: u32, head: u32, first: u32, count: u32, lane: u32) -> u32 {
    let row = first + lane;
    let at = (row * call.heads + head) * call.k;
    var place = call.k;
    if lane < count {
        for (var i = 0u; i < call.k; i++) {
            if lists[call.rows * call.heads * call.k + at + i] == anchor {
                place = i;
            }
        }
    }
    flags[lane] = select(0u, 1u, place < call.k);
    workgroupBarrier();
    if lane / 8u == 1u {
        let w = lane % 8u;
        var word = 0u;
        for (var i = 0u; i < 32u; i++) {
            word |= flags[w * 32u + i] << i;
        }
        sets[w] = word;
    }
    workgroupBarrier();
    var before = 0u;
    var total = 0u;
    for (var w = 0u; w < 8u; w++) {
        let bits = countOneBits(sets[w]);
        before += select(0u, bits, w < lane / 32u);
        total += bits;
    }
    before += countOneBits(sets[lane / 32u] & ((1u << (lane % 32u)) - 1u));
    if place < call.k {
        found_row[before] = row;
        found_at[before] = at + place;
    }
    workgroupBarrier();
    return total;
}

@compute @workgroup_size(256)
fn chosen_anchors(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups);
    let block = index % call.strips;
    let head = (index / call.strips) % call.heads;
    let anchor = index / (call.strips * call.heads);
    if anchor >= call.anchors {
        return;
    }
    let of_keys = block == call.strips - 1u;
    let to = (anchor * call.heads + head) * call.dr;
    outer_start();
    if of_keys {
        for (var r = lane; r < call.dr; r += 256u) {
            d_keys[to + r] = 0.0;
        }
    }
    for (var e = seen[anchor]; e < seen[anchor + 1u]; e += 2u) {
        for (var first = 0u; first < seen[e + 1u]; first += 256u) {
            let count = min(256u, seen[e + 1u] - first);
            let found = collect(anchor, head, seen[e] + first, count, lane);
            if of_keys {
                for (var r = lane; r < call.dr; r += 256u) {
                    var sum = 0.0;
                    for (var t = 0u; t < found; t++) {
                        let value = routing_query[(found_row[t] * call.heads + head) * call.dr + r];
                        sum = fma(d_scores[found_at[t]], value, sum);
                    }
                    d_keys[to + r] = fma(sum, call.routing_scale, d_keys[to + r]);
                }
            } else {
                for (var t = 0u; t < found; t += 16u) {
                    let mine = t + lane / 16u;
                    var row = 0u;
                    var weight = 0.0;
                    if mine < found {
                        row = found_row[mine];
                        weight = bitcast<f32>(lists[found_at[mine]]);
                    }
                    outer_add(block, head, row, weight, mine < found, min(16u, found - t), lane);
                }
            }
        }
    }
    if !of_keys {
        outer_write(block, anchor, head, lane);
    }
}

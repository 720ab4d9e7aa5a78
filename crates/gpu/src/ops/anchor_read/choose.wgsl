// The K visible anchors with the highest a_m = scale ρ·κ_m for each token and head, and π = softmax([a_m …, null])
// over them
//
// Shapes as in read.wgsl; lists: weights [rows, heads, K], then anchors [rows, heads, K] in ascending order, padded
// with weight 0 and NO_ANCHOR; kept [rows, heads] as in read.wgsl.
//
// A workgroup owns a tile of tokens and a head. All its invocations score a chunk of anchors; then one invocation for
// each token merges the chunk into the token's list, which is in the output itself, so K has no limit. Anchors come in
// ascending order: a list is full of the best so far, and a better one, or a newer equal one, goes to its end in
// place of the worst. NaN ranks highest, so that it is never dropped.

//!include group

@group(0) @binding(0) var<storage, read> plan: array<u32>;
@group(0) @binding(1) var<storage, read> query: array<f32>;
@group(0) @binding(2) var<storage, read> routing_query: array<f32>;
@group(0) @binding(3) var<storage, read> routing_keys: array<f32>;
@group(0) @binding(4) var<storage, read> null_score: array<f32>;
@group(0) @binding(5) var<storage, read_write> lists: array<u32>;
@group(0) @binding(6) var<storage, read_write> kept: array<vec4<f32>>;

const NO_ANCHOR: u32 = 0xffffffffu;

// Integer that orders scores; NaN as infinity, and both zeros alike.
fn rank(score: f32) -> u32 {
    let bits = bitcast<u32>(score);
    let size = bits & 0x7fffffffu;
    if size > 0x7f800000u {
        return 0xff800000u;
    }
    if size != bits && size != 0u {
        return ~bits;
    }
    return size | 0x80000000u;
}

// Merges a chunk into the list at `at`, which holds `filled` anchors; returns how many it holds now.
fn merge(tile: Tile, base: u32, count: u32, t: u32, at: u32, filled: u32) -> u32 {
    let ids = call.rows * call.heads * call.k;
    var length = filled;
    var worst = 0u;     // place in the full list, and rank
    var lowest = 0u;
    var known = false;
    for (var c = 0u; c < count; c++) {
        let score = score_at(c, t);
        let anchor = visible_anchor(tile, base + c);
        if length < call.k {
            lists[at + length] = bitcast<u32>(score);
            lists[ids + at + length] = anchor;
            length++;
            continue;
        }
        if !known {
            lowest = NO_ANCHOR;
            for (var i = 0u; i < call.k; i++) {
                let r = rank(bitcast<f32>(lists[at + i]));
                if r < lowest {
                    lowest = r;
                    worst = i;
                }
            }
            known = true;
        }
        if rank(score) >= lowest {
            for (var i = worst; i + 1u < call.k; i++) {
                lists[at + i] = lists[at + i + 1u];
                lists[ids + at + i] = lists[ids + at + i + 1u];
            }
            lists[at + call.k - 1u] = bitcast<u32>(score);
            lists[ids + at + call.k - 1u] = anchor;
            known = false;
        }
    }
    return length;
}

// Softmax over a list, in chunks as over all visible anchors, so that a list of all of them has the same weights.
fn list_softmax(row: u32, head: u32, at: u32, length: u32) -> Softmax {
    var state = softmax_start(row, head);
    for (var base = 0u; base < length; base += CHUNK) {
        let end = min(base + CHUNK, length);
        var best = state.largest;
        for (var i = base; i < end; i++) {
            best = larger(best, bitcast<f32>(lists[at + i]));
        }
        var sum = state.sum * exp(state.largest - best);
        for (var i = base; i < end; i++) {
            sum += exp(bitcast<f32>(lists[at + i]) - best);
        }
        state = Softmax(best, sum);
    }
    return state;
}

// 1 / sqrt(Σq² + 1e-6)
fn query_factor(row: u32, head: u32) -> f32 {
    let start = (row * (call.heads / call.group) + head / call.group) * call.dk;
    var sum = 0.0;
    for (var i = 0u; i < call.dk; i++) {
        sum = fma(query[start + i], query[start + i], sum);
    }
    return 1.0 / sqrt(sum + 1e-6);
}

@compute @workgroup_size(LANES)
fn choose(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups);
    let head = index % call.heads;
    let number = index / call.heads;
    if number >= call.tiles {
        return;
    }
    let tile = tile_at(number);
    load_rho(tile, head, lane);
    workgroupBarrier();
    let row = tile.row + lane;
    let at = (row * call.heads + head) * call.k;
    var length = 0u;
    for (var base = 0u; base < tile.visible; base += HELD) {
        let count = min(HELD, tile.visible - base);
        score_chunk(tile, head, base, count, lane);
        workgroupBarrier();
        if lane < tile.count {
            length = merge(tile, base, count, lane, at, length);
        }
        workgroupBarrier();
    }
    if lane < tile.count {
        let softmax = list_softmax(row, head, at, length);
        let inverse = 1.0 / softmax.sum;
        for (var i = 0u; i < length; i++) {
            let weight = exp(bitcast<f32>(lists[at + i]) - softmax.largest) * inverse;
            lists[at + i] = bitcast<u32>(weight);
        }
        for (var i = length; i < call.k; i++) {
            lists[at + i] = 0u;
            lists[call.rows * call.heads * call.k + at + i] = NO_ANCHOR;
        }
        let null_part = null_weight(row, head, softmax.largest, inverse);
        kept[row * call.heads + head] =
            vec4<f32>(softmax.largest, inverse, null_part, query_factor(row, head));
    }
}

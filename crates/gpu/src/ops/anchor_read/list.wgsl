// o = Σ_m π_m A_mᵀ q      for each token alone, over the anchors that it chose (CHOSEN 1) or sees (CHOSEN 0)
//
// Shapes as in read.wgsl; weights: lists as in choose.wgsl, or [rows, heads, N] as in weights.wgsl.
//
// A workgroup owns a token, a head, and COLUMNS columns of d_v. It reads READERS anchors at a time: an invocation
// owns one column of one anchor, and those of the middle one add the results in the order of the anchors. Every sum
// has the order of read.wgsl, so a token that decodes alone has the bits that it has in a longer call.

//!include group

@group(0) @binding(0) var<storage, read> plan: array<u32>;
@group(0) @binding(1) var<storage, read> query: array<f32>;
@group(0) @binding(2) var<storage, read> states: array<u32>;
@group(0) @binding(3) var<storage, read> weights: array<u32>;
@group(0) @binding(4) var<storage, read_write> readout: array<f32>;

const NO_ANCHOR: u32 = 0xffffffffu;
const LANES: u32 = COLUMNS * READERS;

var<workgroup> terms: array<f32, LANES>;    // [anchor][column]
var<workgroup> ends: u32;

@compute @workgroup_size(LANES)
fn read_list(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups);
    let strip = index % call.strips;
    let head = (index / call.strips) % call.heads;
    let number = index / (call.strips * call.heads);
    if number >= call.tiles {
        return;
    }
    // One token: a tile of its own, or a row of the lists.
    var tile = Tile(number, 1u, 0u, 0u, 0u, 0u);
    let at = (number * call.heads + head) * call.k;
    let ids = call.rows * call.heads * call.k;
    if CHOSEN == 1u {
        if lane == LANES - 1u {
            var length = 0u;
            while length < call.k && weights[ids + at + length] != NO_ANCHOR {
                length++;
            }
            ends = length;
        }
        workgroupBarrier();
        tile.visible = ends;
    } else {
        tile = tile_at(number);
    }
    load_queries(tile, head, lane);

    let column = strip * COLUMNS + lane % COLUMNS;
    let reader = lane / COLUMNS;
    var out = 0.0;
    for (var base = 0u; base < tile.visible; base += READERS) {
        let i = base + reader;
        if i < tile.visible && column < call.dv {
            var anchor = 0u;
            if CHOSEN == 1u {
                anchor = weights[ids + at + i];
            } else {
                anchor = visible_anchor(tile, i);
            }
            let start = state_start(anchor);
            var sum = 0.0;
            for (var i = 0u; i < call.dk; i++) {
                sum = fma(state(start, head * call.dk + i, column), queries[i].x, sum);
            }
            terms[lane] = sum;
        }
        workgroupBarrier();
        if reader == READERS / 2u && column < call.dv {
            let count = min(READERS, tile.visible - base);
            for (var c = 0u; c < count; c++) {
                var weight = 0.0;
                if CHOSEN == 1u {
                    weight = bitcast<f32>(weights[at + base + c]);
                } else {
                    let row = (tile.row * call.heads + head) * call.anchors;
                    weight = bitcast<f32>(weights[row + visible_anchor(tile, base + c)]);
                }
                out = fma(weight, terms[c * COLUMNS + lane % COLUMNS], out);
            }
        }
        workgroupBarrier();
    }
    if reader == READERS / 2u && column < call.dv {
        readout[(tile.row * call.heads + head) * call.dv + column] = out;
    }
}

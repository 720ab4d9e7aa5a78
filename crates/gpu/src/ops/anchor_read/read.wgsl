// a_m = scale ρ·κ_m;   π = softmax([a_m …, null]);   o = Σ_m π_m A_mᵀ q      over all visible anchors
//
// query [rows, key_heads·d_k]     routing_query [rows, heads·d_r]     null_score [rows, heads]
// routing_keys [N, heads·d_r]     states [N, heads, d_k, d_v]         readout [rows, heads·d_v]
// kept [rows, heads]: largest score, 1 / Σ exp(score − largest), weight of the null, 1 / |q|
//
// A workgroup owns a tile of tokens, a head, and LANES columns of d_v; an invocation owns one column for all tokens
// of the tile, so that each element of a state is loaded once for them. Scores are computed twice, once for the
// softmax and once for the weights, so that no matrix of tokens and anchors is stored.

//!include group

@group(0) @binding(0) var<storage, read> plan: array<u32>;
@group(0) @binding(1) var<storage, read> query: array<f32>;
@group(0) @binding(2) var<storage, read> routing_query: array<f32>;
@group(0) @binding(3) var<storage, read> routing_keys: array<f32>;
@group(0) @binding(4) var<storage, read> states: array<u32>;
@group(0) @binding(5) var<storage, read> null_score: array<f32>;
@group(0) @binding(6) var<storage, read_write> readout: array<f32>;
@group(0) @binding(7) var<storage, read_write> kept: array<vec4<f32>>;

@compute @workgroup_size(LANES)
fn read_all(
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
    let tile = tile_at(number);
    load_rho(tile, head, lane);
    load_queries(tile, head, lane);
    tile_softmax(tile, head, lane);
    if strip == 0u && lane < tile.count {
        let row = tile.row + lane;
        let null_part = null_weight(row, head, largest[lane], inverse[lane]);
        kept[row * call.heads + head] = vec4<f32>(largest[lane], inverse[lane], null_part, factors[lane]);
    }

    let column = strip * LANES + lane;
    var out: array<vec4<f32>, QUADS>;
    for (var p = 0u; p < QUADS; p++) {
        out[p] = vec4<f32>();
    }
    for (var base = 0u; base < tile.visible; base += HELD) {
        let count = min(HELD, tile.visible - base);
        weigh_chunk(tile, head, base, count, lane);
        workgroupBarrier();
        if column < call.dv {
            for (var c = 0u; c < count; c++) {
                let start = state_start(visible_anchor(tile, base + c));
                var sum: array<vec4<f32>, QUADS>;
                for (var p = 0u; p < QUADS; p++) {
                    sum[p] = vec4<f32>();
                }
                for (var i = 0u; i < call.dk; i++) {
                    let value = vec4<f32>(state(start, head * call.dk + i, column));
                    for (var p = 0u; p < QUADS; p++) {
                        sum[p] = fma(value, queries[i * QUADS + p], sum[p]);
                    }
                }
                for (var p = 0u; p < QUADS; p++) {
                    out[p] = fma(scores[c * QUADS + p], sum[p], out[p]);
                }
            }
        }
        workgroupBarrier();
    }
    if column < call.dv {
        for (var t = 0u; t < tile.count; t++) {
            readout[((tile.row + t) * call.heads + head) * call.dv + column] = out[t / 4u][t % 4u];
        }
    }
}

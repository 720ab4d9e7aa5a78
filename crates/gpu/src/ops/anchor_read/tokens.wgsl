// g_m = A_m do;   da_m = π_m (<q, g_m> − δ);   dq = Σ_m π_m g_m;   dρ = scale Σ_m da_m κ_m
//
// Shapes as in read.wgsl; numbers [rows, heads] as in delta.wgsl; matrix: (π, da) of each token, head and visible
// anchor of the tiles of this dispatch, for the kernel that owns anchors: [tile][head][visible anchor][TOKENS].
//
// A workgroup owns a tile of tokens and a key head with all its value heads, whose dq it adds in order. An invocation
// owns rows of d_k and of d_r for all tokens of the tile. States pass through workgroup memory in slices of SLICE
// columns: read along rows, used along columns.

//!include group

@group(0) @binding(0) var<storage, read> plan: array<u32>;
@group(0) @binding(1) var<storage, read> query: array<f32>;
@group(0) @binding(2) var<storage, read> routing_query: array<f32>;
@group(0) @binding(3) var<storage, read> routing_keys: array<f32>;
@group(0) @binding(4) var<storage, read> states: array<u32>;
@group(0) @binding(5) var<storage, read> numbers: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> gradient: array<f32>;
@group(0) @binding(7) var<storage, read_write> d_query: array<f32>;
@group(0) @binding(8) var<storage, read_write> d_routing: array<f32>;
@group(0) @binding(9) var<storage, read_write> matrix: array<vec2<f32>>;

const SLICE: u32 = 16u;
const KEY_BLOCKS: u32 = (DK + LANES - 1u) / LANES;
const ROUTING_BLOCKS: u32 = (DR + LANES - 1u) / LANES;

var<workgroup> deltas: array<f32, TOKENS>;
var<workgroup> d_out: array<vec4<f32>, DV * QUADS>;             // [d_v][token]
var<workgroup> d_scores: array<f32, HELD * TOKENS>;            // [anchor of the chunk][token]
var<workgroup> slice: array<f32, LANES * (SLICE + 1u)>;         // a slice of a state, or terms of a sum
var<workgroup> parts: array<f32, LANES>;

// Numbers and output gradients of the tile for one head. A barrier must follow.
fn load_head(tile: Tile, head: u32, lane: u32) {
    if lane < TOKENS {
        var n = vec4<f32>(0.0, 1.0, 0.0, 0.0);
        if lane < tile.count {
            n = numbers[(tile.row + lane) * call.heads + head];
        }
        largest[lane] = n.x;
        inverse[lane] = n.y;
        deltas[lane] = n.z;
    }
    for (var e = lane; e < call.dv * QUADS; e += LANES) {
        let j = e % call.dv;
        let quad = e / call.dv;
        var value = vec4<f32>();
        for (var c = 0u; c < 4u; c++) {
            let t = quad * 4u + c;
            if t < tile.count {
                value[c] = gradient[((tile.row + t) * call.heads + head) * call.dv + j];
            }
        }
        d_out[j * QUADS + quad] = value;
    }
}

// Puts one term of each token's sum over d_k into workgroup memory.
fn put_terms(quad: u32, terms: vec4<f32>, lane: u32) {
    for (var c = 0u; c < 4u; c++) {
        slice[(quad * 4u + c) * (LANES + 1u) + lane] = terms[c];
    }
}

// Adds the terms in a fixed order; TOKENS invocations in the middle get the sums of the tokens. Has barriers, the last
// before these sums are made from `parts`, of which each of them reads every TOKENS-th number.
fn add_terms(lane: u32) -> f32 {
    workgroupBarrier();
    let t = lane % TOKENS;
    let part = lane / TOKENS;
    var sum = 0.0;
    for (var i = 0u; i < TOKENS; i++) {
        sum += slice[t * (LANES + 1u) + part * TOKENS + i];
    }
    parts[lane] = sum;
    workgroupBarrier();
    sum = 0.0;
    if lane / TOKENS == LANES / TOKENS / 2u {
        for (var i = lane % TOKENS; i < LANES; i += TOKENS) {
            sum += parts[i];
        }
    }
    return sum;
}

// What an invocation owns, for all tokens of the tile, in blocks of LANES rows: [block][quad of tokens].
var<private> q: array<vec4<f32>, KEY_BLOCKS * QUADS>;
var<private> dq: array<vec4<f32>, KEY_BLOCKS * QUADS>;
var<private> g: array<vec4<f32>, KEY_BLOCKS * QUADS>;
var<private> d_rho: array<vec4<f32>, ROUTING_BLOCKS * QUADS>;

// The queries; 1 / |q| is the same for all heads of the key head.
fn start_queries(tile: Tile, key_head: u32, lane: u32) {
    let key_heads = call.heads / call.group;
    for (var b = 0u; b < KEY_BLOCKS * QUADS; b++) {
        let i = (b / QUADS) * LANES + lane;
        var value = vec4<f32>();
        for (var c = 0u; c < 4u; c++) {
            let t = (b % QUADS) * 4u + c;
            if t < tile.count && i < call.dk {
                let row = tile.row + t;
                let factor = numbers[row * call.heads + key_head * call.group].w;
                value[c] = query[(row * key_heads + key_head) * call.dk + i] * factor * call.query_scale;
            }
        }
        q[b] = value;
        dq[b] = vec4<f32>();
    }
}

// g = A do, for the state that starts at `start`. Has barriers, the last after the last read.
fn apply_state(start: u32, head: u32, lane: u32) {
    for (var b = 0u; b < KEY_BLOCKS * QUADS; b++) {
        g[b] = vec4<f32>();
    }
    for (var j = 0u; j < call.dv; j += SLICE) {
        let width = min(SLICE, call.dv - j);
        for (var block = 0u; block < KEY_BLOCKS; block++) {
            for (var e = lane; e < LANES * SLICE; e += LANES) {
                let i = block * LANES + e / SLICE;
                var value = 0.0;
                if i < call.dk && e % SLICE < width {
                    value = state(start, head * call.dk + i, j + e % SLICE);
                }
                slice[(e / SLICE) * (SLICE + 1u) + e % SLICE] = value;
            }
            workgroupBarrier();
            for (var s = 0u; s < width; s++) {
                let value = vec4<f32>(slice[lane * (SLICE + 1u) + s]);
                for (var p = 0u; p < QUADS; p++) {
                    let b = block * QUADS + p;
                    g[b] = fma(value, d_out[(j + s) * QUADS + p], g[b]);
                }
            }
            workgroupBarrier();
        }
    }
}

// dρ += da κ, for the `count` anchors from the `base`-th visible one.
fn add_routing(tile: Tile, head: u32, base: u32, count: u32, lane: u32) {
    for (var c = 0u; c < count; c++) {
        let at = (visible_anchor(tile, base + c) * call.heads + head) * call.dr;
        for (var b = 0u; b < ROUTING_BLOCKS * QUADS; b++) {
            let r = (b / QUADS) * LANES + lane;
            if r < call.dr {
                let t = c * TOKENS + (b % QUADS) * 4u;
                let d = vec4<f32>(d_scores[t], d_scores[t + 1u], d_scores[t + 2u], d_scores[t + 3u]);
                d_rho[b] = fma(d, vec4<f32>(routing_keys[at + r]), d_rho[b]);
            }
        }
    }
}

fn write_routing(tile: Tile, head: u32, lane: u32) {
    for (var b = 0u; b < ROUTING_BLOCKS * QUADS; b++) {
        let r = (b / QUADS) * LANES + lane;
        for (var c = 0u; c < 4u; c++) {
            let t = (b % QUADS) * 4u + c;
            if r < call.dr && t < tile.count {
                let at = ((tile.row + t) * call.heads + head) * call.dr + r;
                d_routing[at] = d_rho[b][c] * call.routing_scale;
            }
        }
    }
}

// Back through the norm: dx = (s dq − u <u, s dq>) / |q| with u = q / s. Has barriers.
fn write_queries(tile: Tile, key_head: u32, lane: u32) {
    for (var p = 0u; p < QUADS; p++) {
        var terms = vec4<f32>();
        for (var block = 0u; block < KEY_BLOCKS; block++) {
            terms = fma(q[block * QUADS + p], dq[block * QUADS + p], terms);
        }
        put_terms(p, terms, lane);
    }
    let along = add_terms(lane);
    if lane / TOKENS == LANES / TOKENS / 2u {
        parts[lane % TOKENS] = along;
    }
    workgroupBarrier();
    let key_heads = call.heads / call.group;
    for (var b = 0u; b < KEY_BLOCKS * QUADS; b++) {
        let i = (b / QUADS) * LANES + lane;
        for (var c = 0u; c < 4u; c++) {
            let t = (b % QUADS) * 4u + c;
            if t < tile.count && i < call.dk {
                let row = tile.row + t;
                let factor = numbers[row * call.heads + key_head * call.group].w;
                let inner = fma(-q[b][c] * call.root, parts[t], dq[b][c] * call.query_scale);
                d_query[(row * key_heads + key_head) * call.dk + i] = inner * factor;
            }
        }
    }
}

@compute @workgroup_size(LANES)
fn tokens(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups);
    let key_heads = call.heads / call.group;
    let key_head = index % key_heads;
    let number = index / key_heads;
    if number >= call.tiles {
        return;
    }
    let tile = tile_at(call.first_tile + number);
    start_queries(tile, key_head, lane);
    for (var member = 0u; member < call.group; member++) {
        let head = key_head * call.group + member;
        load_head(tile, head, lane);
        load_rho(tile, head, lane);
        for (var b = 0u; b < ROUTING_BLOCKS * QUADS; b++) {
            d_rho[b] = vec4<f32>();
        }
        workgroupBarrier();
        for (var base = 0u; base < tile.visible; base += HELD) {
            let count = min(HELD, tile.visible - base);
            // The barriers of apply_state come before the weights are read.
            weigh_chunk(tile, head, base, count, lane);
            // Tested at its end, so that software devices notice if the barrier after it is missing (docs/gpu.md).
            var c = 0u;
            loop {
                apply_state(state_start(visible_anchor(tile, base + c)), head, lane);
                for (var p = 0u; p < QUADS; p++) {
                    var terms = vec4<f32>();
                    for (var block = 0u; block < KEY_BLOCKS; block++) {
                        let b = block * QUADS + p;
                        terms = fma(q[b], g[b], terms);
                        dq[b] = fma(scores[c * QUADS + p], g[b], dq[b]);
                    }
                    put_terms(p, terms, lane);
                }
                let along = add_terms(lane);
                if lane / TOKENS == LANES / TOKENS / 2u {
                    let t = lane % TOKENS;
                    let weight = score_at(c, t);
                    let d_score = weight * (along - deltas[t]);
                    d_scores[c * TOKENS + t] = d_score;
                    let at = (tile.matrix + head * tile.visible + base + c) * TOKENS + t;
                    matrix[at] = vec2<f32>(weight, d_score);
                }
                continuing {
                    c += 1u;
                    break if c >= count;
                }
            }
            workgroupBarrier();
            add_routing(tile, head, base, count, lane);
        }
        write_routing(tile, head, lane);
    }
    write_queries(tile, key_head, lane);
}

// Backward pass, step 1: the gradient G of the state, from the last token to the first.
//
// at a boundary:  G += dA;     G += s q doᵀ,   dw = Gᵀk,   dv = β dw,   G ← α (G − β k dwᵀ)
//
// query, key [B, T, Hk·d_k]; gates [B·T, Hv, 4]; list: see full.wgsl; d_readout, d_value [B, T, Hv·d_v]; d_boundary
// [N, Hv, d_k, d_v]; d_final, d_initial [B, Hv, d_k, d_v]; back: dw [B·T, Hv, d_v], then G after each chunk, with the
// chunk's boundary but without its tokens, [chunks, Hv, d_k, d_v].
//
// A workgroup owns GROUP columns of G of one (batch row, value head), an invocation one column, as in the forward pass.
// A call may be one of several that share the work, for tokens end − 1 … begin: G passes through d_initial.
// Constants: D4 = ⌈d_k / 4⌉, TILE tokens, GROUP columns.

//!include group
//!include delta

struct Call {
    batch: u32,
    tokens: u32,
    key_heads: u32,
    value_heads: u32,
    d_k: u32,
    d_v: u32,
    d4: u32,
    strips: u32,
    has_boundary: u32,
    has_final: u32,
    wants_initial: u32,
    errors: u32,
    scale: f32,
    begin: u32,
    end: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key: array<f32>;
@group(0) @binding(2) var<storage, read> gates: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> list: array<u32>;
@group(0) @binding(4) var<storage, read> d_readout: array<f32>;
@group(0) @binding(5) var<storage, read> d_boundary: array<f32>;
@group(0) @binding(6) var<storage, read> d_final: array<f32>;
@group(0) @binding(7) var<storage, read_write> back: array<f32>;
@group(0) @binding(8) var<storage, read_write> d_value: array<f32>;
@group(0) @binding(9) var<storage, read_write> d_initial: array<f32>;

var<workgroup> keys: array<vec4<f32>, TILE * D4>;
var<workgroup> queries: array<vec4<f32>, TILE * D4>;
var<workgroup> key_factors: array<f32, TILE>;
var<workgroup> query_factors: array<f32, TILE>;
var<workgroup> tile_gates: array<vec2<f32>, TILE>;

@compute @workgroup_size(GROUP)
fn reverse(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    let h = (group / call.strips) % call.value_heads;
    let b = group / call.strips / call.value_heads;
    if b >= call.batch {
        return;
    }
    let j = (group % call.strips) * GROUP + local;
    let owns = j < call.d_v;
    let key_head = h / (call.value_heads / call.key_heads);
    let state_size = call.d_k * call.d_v;
    let own_state = (b * call.value_heads + h) * state_size + j;
    // Chunks still to come, last to first.
    let first_chunk = list[b];
    var chunk = list[b + 1u];
    while chunk > first_chunk && list[call.batch + 1u + 3u * (chunk - 1u) + 1u] > call.end {
        chunk -= 1u;
    }

    var state: array<vec4<f32>, D4>;
    for (var c = 0u; c < call.d4; c += 1u) {
        state[c] = vec4<f32>(0.0);
    }
    if owns && call.end < call.tokens {
        for (var i = 0u; i < call.d_k; i += 1u) {
            state[i / 4u][i % 4u] = d_initial[own_state + i * call.d_v];
        }
    } else if owns && call.has_final == 1u {
        for (var i = 0u; i < call.d_k; i += 1u) {
            state[i / 4u][i % 4u] = d_final[own_state + i * call.d_v];
        }
    }

    let tiles = (call.end - call.begin + TILE - 1u) / TILE;
    for (var tile = tiles; tile > 0u; tile -= 1u) {
        let first = call.begin + (tile - 1u) * TILE;
        let count = min(TILE, call.end - first);
        for (var x = local; x < count * call.d4; x += GROUP) {
            let c = x % call.d4;
            let row = b * call.tokens + first + x / call.d4;
            let at = (row * call.key_heads + key_head) * call.d_k + 4u * c;
            // Written out rather than a loop: see kernel.wgsl.
            let has = vec4<u32>(4u * c) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(call.d_k);
            var k = vec4<f32>(key[at], 0.0, 0.0, 0.0);
            var q = vec4<f32>(query[at], 0.0, 0.0, 0.0);
            if has.y {
                k.y = key[at + 1u];
                q.y = query[at + 1u];
            }
            if has.z {
                k.z = key[at + 2u];
                q.z = query[at + 2u];
            }
            if has.w {
                k.w = key[at + 3u];
                q.w = query[at + 3u];
            }
            keys[x] = k;
            queries[x] = q;
        }
        workgroupBarrier();
        for (var x = local; x < 2u * count; x += GROUP) {
            let t = x / 2u;
            var squares = vec4<f32>(0.0);
            if x % 2u == 0u {
                for (var c = 0u; c < call.d4; c += 1u) {
                    squares = fma(keys[t * call.d4 + c], keys[t * call.d4 + c], squares);
                }
                key_factors[t] = l2_factor(across(squares));
                let gate = gates[(b * call.tokens + first + t) * call.value_heads + h];
                tile_gates[t] = vec2<f32>(exp(gate.x), gate.y);
            } else {
                for (var c = 0u; c < call.d4; c += 1u) {
                    squares = fma(queries[t * call.d4 + c], queries[t * call.d4 + c], squares);
                }
                query_factors[t] = call.scale * l2_factor(across(squares));
            }
        }
        workgroupBarrier();
        if owns {
            for (var x = count; x > 0u; x -= 1u) {
                let t = first + x;
                if chunk > first_chunk && list[call.batch + 1u + 3u * (chunk - 1u) + 1u] == t {
                    chunk -= 1u;
                    let boundary = list[call.batch + 1u + 3u * chunk + 2u];
                    let added = ((max(boundary, 1u) - 1u) * call.value_heads + h) * state_size + j;
                    let to = call.errors + (chunk * call.value_heads + h) * state_size + j;
                    let adds = boundary > 0u && call.has_boundary == 1u;
                    for (var i = 0u; i < call.d_k; i += 1u) {
                        var g = state[i / 4u][i % 4u];
                        if adds {
                            g += d_boundary[added + i * call.d_v];
                            state[i / 4u][i % 4u] = g;
                        }
                        back[to + i * call.d_v] = g;
                    }
                }
                let at = (x - 1u) * call.d4;
                let place = ((b * call.tokens + t - 1u) * call.value_heads + h) * call.d_v + j;
                let read = query_factors[x - 1u] * d_readout[place];
                var along = vec4<f32>(0.0);
                for (var c = 0u; c < call.d4; c += 1u) {
                    let g = fma(queries[at + c], vec4<f32>(read), state[c]);
                    state[c] = g;
                    along = fma(g, keys[at + c], along);
                }
                let gate = tile_gates[x - 1u];
                let factor = key_factors[x - 1u];
                let d_write = factor * across(along);
                let d_error = gate.y * d_write;
                back[place] = d_write;
                d_value[place] = d_error;
                for (var c = 0u; c < call.d4; c += 1u) {
                    state[c] = gate.x * fma(keys[at + c], vec4<f32>(-factor * d_error), state[c]);
                }
            }
        }
        workgroupBarrier();
    }

    if owns && call.wants_initial == 1u {
        for (var i = 0u; i < call.d_k; i += 1u) {
            d_initial[own_state + i * call.d_v] = state[i / 4u][i % 4u];
        }
    }
}

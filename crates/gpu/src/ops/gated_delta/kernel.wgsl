// e = v − α Sᵀk,   S ← α S + k (β e)ᵀ,   o = s Sᵀq,   token by token, q and k divided by their L2 norms
//
// query [B, n, Hk·d_k] of the last n tokens, key [B, T, Hk·d_k], value [B, T, Hv·d_v], initial, final_state
// [B, Hv, d_k, d_v], readout [B, n, Hv·d_v].
//
// A workgroup owns GROUP columns of the state of one (batch row, value head), an invocation one column: columns never
// meet, so the state stays in registers and tokens need no barrier. Keys and queries of TILE tokens are loaded
// together. The sums of a token depend on nothing but its own inputs and the state, so any cut of a sequence into
// calls gives the same bits.
//
// A call may be one of several that share the work, for tokens begin … end − 1: the state passes through final_state.
//
// Constants: D4 = ⌈d_k / 4⌉, TILE tokens, GROUP columns.

//!include group
//!include delta

struct Call {
    batch: u32,
    tokens: u32,
    asking: u32,
    key_heads: u32,
    value_heads: u32,
    d_k: u32,
    d_v: u32,
    d4: u32,
    strips: u32,
    has_initial: u32,
    wants_final: u32,
    keeps: u32,
    errors: u32,
    strength: f32,
    scale: f32,
    begin: u32,
    end: u32,
}
var<immediate> call: Call;

var<workgroup> keys: array<vec4<f32>, TILE * D4>;
var<workgroup> queries: array<vec4<f32>, TILE * D4>;
var<workgroup> key_factors: array<f32, TILE>;
var<workgroup> query_factors: array<f32, TILE>;
var<workgroup> tile_gates: array<vec2<f32>, TILE>;

// Which of the four rows from row 4 c on exist.
fn rows_of(c: u32) -> vec4<bool> {
    return vec4<u32>(4u * c) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(call.d_k);
}

// Four numbers of a key; those that do not exist are zero. Written out rather than a loop, because lavapipe ends every
// loop of a kernel once its loops have made 65,535 turns in total.
fn four_keys(start: u32, c: u32) -> vec4<f32> {
    let has = rows_of(c);
    let at = start + 4u * c;
    var x = vec4<f32>(key[at], 0.0, 0.0, 0.0);
    if has.y {
        x.y = key[at + 1u];
    }
    if has.z {
        x.z = key[at + 2u];
    }
    if has.w {
        x.w = key[at + 3u];
    }
    return x;
}

fn four_queries(start: u32, c: u32) -> vec4<f32> {
    let has = rows_of(c);
    let at = start + 4u * c;
    var x = vec4<f32>(query[at], 0.0, 0.0, 0.0);
    if has.y {
        x.y = query[at + 1u];
    }
    if has.z {
        x.z = query[at + 2u];
    }
    if has.w {
        x.w = query[at + 3u];
    }
    return x;
}

@compute @workgroup_size(GROUP)
fn scan(
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
    let silent = call.tokens - call.asking;
    let state_size = call.d_k * call.d_v;
    let own_state = (b * call.value_heads + h) * state_size + j;
    open_row(b);

    var state: array<vec4<f32>, D4>;
    for (var c = 0u; c < call.d4; c += 1u) {
        state[c] = vec4<f32>(0.0);
    }
    if owns && call.begin > 0u {
        for (var i = 0u; i < call.d_k; i += 1u) {
            state[i / 4u][i % 4u] = final_state[own_state + i * call.d_v];
        }
    } else if owns && call.has_initial == 1u {
        for (var i = 0u; i < call.d_k; i += 1u) {
            state[i / 4u][i % 4u] = initial[own_state + i * call.d_v];
        }
    }

    for (var first = call.begin; first < call.end; first += TILE) {
        let count = min(TILE, call.end - first);
        for (var x = local; x < count * call.d4; x += GROUP) {
            let t = first + x / call.d4;
            let c = x % call.d4;
            keys[x] = four_keys(((b * call.tokens + t) * call.key_heads + key_head) * call.d_k, c);
            if t >= silent {
                let row = b * call.asking + t - silent;
                queries[x] = four_queries((row * call.key_heads + key_head) * call.d_k, c);
            }
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
                tile_gates[t] = gates_of(b * call.tokens + first + t, h);
            } else if first + t >= silent {
                for (var c = 0u; c < call.d4; c += 1u) {
                    squares = fma(queries[t * call.d4 + c], queries[t * call.d4 + c], squares);
                }
                query_factors[t] = call.scale * l2_factor(across(squares));
            }
        }
        workgroupBarrier();
        if owns {
            for (var x = 0u; x < count; x += 1u) {
                let t = first + x;
                let checkpoint = checkpoint_before(t);
                if checkpoint > 0u {
                    let to = ((checkpoint - 1u) * call.value_heads + h) * state_size + j;
                    for (var i = 0u; i < call.d_k; i += 1u) {
                        store_checkpoint(to + i * call.d_v, state[i / 4u][i % 4u]);
                    }
                }
                let at = x * call.d4;
                // Here and not where the gate is formed: a compiler may join exp and log, and then bits would depend
                // on which kernel forms the gates.
                let alpha = exp(tile_gates[x].x);
                let factor = key_factors[x];
                var held = vec4<f32>(0.0);
                for (var c = 0u; c < call.d4; c += 1u) {
                    held = fma(state[c], keys[at + c], held);
                }
                let place = ((b * call.tokens + t) * call.value_heads + h) * call.d_v + j;
                let error = fma(-alpha * factor, across(held), value[place]);
                store_error(place, error);
                let write = tile_gates[x].y * error * factor;
                var read = vec4<f32>(0.0);
                if t >= silent {
                    for (var c = 0u; c < call.d4; c += 1u) {
                        let s = fma(keys[at + c], vec4<f32>(write), alpha * state[c]);
                        state[c] = s;
                        read = fma(s, queries[at + c], read);
                    }
                    let to = (b * call.asking + t - silent) * call.value_heads + h;
                    readout[to * call.d_v + j] = query_factors[x] * across(read);
                } else {
                    for (var c = 0u; c < call.d4; c += 1u) {
                        state[c] = fma(keys[at + c], vec4<f32>(write), alpha * state[c]);
                    }
                }
                let boundary = boundary_after(t + 1u);
                if boundary > 0u {
                    let to = ((boundary - 1u) * call.value_heads + h) * state_size + j;
                    for (var i = 0u; i < call.d_k; i += 1u) {
                        store_boundary(to + i * call.d_v, state[i / 4u][i % 4u]);
                    }
                }
            }
        }
        workgroupBarrier();
    }

    if owns && call.wants_final == 1u {
        for (var i = 0u; i < call.d_k; i += 1u) {
            final_state[own_state + i * call.d_v] = state[i / 4u][i % 4u];
        }
    }
}

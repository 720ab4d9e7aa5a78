// What the forward and the backward pass share: one token of the recurrence for one column of the level states.
//
// At position p, level m ≥ 1 is in use where bit m − 1 of p is set. With z the number of trailing ones of p, the token
// reads S⁰ = β k vᵀ and all levels in use, and afterwards levels 0 … z are merged into level z + 1, which was not in use:
//   m ≥ 1:  S^m ← α S^m − β k (α S^mᵀ k)ᵀ;    o = Σ_m λ[min(m, NL − 1)] S^mᵀ q;    S^(z+1) = S⁰ + … + S^z
// So level 0 is never stored. Levels that are not in use may hold anything; they are not read.
//
// Level states are [levels, d_k, d_v] from an element of `states` on. They do not fit into registers, but each
// invocation reads and writes its own column only, and neighbours own neighbouring columns.
//
// Constants: D4 = ⌈d_k / 4⌉, TILE tokens whose keys and queries are in workgroup memory.

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
    scales: u32,
    position: u32,
    initial_levels: u32,
    levels: u32,
    has_initial: u32,
    first: u32,
    count: u32,
    slots: u32,
    phase: u32,
    begin: u32,
    end: u32,
}
var<immediate> call: Call;

var<workgroup> keys: array<vec4<f32>, TILE * D4>;
var<workgroup> queries: array<vec4<f32>, TILE * D4>;

// Which of the four rows from row 4 c on exist.
fn rows_of(c: u32) -> vec4<bool> {
    return vec4<u32>(4u * c) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(call.d_k);
}

// Four rows of a column, from row 4 c on; rows that do not exist are zero. These are written out rather than loops,
// because lavapipe ends every loop of a kernel once its loops have made 65,535 turns in total.
fn load_four(column: u32, c: u32) -> vec4<f32> {
    let has = rows_of(c);
    let at = column + 4u * c * call.d_v;
    var s = vec4<f32>(states[at], 0.0, 0.0, 0.0);
    if has.y {
        s.y = states[at + call.d_v];
    }
    if has.z {
        s.z = states[at + 2u * call.d_v];
    }
    if has.w {
        s.w = states[at + 3u * call.d_v];
    }
    return s;
}

fn store_four(column: u32, c: u32, s: vec4<f32>) {
    let has = rows_of(c);
    let at = column + 4u * c * call.d_v;
    states[at] = s.x;
    if has.y {
        states[at + call.d_v] = s.y;
    }
    if has.z {
        states[at + 2u * call.d_v] = s.z;
    }
    if has.w {
        states[at + 3u * call.d_v] = s.w;
    }
}

// Loads keys and queries of `count` tokens from `row` on, and divides them by their L2 norms. Has barriers, also before
// it overwrites those of the tile before.
fn load_tile(row: u32, count: u32, key_head: u32, local: u32) {
    workgroupBarrier();
    for (var x = local; x < count * call.d4; x += 64u) {
        let c = x % call.d4;
        let at = ((row + x / call.d4) * call.key_heads + key_head) * call.d_k + 4u * c;
        let has = rows_of(c);
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
    for (var x = local; x < 2u * count; x += 64u) {
        let at = (x / 2u) * call.d4;
        var squares = vec4<f32>(0.0);
        if x % 2u == 0u {
            for (var c = 0u; c < call.d4; c += 1u) {
                squares = fma(keys[at + c], keys[at + c], squares);
            }
            let factor = l2_factor(across(squares));
            for (var c = 0u; c < call.d4; c += 1u) {
                keys[at + c] *= factor;
            }
        } else {
            for (var c = 0u; c < call.d4; c += 1u) {
                squares = fma(queries[at + c], queries[at + c], squares);
            }
            let factor = l2_factor(across(squares));
            for (var c = 0u; c < call.d4; c += 1u) {
                queries[at + c] *= factor;
            }
        }
    }
    workgroupBarrier();
}

// Writes the column of the call's initial level states to `to`, merged for the first token.
fn start_column(owner: u32, j: u32, to: u32) {
    let size = call.d_k * call.d_v;
    let merged = countTrailingZeros(call.position) + 1u;
    for (var m = 1u; (call.position >> (m - 1u)) != 0u; m += 1u) {
        if ((call.position >> (m - 1u)) & 1u) == 0u {
            continue;
        }
        let lowest = select(m, 0u, m == merged);
        for (var i = 0u; i < call.d_k; i += 1u) {
            var x = 0.0;
            if call.has_initial == 1u {
                for (var low = lowest; low <= m; low += 1u) {
                    x += initial[(owner * call.initial_levels + low) * size + i * call.d_v + j];
                }
            }
            states[to + m * size + i * call.d_v] = x;
        }
    }
}

// One token, number `x` of the tile, at `position`: from the level states at `before` to those at `to`, which may be
// the same place. `row` is its row of gates. Returns the readout of the column.
fn step(x: u32, position: u32, row: u32, v: f32, before: u32, to: u32) -> f32 {
    let gate = gates[row];
    let alpha = exp(gate.x);
    let write = gate.y * v;
    let at = x * call.d4;
    let size = call.d_k * call.d_v;
    let merged = countTrailingZeros(~position) + 1u;
    var read = vec4<f32>(0.0);
    for (var c = 0u; c < call.d4; c += 1u) {
        let s = keys[at + c] * write;
        read = fma(s, queries[at + c], read);
        store_four(to + merged * size, c, s);
    }
    var out = weights[row * call.scales] * across(read);
    var column: array<vec4<f32>, D4>;
    for (var m = 1u; (position >> (m - 1u)) != 0u; m += 1u) {
        if ((position >> (m - 1u)) & 1u) == 0u {
            continue;
        }
        var held = vec4<f32>(0.0);
        for (var c = 0u; c < call.d4; c += 1u) {
            let s = load_four(before + m * size, c);
            held = fma(s, keys[at + c], held);
            column[c] = s;
        }
        let taken = -gate.y * alpha * across(held);
        let merges = m < merged;
        let goal = to + select(m, merged, merges) * size;
        read = vec4<f32>(0.0);
        for (var c = 0u; c < call.d4; c += 1u) {
            let s = fma(keys[at + c], vec4<f32>(taken), alpha * column[c]);
            read = fma(s, queries[at + c], read);
            if merges {
                store_four(goal, c, load_four(goal, c) + s);
            } else {
                store_four(goal, c, s);
            }
        }
        out = fma(weights[row * call.scales + min(m, call.scales - 1u)], across(read), out);
    }
    return out;
}


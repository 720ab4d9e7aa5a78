// Backward pass, from the last token to the first; see step.wgsl for the recurrence and its constants.
//
// D^m: gradient of the level states merged for the next token. Levels m ≤ z, with z as in step.wgsl, have the gradient
// D^(z+1), all others D^m. For each level in use, with S before the token, S' after it, u = α Sᵀk:
//   G = D + λ_m q doᵀ;   dλ_m = do·S'ᵀq;   dq += λ_m S' do;   g = Gᵀk
//   m = 0:  dv = β g;   dβ = v·g;   dk = β G v
//   m ≥ 1:  dβ −= u·g;   dk −= β (α S g + G u);   G ← G − β k gᵀ;   d log α += α <G, S>;   D^m = α G
//
// d_readout, d_value [B, T, Hv·d_v]; d_heads: dq, then dk [B·T, Hv, strips, d_k], sums over the columns of a strip and
// before the norm, then d log α, dβ, dλ [B·T, Hv, strips, 2 + NL]. Others as in kernel.wgsl.
// states [count, slots, levels, d_k, d_v]: scratch for the (batch row, value head) `first` … `first + count − 1`.
//
// A workgroup owns 64 columns of one (batch row, value head), an invocation one column. States are recomputed: a first
// pass writes those before every tile of TILE tokens to slots; then, tile by tile from the last, those before each token
// of the tile. The last slot has D. An invocation touches its own column only, so these need no barrier; sums over
// columns go through workgroup memory, 32 at a time. Each call does tiles begin … end − 1 of one phase: 0 for the first
// pass, 1 for the second. SCALES ≥ NL.

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key: array<f32>;
@group(0) @binding(2) var<storage, read> value: array<f32>;
@group(0) @binding(3) var<storage, read> gates: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> weights: array<f32>;
@group(0) @binding(5) var<storage, read> initial: array<f32>;
@group(0) @binding(6) var<storage, read> d_readout: array<f32>;
@group(0) @binding(7) var<storage, read_write> states: array<f32>;
@group(0) @binding(8) var<storage, read_write> d_heads: array<f32>;
@group(0) @binding(9) var<storage, read_write> d_value: array<f32>;

// Terms of the columns, [32, 65].
var<workgroup> terms: array<f32, 2080>;

// Contributions of one column to the gradients of its token.
var<private> d_query: array<vec4<f32>, D4>;
var<private> d_key: array<vec4<f32>, D4>;
var<private> d_weights: array<f32, SCALES>;
var<private> d_beta: f32;
var<private> d_log_alpha: f32;

fn clear_token() {
    for (var c = 0u; c < call.d4; c += 1u) {
        d_query[c] = vec4<f32>(0.0);
        d_key[c] = vec4<f32>(0.0);
    }
    for (var l = 0u; l < call.scales; l += 1u) {
        d_weights[l] = 0.0;
    }
    d_beta = 0.0;
    d_log_alpha = 0.0;
}

// One token backward for one column: level states before it at `before`, D at `grad`. Returns dv.
fn step_back(x: u32, position: u32, row: u32, v: f32, d_out: f32, before: u32, grad: u32) -> f32 {
    let gate = gates[row];
    let alpha = exp(gate.x);
    let beta = gate.y;
    let at = x * call.d4;
    let size = call.d_k * call.d_v;
    let merged = countTrailingZeros(~position) + 1u;

    var read_weight = d_out * weights[row * call.scales];
    var along = vec4<f32>(0.0);
    var read = vec4<f32>(0.0);
    for (var c = 0u; c < call.d4; c += 1u) {
        let k = keys[at + c];
        let q = queries[at + c];
        let g = fma(q, vec4<f32>(read_weight), load_four(grad + merged * size, c));
        along = fma(g, k, along);
        read = fma(k, q, read);
        d_query[c] = k * (beta * v * read_weight);
        d_key[c] = g * (beta * v);
    }
    let g_zero = across(along);
    d_weights[0] = beta * v * across(read) * d_out;
    d_beta = v * g_zero;

    var state: array<vec4<f32>, D4>;
    var gradient: array<vec4<f32>, D4>;
    for (var m = 1u; (position >> (m - 1u)) != 0u; m += 1u) {
        if ((position >> (m - 1u)) & 1u) == 0u {
            continue;
        }
        let l = min(m, call.scales - 1u);
        read_weight = d_out * weights[row * call.scales + l];
        let source = grad + select(m, merged, m < merged) * size;
        var held = vec4<f32>(0.0);
        along = vec4<f32>(0.0);
        for (var c = 0u; c < call.d4; c += 1u) {
            let s = alpha * load_four(before + m * size, c);
            let g = fma(queries[at + c], vec4<f32>(read_weight), load_four(source, c));
            held = fma(s, keys[at + c], held);
            along = fma(g, keys[at + c], along);
            state[c] = s;
            gradient[c] = g;
        }
        let u = across(held);
        let g_key = across(along);
        d_beta = fma(-u, g_key, d_beta);
        read = vec4<f32>(0.0);
        var inner = vec4<f32>(0.0);
        for (var c = 0u; c < call.d4; c += 1u) {
            let k = keys[at + c];
            let s = state[c];
            let after = fma(k, vec4<f32>(-beta * u), s);
            read = fma(after, queries[at + c], read);
            d_query[c] = fma(after, vec4<f32>(read_weight), d_query[c]);
            d_key[c] = fma(s, vec4<f32>(-beta * g_key), fma(gradient[c], vec4<f32>(-beta * u), d_key[c]));
            let g = fma(k, vec4<f32>(-beta * g_key), gradient[c]);
            inner = fma(g, s, inner);
            store_four(grad + m * size, c, alpha * g);
        }
        d_weights[l] = fma(across(read), d_out, d_weights[l]);
        d_log_alpha += across(inner);
    }
    return beta * g_zero;
}

// Term `number` of the column: dq, dk, d log α, dβ, dλ.
fn term(number: u32) -> f32 {
    if number < call.d_k {
        return d_query[number / 4u][number % 4u];
    }
    let i = number - call.d_k;
    if i < call.d_k {
        return d_key[i / 4u][i % 4u];
    }
    let scalar = i - call.d_k;
    if scalar == 0u {
        return d_log_alpha;
    }
    if scalar == 1u {
        return d_beta;
    }
    return d_weights[min(scalar - 2u, SCALES - 1u)];
}

// Adds the terms of all columns of the strip and writes the sums. Has barriers.
fn add_columns(row: u32, strip: u32, local: u32) {
    let heads = call.batch * call.tokens * call.value_heads * call.strips;
    let own = row * call.strips + strip;
    let scalars = 2u + call.scales;
    let total = 2u * call.d_k + scalars;
    for (var first = 0u; first < total; first += 32u) {
        let count = min(32u, total - first);
        for (var n = 0u; n < count; n += 4u) {
            for (var e = 0u; e < 4u; e += 1u) {
                terms[(n + e) * 65u + local] = term(first + n + e);
            }
        }
        workgroupBarrier();
        if local < count {
            var sum = 0.0;
            for (var column = 0u; column < min(64u, call.d_v); column += 4u) {
                // Columns past the last are zero.
                for (var e = 0u; e < 4u; e += 1u) {
                    sum += terms[local * 65u + column + e];
                }
            }
            let number = first + local;
            if number < call.d_k {
                d_heads[own * call.d_k + number] = sum;
            } else if number < 2u * call.d_k {
                d_heads[(heads + own) * call.d_k + number - call.d_k] = sum;
            } else {
                d_heads[2u * heads * call.d_k + own * scalars + number - 2u * call.d_k] = sum;
            }
        }
        workgroupBarrier();
    }
}

@compute @workgroup_size(64)
fn backward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    let place = group / call.strips;
    if place >= call.count {
        return;
    }
    let strip = group % call.strips;
    let owner = call.first + place;
    let h = owner % call.value_heads;
    let b = owner / call.value_heads;
    let j = strip * 64u + local;
    let owns = j < call.d_v;
    let key_head = h / (call.value_heads / call.key_heads);
    let slot = call.levels * call.d_k * call.d_v;
    // Slots: before each tile, before each token of a tile but its first, D.
    let own = place * call.slots * slot + j;
    let tiles = (call.tokens + TILE - 1u) / TILE;
    let inside = own + tiles * slot;
    let grad = own + (call.slots - 1u) * slot;
    if owns && call.phase == 0u && call.begin == 0u {
        start_column(owner, j, own);
        for (var i = 0u; i < call.levels * call.d_k; i += 1u) {
            states[grad + i * call.d_v] = 0.0;
        }
    }
    // One of these two loops has no turn.
    for (var tile = call.begin; tile < select(call.end, 0u, call.phase == 1u); tile += 1u) {
        let first = tile * TILE;
        load_tile(b * call.tokens + first, TILE, key_head, local);
        if owns {
            for (var x = 0u; x < TILE; x += 1u) {
                let row = (b * call.tokens + first + x) * call.value_heads + h;
                let before = select(inside, own + tile * slot, x == 0u);
                let to = select(inside, own + (tile + 1u) * slot, x == TILE - 1u);
                _ = step(x, call.position + first + x, row, value[row * call.d_v + j], before, to);
            }
        }
    }
    for (var tile = select(call.begin, call.end, call.phase == 1u); tile > call.begin; tile -= 1u) {
        let first = (tile - 1u) * TILE;
        let count = min(TILE, call.tokens - first);
        let start = own + (tile - 1u) * slot;
        load_tile(b * call.tokens + first, count, key_head, local);
        if owns {
            for (var x = 0u; x + 1u < count; x += 1u) {
                let row = (b * call.tokens + first + x) * call.value_heads + h;
                let before = select(inside + (max(x, 1u) - 1u) * slot, start, x == 0u);
                let v = value[row * call.d_v + j];
                _ = step(x, call.position + first + x, row, v, before, inside + x * slot);
            }
        }
        for (var back = count; back > 0u; back -= 1u) {
            let x = back - 1u;
            let row = (b * call.tokens + first + x) * call.value_heads + h;
            clear_token();
            if owns {
                let before = select(inside + (max(x, 1u) - 1u) * slot, start, x == 0u);
                let at = row * call.d_v + j;
                d_value[at] =
                    step_back(x, call.position + first + x, row, value[at], d_readout[at], before, grad);
            }
            add_columns(row, strip, local);
        }
    }
}

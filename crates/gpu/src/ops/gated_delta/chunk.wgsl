// Backward pass, step 2: gradients of queries, keys and gates of one chunk of n ≤ 32 tokens, from the state S before
// the chunk and the gradient G of the state after it.
//
// With q, k normalised, a_t = Π_{r≤t} α_r, A = a_n, Γ_tr = Π_{r<u≤t} α_u for r ≤ t (all formed as exp of a sum of
// log α, so that no decay is a quotient of numbers that have vanished):
//   E_tr = Γ_tr β_r (do_t·e_r) for r ≤ t;   F_tr = Γ_tr β_t β_r (dw_t·e_r) for r < t;   F_rt = F_tr
//   dq_t = s (a_t S do_t + Σ_{r≤t} E_tr k_r)
//   dk_t = (A / a_t) β_t G e_t + s Σ_{r≥t} E_rt q_r − β_t a_t S dw_t − Σ_{r≠t} F_rt k_r
//   dβ_t = dw_t·e_t
//   d log α_t = A <G, S> + Σ_{r≥t} x_r + Σ_{r<t} y_r + Σ_{u≥t>r} Y_ur   with
//   x_r = a_r (s q_r·S do_r − β_r k_r·S dw_r),   y_r = (A / a_r) β_r k_r·G e_r,   Y_ur = s (q_u·k_r) E_ur − (k_u·k_r) F_ur
//
// Tensors: see reverse.wgsl and full.wgsl. d_heads: dq [B·T, Hv, d_k] and dk [B·T, Hv, d_k] before the norm and for
// each value head, then d log α · log α [B·T, Hv].
//
// A workgroup owns one chunk of one value head: chunks do not depend on each other. S and G do not fit into workgroup
// memory, so they pass through it in blocks of 64 rows × 16 columns. An invocation owns one row of S and G for 8 tokens
// (dq, dk), and four entries of the 32 × 32 matrices.

//!include group
//!include delta

struct Call {
    count: u32,
    batch: u32,
    tokens: u32,
    key_heads: u32,
    value_heads: u32,
    d_k: u32,
    d_v: u32,
    errors: u32,
    columns: u32,
    scale: f32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key: array<f32>;
@group(0) @binding(2) var<storage, read> gates: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> list: array<u32>;
@group(0) @binding(4) var<storage, read> d_readout: array<f32>;
@group(0) @binding(5) var<storage, read> kept: array<f32>;
@group(0) @binding(6) var<storage, read> back: array<f32>;
@group(0) @binding(7) var<storage, read_write> d_heads: array<f32>;
@group(0) @binding(8) var<storage, read_write> d_retention: array<f32>;
@group(0) @binding(9) var<storage, read_write> d_write: array<f32>;

// Columns of one block for four tokens each, [16, 8]: do, e, dw; or q, k.
var<workgroup> tile_o: array<vec4<f32>, 128>;
var<workgroup> tile_e: array<vec4<f32>, 128>;
var<workgroup> tile_w: array<vec4<f32>, 128>;
// Matrices over pairs of tokens, [32, 8] of four: E_rt and E_tr at [r, t], F.
var<workgroup> read_down: array<vec4<f32>, 256>;
var<workgroup> read_up: array<vec4<f32>, 256>;
var<workgroup> written: array<vec4<f32>, 256>;
// A block of S, [16, 65], then one of G; or terms to add over rows, [64, 33].
var<workgroup> block: array<f32, 2112>;
var<workgroup> log_alpha: array<f32, 32>;
var<workgroup> beta: array<f32, 32>;
var<workgroup> decay_before: array<f32, 32>;
var<workgroup> decay_after: array<f32, 32>;
var<workgroup> key_factor: array<f32, 32>;
var<workgroup> query_factor: array<f32, 32>;
var<workgroup> d_beta: array<f32, 32>;
var<workgroup> terms_x: array<f32, 32>;
var<workgroup> terms_y: array<f32, 32>;

@compute @workgroup_size(256)
fn chunk(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    let h = group % call.value_heads;
    let index = group / call.value_heads;
    if index >= call.count {
        return;
    }
    let entry = call.batch + 1u + 3u * index;
    var b = 0u;
    while list[b + 1u] <= index {
        b += 1u;
    }
    let start = list[entry];
    let n = list[entry + 1u] - start;
    let first_row = b * call.tokens + start;
    let key_head = h / (call.value_heads / call.key_heads);
    let key_stride = call.key_heads * call.d_k;
    let value_stride = call.value_heads * call.d_v;
    let key_base = first_row * key_stride + key_head * call.d_k;
    let value_base = first_row * value_stride + h * call.d_v;
    let state_base = call.errors + (index * call.value_heads + h) * call.d_k * call.d_v;

    // Gates and norms. Tokens past the end have zeros.
    if local < 64u {
        let t = local % 32u;
        var squares = 0.0;
        var gate = vec4<f32>(0.0);
        if t < n {
            let at = key_base + t * key_stride;
            if local < 32u {
                for (var i = 0u; i < call.d_k; i += 1u) {
                    squares = fma(key[at + i], key[at + i], squares);
                }
            } else {
                for (var i = 0u; i < call.d_k; i += 1u) {
                    squares = fma(query[at + i], query[at + i], squares);
                }
            }
            gate = gates[(first_row + t) * call.value_heads + h];
        }
        if local < 32u {
            key_factor[t] = l2_factor(squares);
            log_alpha[t] = gate.x;
            beta[t] = gate.y;
            terms_x[t] = 0.0;
            terms_y[t] = 0.0;
        } else {
            query_factor[t] = l2_factor(squares);
        }
    }
    workgroupBarrier();
    if local < 32u {
        var sum = 0.0;
        for (var r = 0u; r <= local; r += 1u) {
            sum += log_alpha[r];
        }
        decay_before[local] = exp(sum);
        sum = 0.0;
        for (var r = local + 1u; r < n; r += 1u) {
            sum += log_alpha[r];
        }
        decay_after[local] = exp(sum);
    }

    // Products of pairs of tokens (u, r), r one of four.
    let u = local / 8u;
    let r4 = local % 8u;
    var read = vec4<f32>(0.0);
    var read_back = vec4<f32>(0.0);
    var wrote = vec4<f32>(0.0);
    var wrote_back = vec4<f32>(0.0);
    for (var j0 = 0u; j0 < call.d_v; j0 += call.columns) {
        let width = min(call.columns, call.d_v - j0);
        for (var x = local; x < 384u; x += 256u) {
            let j = x % 16u;
            let four = (x / 16u) % 8u;
            var values = vec4<f32>(0.0);
            for (var e = 0u; e < min(4u, max(n, 4u * four) - 4u * four); e += 1u) {
                if j < width {
                    let at = value_base + (4u * four + e) * value_stride + j0 + j;
                    if x < 128u {
                        values[e] = d_readout[at];
                    } else if x < 256u {
                        values[e] = kept[at];
                    } else {
                        values[e] = back[at];
                    }
                }
            }
            if x < 128u {
                tile_o[j * 8u + four] = values;
            } else if x < 256u {
                tile_e[j * 8u + four] = values;
            } else {
                tile_w[j * 8u + four] = values;
            }
        }
        workgroupBarrier();
        for (var j = 0u; j < width; j += 1u) {
            let at = j * 8u + u / 4u;
            let e = tile_e[at][u % 4u];
            let others = tile_e[j * 8u + r4];
            read = fma(vec4<f32>(tile_o[at][u % 4u]), others, read);
            read_back = fma(tile_o[j * 8u + r4], vec4<f32>(e), read_back);
            wrote = fma(vec4<f32>(tile_w[at][u % 4u]), others, wrote);
            wrote_back = fma(tile_w[j * 8u + r4], vec4<f32>(e), wrote_back);
        }
        workgroupBarrier();
    }
    var query_key = vec4<f32>(0.0);
    var key_key = vec4<f32>(0.0);
    for (var i0 = 0u; i0 < call.d_k; i0 += call.columns) {
        let width = min(call.columns, call.d_k - i0);
        let i = local % 16u;
        let four = (local / 16u) % 8u;
        var values = vec4<f32>(0.0);
        for (var e = 0u; e < min(4u, max(n, 4u * four) - 4u * four); e += 1u) {
            if i < width {
                let t = 4u * four + e;
                let at = key_base + t * key_stride + i0 + i;
                if local < 128u {
                    values[e] = query[at] * query_factor[t];
                } else {
                    values[e] = key[at] * key_factor[t];
                }
            }
        }
        if local < 128u {
            tile_o[i * 8u + four] = values;
        } else {
            tile_e[i * 8u + four] = values;
        }
        workgroupBarrier();
        for (var i = 0u; i < width; i += 1u) {
            let at = i * 8u + u / 4u;
            let others = tile_e[i * 8u + r4];
            query_key = fma(vec4<f32>(tile_o[at][u % 4u]), others, query_key);
            key_key = fma(vec4<f32>(tile_e[at][u % 4u]), others, key_key);
        }
        workgroupBarrier();
    }
    var down = vec4<f32>(0.0);
    var up = vec4<f32>(0.0);
    var write_pair = vec4<f32>(0.0);
    var pair = vec4<f32>(0.0);
    for (var e = 0u; e < 4u; e += 1u) {
        let r = 4u * r4 + e;
        var sum = 0.0;
        for (var v = min(u, r) + 1u; v <= max(u, r); v += 1u) {
            sum += log_alpha[v];
        }
        let decay = exp(sum);
        if r <= u {
            down[e] = decay * beta[r] * read[e];
        }
        if r >= u {
            up[e] = decay * beta[u] * read_back[e];
        }
        if r < u {
            write_pair[e] = decay * beta[u] * beta[r] * wrote[e];
            pair[e] = call.scale * query_key[e] * down[e] - key_key[e] * write_pair[e];
        } else if r > u {
            write_pair[e] = decay * beta[u] * beta[r] * wrote_back[e];
        } else {
            d_beta[u] = wrote[e];
        }
    }
    read_down[local] = down;
    read_up[local] = up;
    written[local] = write_pair;

    // Products with the states, 64 rows at a time.
    let own = local % 64u;
    let t8 = local / 64u;
    var inner = 0.0;
    for (var i0 = 0u; i0 < call.d_k; i0 += 64u) {
        let height = min(64u, call.d_k - i0);
        var s_o_low = vec4<f32>(0.0);
        var s_o_high = vec4<f32>(0.0);
        var s_w_low = vec4<f32>(0.0);
        var s_w_high = vec4<f32>(0.0);
        var g_e_low = vec4<f32>(0.0);
        var g_e_high = vec4<f32>(0.0);
        for (var j0 = 0u; j0 < call.d_v; j0 += call.columns) {
            let width = min(call.columns, call.d_v - j0);
            for (var x = local; x < 384u; x += 256u) {
                let j = x % 16u;
                let four = (x / 16u) % 8u;
                var values = vec4<f32>(0.0);
                for (var e = 0u; e < min(4u, max(n, 4u * four) - 4u * four); e += 1u) {
                    if j < width {
                        let at = value_base + (4u * four + e) * value_stride + j0 + j;
                        if x < 128u {
                            values[e] = d_readout[at];
                        } else if x < 256u {
                            values[e] = kept[at];
                        } else {
                            values[e] = back[at];
                        }
                    }
                }
                if x < 128u {
                    tile_o[j * 8u + four] = values;
                } else if x < 256u {
                    tile_e[j * 8u + four] = values;
                } else {
                    tile_w[j * 8u + four] = values;
                }
            }
            for (var x = local; x < 1024u; x += 256u) {
                let j = x % 16u;
                let i = x / 16u;
                var s = 0.0;
                var g = 0.0;
                if j < width && i < height {
                    let at = state_base + (i0 + i) * call.d_v + j0 + j;
                    s = kept[at];
                    g = back[at];
                }
                block[j * 65u + i] = s;
                block[1040u + j * 65u + i] = g;
            }
            workgroupBarrier();
            for (var j = 0u; j < width; j += 1u) {
                let s = block[j * 65u + own];
                let g = block[1040u + j * 65u + own];
                let at = j * 8u + 2u * t8;
                inner = fma(s, g, inner);
                s_o_low = fma(vec4<f32>(s), tile_o[at], s_o_low);
                s_o_high = fma(vec4<f32>(s), tile_o[at + 1u], s_o_high);
                s_w_low = fma(vec4<f32>(s), tile_w[at], s_w_low);
                s_w_high = fma(vec4<f32>(s), tile_w[at + 1u], s_w_high);
                g_e_low = fma(vec4<f32>(g), tile_e[at], g_e_low);
                g_e_high = fma(vec4<f32>(g), tile_e[at + 1u], g_e_high);
            }
            workgroupBarrier();
        }

        // dq and dk of row `own` and eight tokens; the terms of d log α that are sums over rows.
        let has_row = own < height;
        let i = key_base + i0 + own;
        var dq_low = vec4<f32>(0.0);
        var dq_high = vec4<f32>(0.0);
        var dk_low = vec4<f32>(0.0);
        var dk_high = vec4<f32>(0.0);
        if has_row {
            for (var r = 0u; r < n; r += 1u) {
                let k = vec4<f32>(key[i + r * key_stride] * key_factor[r]);
                let q = vec4<f32>(call.scale * query[i + r * key_stride] * query_factor[r]);
                let at = r * 8u + 2u * t8;
                dq_low = fma(read_up[at], k, dq_low);
                dq_high = fma(read_up[at + 1u], k, dq_high);
                dk_low = fma(read_down[at], q, fma(-written[at], k, dk_low));
                dk_high = fma(read_down[at + 1u], q, fma(-written[at + 1u], k, dk_high));
            }
        }
        for (var e = 0u; e < 8u; e += 1u) {
            let t = 8u * t8 + e;
            let low = e < 4u;
            let c = e % 4u;
            let s_o = decay_before[t] * select(s_o_high[c], s_o_low[c], low);
            let s_w = beta[t] * decay_before[t] * select(s_w_high[c], s_w_low[c], low);
            let g_e = beta[t] * decay_after[t] * select(g_e_high[c], g_e_low[c], low);
            var x = 0.0;
            if has_row && t < n {
                let k = key[i + t * key_stride] * key_factor[t];
                let q = query[i + t * key_stride] * query_factor[t];
                x = call.scale * q * s_o - k * s_w;
                let to = ((first_row + t) * call.value_heads + h) * call.d_k + i0 + own;
                d_heads[to] = call.scale * (s_o + select(dq_high[c], dq_low[c], low));
                let rows = call.batch * call.tokens * call.value_heads * call.d_k;
                d_heads[rows + to] = g_e - s_w + select(dk_high[c], dk_low[c], low);
            }
            block[own * 33u + t] = x;
        }
        workgroupBarrier();
        if local < 32u {
            var sum = terms_x[local];
            for (var row = 0u; row < height; row += 1u) {
                sum += block[row * 33u + local];
            }
            terms_x[local] = sum;
        }
        workgroupBarrier();
        for (var e = 0u; e < 8u; e += 1u) {
            let t = 8u * t8 + e;
            var y = 0.0;
            if has_row && t < n {
                let g_e = select(g_e_high[e % 4u], g_e_low[e % 4u], e < 4u);
                y = beta[t] * decay_after[t] * g_e * key[i + t * key_stride] * key_factor[t];
            }
            block[own * 33u + t] = y;
        }
        workgroupBarrier();
        if local < 32u {
            var sum = terms_y[local];
            for (var row = 0u; row < height; row += 1u) {
                sum += block[row * 33u + local];
            }
            terms_y[local] = sum;
        }
        workgroupBarrier();
    }

    if local < 64u {
        block[local] = inner;
    }
    // E is not needed any more: Y takes its place.
    read_down[local] = pair;
    workgroupBarrier();
    if local < n {
        var d_log = 0.0;
        for (var row = 0u; row < min(64u, call.d_k); row += 1u) {
            d_log += block[row];
        }
        d_log *= decay_before[n - 1u];
        for (var r = 0u; r < n; r += 1u) {
            d_log += select(terms_y[r], terms_x[r], r >= local);
        }
        for (var v = local; v < n; v += 1u) {
            for (var r = 0u; r < local; r += 1u) {
                d_log += read_down[v * 8u + r / 4u][r % 4u];
            }
        }
        let at = (first_row + local) * call.value_heads + h;
        let gate = gates[at];
        d_retention[at] = d_log * gate.z;
        d_write[at] = d_beta[local] * gate.w;
        let rows = call.batch * call.tokens * call.value_heads;
        d_heads[2u * rows * call.d_k + at] = d_log * gate.x;
    }
}

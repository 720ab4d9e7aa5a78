// Backward pass, step 3.
//
// finish:      sums over the value heads of a key head, and through the L2 norm y = r x: dx = r (dy − y <dy, y>)
// finish_all:  these, and d dt_bias = Σ d_retention,  d a_log = Σ d log α · log α,  over all rows
//
// query, key, d_query, d_key [rows, Hk·d_k]; d_heads: dq [rows, Hv, d_k], dk [rows, Hv, d_k], then d log α · log α
// [rows, Hv]; d_retention [rows, Hv]; d_dt_bias, d_a_log [Hv]. A workgroup of 64 owns one key head of one row; the last
// workgroups of `finish_all` own one value head each, for which each invocation adds every 64th row, and then their sums
// are added in a fixed order.

//!include group
//!include sum
//!include delta

struct Call { count: u32, key_heads: u32, value_heads: u32, d_k: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key: array<f32>;
@group(0) @binding(2) var<storage, read> d_heads: array<f32>;
@group(0) @binding(3) var<storage, read_write> d_query: array<f32>;
@group(0) @binding(4) var<storage, read_write> d_key: array<f32>;
@group(0) @binding(5) var<storage, read> d_retention: array<f32>;
@group(0) @binding(6) var<storage, read_write> d_dt_bias: array<f32>;
@group(0) @binding(7) var<storage, read_write> d_a_log: array<f32>;

fn finish_head(group: u32, local: u32) {
    let base = group * call.d_k;
    let heads = call.value_heads / call.key_heads;
    // Value heads of one key head follow each other, so those of `group` start here.
    let first = group * heads * call.d_k;
    let keys = call.count * call.value_heads * call.d_k;
    var q_squares = 0.0;
    var k_squares = 0.0;
    var q_along = 0.0;
    var k_along = 0.0;
    for (var i = local; i < call.d_k; i += 64u) {
        var dq = 0.0;
        var dk = 0.0;
        for (var v = 0u; v < heads; v += 1u) {
            dq += d_heads[first + v * call.d_k + i];
            dk += d_heads[keys + first + v * call.d_k + i];
        }
        let q = query[base + i];
        let k = key[base + i];
        q_squares = fma(q, q, q_squares);
        k_squares = fma(k, k, k_squares);
        q_along = fma(q, dq, q_along);
        k_along = fma(k, dk, k_along);
        d_query[base + i] = dq;
        d_key[base + i] = dk;
    }
    let q_factor = l2_factor(workgroup_sum(q_squares, local));
    let k_factor = l2_factor(workgroup_sum(k_squares, local));
    q_along = workgroup_sum(q_along, local) * q_factor;
    k_along = workgroup_sum(k_along, local) * k_factor;
    for (var i = local; i < call.d_k; i += 64u) {
        d_query[base + i] = q_factor * (d_query[base + i] - query[base + i] * q_factor * q_along);
        d_key[base + i] = k_factor * (d_key[base + i] - key[base + i] * k_factor * k_along);
    }
}

fn totals(h: u32, local: u32) {
    let start = 2u * call.count * call.value_heads * call.d_k;
    var bias = 0.0;
    var rate = 0.0;
    for (var row = local; row < call.count; row += 64u) {
        bias += d_retention[row * call.value_heads + h];
        rate += d_heads[start + row * call.value_heads + h];
    }
    bias = workgroup_sum(bias, local);
    rate = workgroup_sum(rate, local);
    if local == 0u {
        d_dt_bias[h] = bias;
        d_a_log[h] = rate;
    }
}

@compute @workgroup_size(64)
fn finish(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    if group < call.count * call.key_heads {
        finish_head(group, local);
    }
}

@compute @workgroup_size(64)
fn finish_all(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    let heads = call.count * call.key_heads;
    if group < heads {
        finish_head(group, local);
    } else if group - heads < call.value_heads {
        totals(group - heads, local);
    }
}

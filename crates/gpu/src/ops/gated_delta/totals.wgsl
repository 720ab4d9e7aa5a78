// Backward pass, step 4: d dt_bias = Σ d_retention,  d a_log = Σ d log α · log α,  over all rows.
//
// d_retention [rows, heads]; d_heads: d log α · log α [rows, heads] from element `start`; d_dt_bias, d_a_log [heads].
// A workgroup of 64 owns one head; each invocation adds every 64th row, then their sums are added in a fixed order.

//!include group
//!include sum

struct Call { rows: u32, heads: u32, start: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> d_retention: array<f32>;
@group(0) @binding(1) var<storage, read> d_heads: array<f32>;
@group(0) @binding(2) var<storage, read_write> d_dt_bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> d_a_log: array<f32>;

@compute @workgroup_size(64)
fn totals(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let h = group_index(workgroup, groups);
    if h >= call.heads {
        return;
    }
    var bias = 0.0;
    var rate = 0.0;
    for (var row = local; row < call.rows; row += 64u) {
        bias += d_retention[row * call.heads + h];
        rate += d_heads[call.start + row * call.heads + h];
    }
    bias = workgroup_sum(bias, local);
    rate = workgroup_sum(rate, local);
    if local == 0u {
        d_dt_bias[h] = bias;
        d_a_log[h] = rate;
    }
}

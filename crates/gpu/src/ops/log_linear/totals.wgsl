// Sums over all rows: d dt_bias = Σ d_retention, d a_log and d L = Σ terms.
//
// d_retention [rows, heads]; terms [rows, heads, 1 + NL]; d_dt_bias, d_a_log [heads]; d_level_scale [heads, NL].
// A workgroup of 64 owns one sum; each invocation adds every 64th row, then their sums are added in a fixed order.

//!include group
//!include sum

struct Call { rows: u32, heads: u32, scales: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> d_retention: array<f32>;
@group(0) @binding(1) var<storage, read> terms: array<f32>;
@group(0) @binding(2) var<storage, read_write> d_dt_bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> d_a_log: array<f32>;
@group(0) @binding(4) var<storage, read_write> d_level_scale: array<f32>;

@compute @workgroup_size(64)
fn totals(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    let sums = 2u + call.scales;
    let h = group / sums;
    let number = group % sums;
    if h >= call.heads {
        return;
    }
    var sum = 0.0;
    for (var row = local; row < call.rows; row += 64u) {
        let at = row * call.heads + h;
        if number == 0u {
            sum += d_retention[at];
        } else {
            sum += terms[at * (1u + call.scales) + number - 1u];
        }
    }
    sum = workgroup_sum(sum, local);
    if local == 0u {
        if number == 0u {
            d_dt_bias[h] = sum;
        } else if number == 1u {
            d_a_log[h] = sum;
        } else {
            d_level_scale[h * call.scales + number - 2u] = sum;
        }
    }
}

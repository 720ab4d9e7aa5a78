// y_i = e^(x_i − max x) / Σ_j e^(x_j − max x), for each row;  a row of only −inf gives zeros
//
// x, y [rows, n]. A workgroup owns a row; invocation t owns every 64th element from t on, so that only the maximum and
// the sum pass through workgroup memory.

//!include group
//!include sum

struct Call { rows: u32, n: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;

// The least finite number: below it is only −inf.
const LEAST: f32 = -3.4028234e38;

fn workgroup_max(value: f32, local: u32) -> f32 {
    sum_parts[local] = value;
    workgroupBarrier();
    for (var step = SUM_SIZE / 2u; step > 0u; step /= 2u) {
        if local < step {
            sum_parts[local] = max(sum_parts[local], sum_parts[local + step]);
        }
        workgroupBarrier();
    }
    let top = sum_parts[0];
    workgroupBarrier();
    return top;
}

@compute @workgroup_size(64)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = group_index(workgroup, groups);
    if row >= call.rows {
        return;
    }
    let start = row * call.n;
    let end = start + call.n;
    var top = LEAST;
    for (var i = start + local; i < end; i += SUM_SIZE) {
        top = max(top, x[i]);
    }
    top = workgroup_max(top, local);
    var sum = 0.0;
    for (var i = start + local; i < end; i += SUM_SIZE) {
        var e = 0.0;
        if x[i] >= LEAST {
            e = exp(x[i] - top);
        }
        sum += e;
        y[i] = e;
    }
    sum = workgroup_sum(sum, local);
    if sum > 0.0 {
        for (var i = start + local; i < end; i += SUM_SIZE) {
            y[i] = y[i] / sum;
        }
    }
}

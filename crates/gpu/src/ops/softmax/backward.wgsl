// dx = y ∘ (dy − Σ_j y_j dy_j), for each row
//
// y, dy, dx [rows, n]. A workgroup owns a row; invocation t owns every 64th element from t on.

//!include group
//!include sum

struct Call { rows: u32, n: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> y: array<f32>;
@group(0) @binding(1) var<storage, read> dy: array<f32>;
@group(0) @binding(2) var<storage, read_write> dx: array<f32>;

@compute @workgroup_size(64)
fn backward(
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
    var sum = 0.0;
    for (var i = start + local; i < end; i += SUM_SIZE) {
        sum = fma(y[i], dy[i], sum);
    }
    sum = workgroup_sum(sum, local);
    for (var i = start + local; i < end; i += SUM_SIZE) {
        dx[i] = y[i] * (dy[i] - sum);
    }
}

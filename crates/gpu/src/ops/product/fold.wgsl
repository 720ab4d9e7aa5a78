// y = Σ_p part_p (+ y), in the order of p
//
// part [pieces, n], y [n]. A workgroup owns 256 numbers of y, an invocation one.

//!include group

struct Call { n: u32, pieces: u32, add: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> part: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn fold(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i >= call.n {
        return;
    }
    var sum = 0.0;
    for (var p = 0u; p < call.pieces; p++) {
        sum += part[p * call.n + i];
    }
    if call.add != 0u {
        sum += y[i];
    }
    y[i] = sum;
}

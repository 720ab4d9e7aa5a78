// y ← factor · y
//
// y: n numbers; factor: one number on the device. A workgroup owns 256 numbers, an invocation one.

//!include group

struct Call { n: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> factor: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn scale(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        y[i] = factor[0] * y[i];
    }
}

// y = value
//
// y: n numbers. A workgroup owns 256 of them, an invocation one.

//!include group

struct Call { n: u32, value: f32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn full(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        y[i] = call.value;
    }
}

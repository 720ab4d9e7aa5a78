// y[o, c, i] = x[o, i]
//
// x [outer, inner], y [outer, count, inner]. A workgroup owns 256 numbers of y, an invocation one.

//!include group

struct Call { n: u32, count: u32, inner: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn expand(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = group_index(workgroup, groups) * 256u + local;
    if at < call.n {
        let row = at / call.inner;
        y[at] = x[row / call.count * call.inner + (at - row * call.inner)];
    }
}

// y = SiLU(gate) ∘ up
//
// gate, up, y: n numbers each. A workgroup owns 256 numbers, an invocation one: nothing is shared, so nothing limits
// the bandwidth.

//!include group
//!include activation

struct Call { n: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> gate: array<f32>;
@group(0) @binding(1) var<storage, read> up: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        y[i] = silu(gate[i]) * up[i];
    }
}

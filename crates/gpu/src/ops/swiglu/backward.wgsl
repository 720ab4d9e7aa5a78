// d_gate = dy ∘ up ∘ SiLU'(gate);  d_up = dy ∘ SiLU(gate)
//
// gate, up, dy, d_gate, d_up: n numbers each. A workgroup owns 256 numbers, an invocation one.

//!include group
//!include activation

struct Call { n: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> gate: array<f32>;
@group(0) @binding(1) var<storage, read> up: array<f32>;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
@group(0) @binding(3) var<storage, read_write> d_gate: array<f32>;
@group(0) @binding(4) var<storage, read_write> d_up: array<f32>;

@compute @workgroup_size(256)
fn backward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        d_gate[i] = dy[i] * up[i] * silu_slope(gate[i]);
        d_up[i] = dy[i] * silu(gate[i]);
    }
}

// d_gate = dy ∘ up ∘ SiLU'(gate);  d_up = dy ∘ SiLU(gate)
//
// gate, up, dy, d_gate, d_up: n numbers each; they may come in two parts, the second from number `split` on, with
// tensors of their own. A workgroup owns 256 numbers, an invocation one.

//!include group
//!include activation

struct Call { n: u32, split: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> gate0: array<f32>;
@group(0) @binding(1) var<storage, read> gate1: array<f32>;
@group(0) @binding(2) var<storage, read> up0: array<f32>;
@group(0) @binding(3) var<storage, read> up1: array<f32>;
@group(0) @binding(4) var<storage, read> dy0: array<f32>;
@group(0) @binding(5) var<storage, read> dy1: array<f32>;
@group(0) @binding(6) var<storage, read_write> d_gate0: array<f32>;
@group(0) @binding(7) var<storage, read_write> d_gate1: array<f32>;
@group(0) @binding(8) var<storage, read_write> d_up0: array<f32>;
@group(0) @binding(9) var<storage, read_write> d_up1: array<f32>;

@compute @workgroup_size(256)
fn backward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.split {
        d_gate0[i] = dy0[i] * up0[i] * silu_slope(gate0[i]);
        d_up0[i] = dy0[i] * silu(gate0[i]);
    } else if i < call.n {
        let j = i - call.split;
        d_gate1[j] = dy1[j] * up1[j] * silu_slope(gate1[j]);
        d_up1[j] = dy1[j] * silu(gate1[j]);
    }
}

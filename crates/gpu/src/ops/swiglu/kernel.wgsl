// y = SiLU(gate) ∘ up
//
// gate, up, y: n numbers each; they may come in two parts, the second from number `split` on, with tensors of their own.
// A workgroup owns 256 numbers, an invocation one: nothing is shared, so nothing limits the bandwidth.

//!include group
//!include activation

struct Call { n: u32, split: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> gate0: array<f32>;
@group(0) @binding(1) var<storage, read> gate1: array<f32>;
@group(0) @binding(2) var<storage, read> up0: array<f32>;
@group(0) @binding(3) var<storage, read> up1: array<f32>;
@group(0) @binding(4) var<storage, read_write> y0: array<f32>;
@group(0) @binding(5) var<storage, read_write> y1: array<f32>;

@compute @workgroup_size(256)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.split {
        y0[i] = silu(gate0[i]) * up0[i];
    } else if i < call.n {
        let j = i - call.split;
        y1[j] = silu(gate1[j]) * up1[j];
    }
}

// δ = <do, o>;   d null = −π_∅ δ
//
// readout, gradient [rows, heads·d_v]     kept [rows, heads], see read.wgsl     d_null [rows, heads]
// numbers [rows, heads]: largest score, 1 / Σ exp(score − largest), δ, 1 / |q|
//
// A workgroup owns 64 pairs of a token and a head, an invocation one. The other kernels of the backward pass read
// these four numbers from one binding.

//!include group

@group(0) @binding(0) var<storage, read> readout: array<f32>;
@group(0) @binding(1) var<storage, read> gradient: array<f32>;
@group(0) @binding(2) var<storage, read> kept: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> numbers: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> d_null: array<f32>;

struct Call { count: u32, dv: u32, has_null: u32 }
var<immediate> call: Call;

@compute @workgroup_size(64)
fn delta(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = group_index(workgroup, groups) * 64u + lane;
    if i >= call.count {
        return;
    }
    var sum = 0.0;
    for (var j = 0u; j < call.dv; j++) {
        sum = fma(gradient[i * call.dv + j], readout[i * call.dv + j], sum);
    }
    let k = kept[i];
    numbers[i] = vec4<f32>(k.x, k.y, sum, k.w);
    if call.has_null == 1u {
        d_null[i] = -k.z * sum;
    }
}

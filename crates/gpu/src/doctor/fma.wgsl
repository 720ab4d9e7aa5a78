// y[i] = Σ x,   where each of 32 numbers x was replaced `turns` times by x·a + b, twice a turn
//
// y: n numbers. A workgroup owns 256 of them, an invocation one. The 32 chains of an invocation do not depend on each
// other, so that the arithmetic units have work while one of them waits: 128 FLOP a turn, and no memory traffic but y.

//!include group

struct Call { n: u32, turns: u32, a: f32, b: f32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn chains(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    let a = vec4<f32>(call.a);
    let b = vec4<f32>(call.b);
    var x0 = vec4<f32>(0.0, 1.0, 2.0, 3.0) + f32(local);
    var x1 = x0 + 4.0;
    var x2 = x0 + 8.0;
    var x3 = x0 + 12.0;
    var x4 = x0 + 16.0;
    var x5 = x0 + 20.0;
    var x6 = x0 + 24.0;
    var x7 = x0 + 28.0;
    for (var turn = 0u; turn < call.turns; turn++) {
        x0 = fma(x0, a, b);
        x1 = fma(x1, a, b);
        x2 = fma(x2, a, b);
        x3 = fma(x3, a, b);
        x4 = fma(x4, a, b);
        x5 = fma(x5, a, b);
        x6 = fma(x6, a, b);
        x7 = fma(x7, a, b);
        x0 = fma(x0, a, b);
        x1 = fma(x1, a, b);
        x2 = fma(x2, a, b);
        x3 = fma(x3, a, b);
        x4 = fma(x4, a, b);
        x5 = fma(x5, a, b);
        x6 = fma(x6, a, b);
        x7 = fma(x7, a, b);
    }
    let sum = x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7;
    if i < call.n {
        y[i] = sum.x + sum.y + sum.z + sum.w;
    }
}

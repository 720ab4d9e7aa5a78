// g ← clip · g
// m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²
// p ← keep · p − rate · m / (sqrt(v · root) + eps)
// with keep = 1 − lr · decay, rate = lr / (1 − β₁ᵗ), root = 1 / (1 − β₂ᵗ), computed on the host in f64
//
// p, m, v, g: n numbers each; p, m and v are changed in place. A workgroup owns 256 numbers, an invocation one.

//!include group

struct Call {
    n: u32,
    clip: f32,
    b1: f32,
    a1: f32,
    b2: f32,
    a2: f32,
    keep: f32,
    rate: f32,
    root: f32,
    eps: f32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> g: array<f32>;
@group(0) @binding(1) var<storage, read_write> p: array<f32>;
@group(0) @binding(2) var<storage, read_write> m: array<f32>;
@group(0) @binding(3) var<storage, read_write> v: array<f32>;

@compute @workgroup_size(256)
fn step(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        let gi = call.clip * g[i];
        let mi = fma(call.b1, m[i], call.a1 * gi);
        let vi = fma(call.b2, v[i], call.a2 * (gi * gi));
        m[i] = mi;
        v[i] = vi;
        p[i] = call.keep * p[i] - mi * call.rate / (sqrt(vi * call.root) + call.eps);
    }
}

// Gradients of the gate and level inputs of each token, from those of the gates:
// d_retention = d log α · d log α / d retention,  d_write = dβ · dβ / d write,  dp = dλ · σ(L w),  d_level = dp · L
//
// d_heads: d log α, dβ, dλ [n, heads, strips, 2 + NL] from element `start` on; gates [n, heads, 4]; level, d_level
// [n, heads, NL]; L [heads, NL]; terms [n, heads, 1 + NL]: d log α · log α, dp · w, whose sums over n are gradients.
// A workgroup owns 256 heads of tokens, an invocation one.

//!include group
//!include activation

struct Call { count: u32, heads: u32, scales: u32, strips: u32, start: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> d_heads: array<f32>;
@group(0) @binding(1) var<storage, read> gates: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> level_input: array<f32>;
@group(0) @binding(3) var<storage, read> level_scale: array<f32>;
@group(0) @binding(4) var<storage, read_write> d_retention: array<f32>;
@group(0) @binding(5) var<storage, read_write> d_write: array<f32>;
@group(0) @binding(6) var<storage, read_write> d_level: array<f32>;
@group(0) @binding(7) var<storage, read_write> terms: array<f32>;

fn total(i: u32, number: u32) -> f32 {
    let scalars = 2u + call.scales;
    var sum = 0.0;
    for (var strip = 0u; strip < call.strips; strip += 1u) {
        sum += d_heads[call.start + (i * call.strips + strip) * scalars + number];
    }
    return sum;
}

@compute @workgroup_size(256)
fn scalars(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i >= call.count {
        return;
    }
    let h = i % call.heads;
    let gate = gates[i];
    let d_log = total(i, 0u);
    d_retention[i] = d_log * gate.z;
    d_write[i] = total(i, 1u) * gate.w;
    let to = i * (1u + call.scales);
    terms[to] = d_log * gate.x;
    for (var l = 0u; l < call.scales; l += 1u) {
        let w = level_input[i * call.scales + l];
        let scale = level_scale[h * call.scales + l];
        let dp = total(i, 2u + l) * sigmoid(scale * w);
        d_level[i * call.scales + l] = dp * scale;
        terms[to + 1u + l] = dp * w;
    }
}

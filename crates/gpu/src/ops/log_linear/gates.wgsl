// gates = (log α, β, d log α / d retention, d β / d write) with
// log α = −exp(a_log) · softplus(retention + dt_bias),  β = strength · σ(write);     λ = softplus(L ∘ level)
//
// retention, write [n, heads]; a_log, dt_bias [heads]; level, weights λ [n, heads, scales]; L [heads, scales]; gates
// [n, heads, 4]. A workgroup owns 256 heads of tokens, an invocation one.

//!include group
//!include delta

struct Call { count: u32, heads: u32, scales: u32, strength: f32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> retention: array<f32>;
@group(0) @binding(1) var<storage, read> write: array<f32>;
@group(0) @binding(2) var<storage, read> a_log: array<f32>;
@group(0) @binding(3) var<storage, read> dt_bias: array<f32>;
@group(0) @binding(4) var<storage, read> level_input: array<f32>;
@group(0) @binding(5) var<storage, read> level_scale: array<f32>;
@group(0) @binding(6) var<storage, read_write> gates: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> weights: array<f32>;

@compute @workgroup_size(256)
fn gate(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.count {
        let h = i % call.heads;
        gates[i] = delta_gates(retention[i], write[i], a_log[h], dt_bias[h], call.strength);
        for (var l = 0u; l < call.scales; l += 1u) {
            weights[i * call.scales + l] =
                softplus(level_scale[h * call.scales + l] * level_input[i * call.scales + l]);
        }
    }
}

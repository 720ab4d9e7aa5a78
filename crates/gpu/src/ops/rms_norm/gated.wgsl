
// With a gate: dn = dy ∘ SiLU(g), and the gate has a gradient.
@group(0) @binding(5) var<storage, read> g: array<f32>;
@group(0) @binding(6) var<storage, read_write> dg: array<f32>;

fn d_normal(at: u32) -> f32 {
    return dy[at] * silu(g[at]);
}

fn write_gate(at: u32, normal: f32) {
    dg[at] = dy[at] * normal * silu_slope(g[at]);
}

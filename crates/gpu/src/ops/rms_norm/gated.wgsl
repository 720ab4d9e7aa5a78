
// With a gate: dn = dy ∘ SiLU(g), and the gate has a gradient. dx and dg of both parts are in one buffer, from the
// elements `starts` on.
@group(0) @binding(6) var<storage, read> g0: array<f32>;
@group(0) @binding(7) var<storage, read> g1: array<f32>;
@group(0) @binding(8) var<storage, read_write> results: array<f32>;

fn gate_at(at: u32) -> f32 {
    if at < call.split {
        return g0[at];
    }
    return g1[at - call.split];
}

fn d_normal(at: u32) -> f32 {
    return dy_at(at) * silu(gate_at(at));
}

fn write_gate(at: u32, normal: f32) {
    let value = dy_at(at) * normal * silu_slope(gate_at(at));
    if at < call.split {
        results[call.starts.z + at] = value;
    } else {
        results[call.starts.w + at - call.split] = value;
    }
}

fn put_dx(at: u32, value: f32) {
    if at < call.split {
        results[call.starts.x + at] = value;
    } else {
        results[call.starts.y + at - call.split] = value;
    }
}

// r = 1 / sqrt(mean(x²) + eps)
// forward:        y = r x ∘ w
// gated_forward:  y = r x ∘ w ∘ SiLU(g)
//
// x, g, y [rows, width], w [width]; the rows may come in two parts, the second from number `split` on, with tensors of
// their own. A workgroup owns 256 / lanes rows, a segment of `lanes` invocations one row, so that
// both long rows and the many short rows of heads keep all invocations busy. The order of the sum depends on the width
// only.

//!include group
//!include activation

struct Call { rows: u32, width: u32, lanes: u32, eps: f32, split: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x0: array<f32>;
@group(0) @binding(1) var<storage, read> x1: array<f32>;
@group(0) @binding(2) var<storage, read> w: array<f32>;
@group(0) @binding(3) var<storage, read_write> y0: array<f32>;
@group(0) @binding(4) var<storage, read_write> y1: array<f32>;
@group(0) @binding(5) var<storage, read> g0: array<f32>;
@group(0) @binding(6) var<storage, read> g1: array<f32>;

fn x_at(at: u32) -> f32 {
    if at < call.split {
        return x0[at];
    }
    return x1[at - call.split];
}

fn gate_at(at: u32) -> f32 {
    if at < call.split {
        return g0[at];
    }
    return g1[at - call.split];
}

fn put(at: u32, value: f32) {
    if at < call.split {
        y0[at] = value;
    } else {
        y1[at - call.split] = value;
    }
}

// The index of the segment's row, which may be past the last.
fn own_row(group: u32, local: u32) -> u32 {
    return group * (256u / call.lanes) + local / call.lanes;
}

fn inverse_rms(row: u32, local: u32) -> f32 {
    let lane = local % call.lanes;
    var squares = 0.0;
    if row < call.rows {
        for (var i = lane; i < call.width; i += call.lanes) {
            let v = x_at(row * call.width + i);
            squares = fma(v, v, squares);
        }
    }
    let total = segment_sum(squares, local, call.lanes);
    return 1.0 / sqrt(total / f32(call.width) + call.eps);
}

@compute @workgroup_size(256)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = own_row(group_index(workgroup, groups), local);
    let r = inverse_rms(row, local);
    if row < call.rows {
        for (var i = local % call.lanes; i < call.width; i += call.lanes) {
            let at = row * call.width + i;
            put(at, x_at(at) * r * w[i]);
        }
    }
}

@compute @workgroup_size(256)
fn gated_forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = own_row(group_index(workgroup, groups), local);
    let r = inverse_rms(row, local);
    if row < call.rows {
        for (var i = local % call.lanes; i < call.width; i += call.lanes) {
            let at = row * call.width + i;
            put(at, x_at(at) * r * w[i] * silu(gate_at(at)));
        }
    }
}

// dn = dy (∘ SiLU(g)),   dx = r (dn ∘ w − r² x mean(dn ∘ w ∘ x)),   dg = dy ∘ r x ∘ w ∘ SiLU'(g)
// dw = Σ_rows dn ∘ r x, here the sum over some rows; a further dispatch adds these sums in order
//
// x, g, dy, dx, dg [rows, width], w [width], dw [workgroups · splits, width]. A workgroup owns `block` rows, at most 256,
// so that it can add up their part of dw without atomics. First, segments of `lanes` invocations take a row each and
// compute dx and dg; they leave r of each row in workgroup memory. Then an invocation takes a column of dw and adds the
// rows in order; if rows are shorter than the workgroup, `splits` invocations share a column, each with its own rows.
// The rows may come in two parts, the second from number `split` on, with tensors of their own. `d_normal`, `write_gate`
// and `put_dx` come from plain.wgsl or gated.wgsl.

//!include group
//!include activation

struct Call {
    starts: vec4<u32>,
    rows: u32,
    width: u32,
    lanes: u32,
    eps: f32,
    block: u32,
    splits: u32,
    split: u32,
    add: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x0: array<f32>;
@group(0) @binding(1) var<storage, read> x1: array<f32>;
@group(0) @binding(2) var<storage, read> w: array<f32>;
@group(0) @binding(3) var<storage, read> dy0: array<f32>;
@group(0) @binding(4) var<storage, read> dy1: array<f32>;
@group(0) @binding(5) var<storage, read_write> dw: array<f32>;

fn x_at(at: u32) -> f32 {
    if at < call.split {
        return x0[at];
    }
    return x1[at - call.split];
}

fn dy_at(at: u32) -> f32 {
    if at < call.split {
        return dy0[at];
    }
    return dy1[at - call.split];
}

var<workgroup> inverse: array<f32, 256>;

// dx and dg of one row per segment; leaves r in `inverse`. `own` counts rows of the workgroup.
fn row_gradients(first: u32, own: u32, local: u32) {
    let lane = local % call.lanes;
    let row = first + own;
    let here = own < call.block && row < call.rows;
    let base = row * call.width;
    var squares = 0.0;
    var dots = 0.0;
    if here {
        for (var i = lane; i < call.width; i += call.lanes) {
            let v = x_at(base + i);
            squares = fma(v, v, squares);
            dots = fma(d_normal(base + i) * w[i], v, dots);
        }
    }
    let width = f32(call.width);
    let r = 1.0 / sqrt(segment_sum(squares, local, call.lanes) / width + call.eps);
    let mean = segment_sum(dots, local, call.lanes) / width;
    if here {
        if lane == call.lanes - 1u {
            inverse[own] = r;
        }
        for (var i = lane; i < call.width; i += call.lanes) {
            let at = base + i;
            put_dx(at, r * fma(d_normal(at), w[i], -(r * r * x_at(at) * mean)));
            write_gate(at, x_at(at) * r * w[i]);
        }
    }
}

@compute @workgroup_size(256)
fn backward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    let first = group * call.block;
    if first >= call.rows {
        return;
    }
    let segments = 256u / call.lanes;
    // Tested at its end, so that software devices notice if the barrier after it is missing (docs/gpu.md).
    var turn = 0u;
    loop {
        row_gradients(first, turn + local / call.lanes, local);
        continuing {
            turn += segments;
            break if turn >= call.block;
        }
    }
    workgroupBarrier();
    let here = min(call.block, call.rows - first);
    let per_split = 256u / call.splits;
    let split = local / per_split;
    for (var i = local % per_split; i < call.width; i += per_split) {
        var total = 0.0;
        for (var own = split; own < here; own += call.splits) {
            let at = (first + own) * call.width + i;
            total = fma(d_normal(at) * x_at(at), inverse[own], total);
        }
        dw[(group * call.splits + split) * call.width + i] = total;
    }
}

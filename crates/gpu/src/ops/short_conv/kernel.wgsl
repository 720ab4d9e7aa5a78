// z[b, t, d] = Σ_j w[d, j] x[b, t − K + 1 + j, d],   x[b, −K + 1 .. 0] = tail, or 0
//
// forward:       y = SiLU(z), and new_tail = the last K − 1 inputs
// slopes:        dz = dy ∘ SiLU'(z)
//
// x, y, dy, dz [B, T, D], w [D, K], tail, new_tail [B, K − 1, D]. A workgroup owns 256 numbers, an invocation one; in
// `forward`, the numbers of y come first, then those of the new tail. Neighbours take neighbouring channels, so their
// reads of x are contiguous, and the K reads of a number are those of its neighbours in time.

//!include group
//!include activation

struct Call { batch: u32, tokens: u32, width: u32, kernel: u32, has_tail: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> w: array<f32>;
@group(0) @binding(2) var<storage, read> tail: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read_write> new_tail: array<f32>;
@group(0) @binding(5) var<storage, read> dy: array<f32>;

// x[b, t − K + 1 + j, d], t up to T
fn token(b: u32, t: u32, j: u32, d: u32) -> f32 {
    let before = call.kernel - 1u;
    if t + j >= before {
        return x[(b * call.tokens + (t + j - before)) * call.width + d];
    }
    if call.has_tail == 1u {
        return tail[(b * before + t + j) * call.width + d];
    }
    return 0.0;
}

fn convolved(b: u32, t: u32, d: u32) -> f32 {
    var z = 0.0;
    for (var j = 0u; j < call.kernel; j += 1u) {
        z = fma(w[d * call.kernel + j], token(b, t, j, d), z);
    }
    return z;
}

@compute @workgroup_size(256)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = group_index(workgroup, groups) * 256u + local;
    let outputs = call.batch * call.tokens * call.width;
    if at < outputs {
        let row = at / call.width;
        let b = row / call.tokens;
        y[at] = silu(convolved(b, row - b * call.tokens, at - row * call.width));
    } else if at - outputs < call.batch * (call.kernel - 1u) * call.width {
        let row = (at - outputs) / call.width;
        let b = row / (call.kernel - 1u);
        let j = row - b * (call.kernel - 1u);
        new_tail[at - outputs] = token(b, call.tokens, j, at - outputs - row * call.width);
    }
}

@compute @workgroup_size(256)
fn slopes(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = group_index(workgroup, groups) * 256u + local;
    if at < call.batch * call.tokens * call.width {
        let row = at / call.width;
        let b = row / call.tokens;
        y[at] = dy[at] * silu_slope(convolved(b, row - b * call.tokens, at - row * call.width));
    }
}

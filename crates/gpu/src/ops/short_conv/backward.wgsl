// dz_q = dy_q ∘ SiLU'(z_q), with z_q as in kernel.wgsl, for up to three q
// dx_q[b, t, d] = Σ_j w_q[d, j] dz_q[b, t + K − 1 − j, d]   (dz = 0 past the end)
// dw_q[d, j] = Σ_{b, t} dz_q[b, t, d] x_q[b, t − K + 1 + j, d], here the sum over a block of tokens of one sequence; a
// further dispatch adds these sums in order
//
// x_q, dy_q, dx_q [B, T, D_q], w_q [D_q, K]. All results are in one buffer: dx_q from element `dx` on, and the sums of
// each block in a row of `stride` numbers, those of dw_q [D_q, K] from `dw` on. An invocation owns one channel of one
// block of tokens, a workgroup 256 such channels: neighbours read neighbouring channels, and nothing is shared. It
// computes dz token by token, also for the K − 1 tokens after its block, and adds each to what it contributes to.

//!include group
//!include activation

struct Call {
    width: vec4<u32>,
    dx: vec4<u32>,
    dw: vec4<u32>,
    batch: u32,
    tokens: u32,
    kernel: u32,
    has_tail: u32,
    block: u32,
    blocks: u32,
    stride: u32,
}
var<immediate> call: Call;

@compute @workgroup_size(256)
fn backward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let number = group_index(workgroup, groups) * 256u + local;
    if number >= numbers(call.batch * call.blocks) {
        return;
    }
    let p = place_of(number, call.batch * call.blocks);
    let b = p.row / call.blocks;
    let begin = (p.row - b * call.blocks) * call.block;
    let end = min(begin + call.block, call.tokens);
    let own = b * call.tokens * p.width + p.d;
    let start = start_of(p.q, call.dx) + own;
    var dw: array<f32, K>;
    for (var j = 0u; j < K; j += 1u) {
        dw[j] = 0.0;
    }
    for (var t = begin; t < min(end + K - 1u, call.tokens); t += 1u) {
        let dz = dy_at(p.q, own + t * p.width) * silu_slope(convolved(p.q, b, t, p.d, p.width));
        if t < end {
            results[start + t * p.width] = 0.0;
            for (var j = 0u; j < K; j += 1u) {
                dw[j] = fma(dz, token(p.q, b, t, j, p.d, p.width), dw[j]);
            }
        }
        // Token t − K + 1 + j, if it is one of the block.
        for (var j = 0u; j < K; j += 1u) {
            if t + j >= begin + K - 1u && t + j < end + K - 1u {
                let at = start + (t + j + 1u - K) * p.width;
                results[at] = fma(w_at(p.q, p.d * K + j), dz, results[at]);
            }
        }
    }
    for (var j = 0u; j < K; j += 1u) {
        results[start_of(p.q, call.dw) + p.row * call.stride + p.d * K + j] = dw[j];
    }
}


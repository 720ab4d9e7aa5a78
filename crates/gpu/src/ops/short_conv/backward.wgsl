// dx[b, t, d] = Σ_j w[d, j] dz[b, t + K − 1 − j, d]   (dz = 0 past the end)
// dw[d, j] = Σ_{b, t} dz[b, t, d] x[b, t − K + 1 + j, d], here the sum over a block of tokens of one sequence; a further
// dispatch adds these sums in order
//
// x, dz, dx [B, T, D], w [D, K], tail [B, K − 1, D], dw [B · blocks, D, K]. An invocation owns one channel of one block
// of tokens, a workgroup 256 such channels: neighbours read neighbouring channels, and nothing is shared.

//!include group

struct Call { batch: u32, tokens: u32, width: u32, kernel: u32, has_tail: u32, block: u32, blocks: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> w: array<f32>;
@group(0) @binding(2) var<storage, read> tail: array<f32>;
@group(0) @binding(3) var<storage, read> dz: array<f32>;
@group(0) @binding(4) var<storage, read_write> dx: array<f32>;
@group(0) @binding(5) var<storage, read_write> dw: array<f32>;

// x[b, t − K + 1 + j, d]
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

@compute @workgroup_size(256)
fn backward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = group_index(workgroup, groups) * 256u + local;
    if at >= call.batch * call.blocks * call.width {
        return;
    }
    let row = at / call.width;
    let d = at - row * call.width;
    let b = row / call.blocks;
    let begin = (row - b * call.blocks) * call.block;
    let end = min(begin + call.block, call.tokens);
    for (var t = begin; t < end; t += 1u) {
        var sum = 0.0;
        for (var j = 0u; j < call.kernel; j += 1u) {
            let later = t + call.kernel - 1u - j;
            if later < call.tokens {
                sum = fma(w[d * call.kernel + j], dz[(b * call.tokens + later) * call.width + d], sum);
            }
        }
        dx[(b * call.tokens + t) * call.width + d] = sum;
    }
    for (var j = 0u; j < call.kernel; j += 1u) {
        var sum = 0.0;
        for (var t = begin; t < end; t += 1u) {
            sum = fma(dz[(b * call.tokens + t) * call.width + d], token(b, t, j, d), sum);
        }
        dw[at * call.kernel + j] = sum;
    }
}

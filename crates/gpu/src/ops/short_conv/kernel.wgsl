// z_q[b, t, d] = Σ_j w_q[d, j] x_q[b, t − K + 1 + j, d],   x_q[b, −K + 1 .. 0] = tail_q, or 0
// y_q = SiLU(z_q), and new_tail_q = the last K − 1 inputs, for up to three q
//
// x_q, y_q [B, T, D_q], w_q [D_q, K], tail_q, new_tail_q [B, K − 1, D_q]. All y are in one buffer, y_q from element `y`
// on, all new tails in one, the same or another, new_tail_q from `tails` on. A workgroup owns 256 numbers, an invocation one: first the numbers of all y, then
// those of the new tails. Neighbours take neighbouring channels, so their reads of x are contiguous, and the K reads of
// a number are those of its neighbours in time.

//!include group
//!include activation

struct Call {
    width: vec4<u32>,
    y: vec4<u32>,
    tails: vec4<u32>,
    batch: u32,
    tokens: u32,
    kernel: u32,
    has_tail: u32,
}
var<immediate> call: Call;

@compute @workgroup_size(256)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let number = group_index(workgroup, groups) * 256u + local;
    let outputs = numbers(call.batch * call.tokens);
    let before = call.kernel - 1u;
    if number < outputs {
        let p = place_of(number, call.batch * call.tokens);
        let b = p.row / call.tokens;
        let z = convolved(p.q, b, p.row - b * call.tokens, p.d, p.width);
        results[start_of(p.q, call.y) + p.at] = silu(z);
    } else if number - outputs < numbers(call.batch * before) {
        let p = place_of(number - outputs, call.batch * before);
        let b = p.row / before;
        let value = token(p.q, b, call.tokens, p.row - b * before, p.d, p.width);
        put_tail(start_of(p.q, call.tails) + p.at, value);
    }
}


// forward:   y = f(x)
// backward:  dx = dy f'(x), with the slope computed from kept = x or kept = y, whichever the kind needs
// add_to:    sum = sum + term
//
// All tensors: n numbers. A workgroup owns 256 numbers, an invocation one: nothing is shared. The kind of f is a
// number of the call, the same for all invocations, so one pipeline serves all kinds without divergence.

//!include group
//!include activation

struct Call { n: u32, kind: u32, c: f32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> dy: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

// tanh from exp, which does not overflow; for small |x| the plain form would lose all digits, so its series is used.
fn tanh_of(x: f32) -> f32 {
    let q = x * x;
    if q < 0.09 {
        return x * (1.0 - q * (1.0 / 3.0 - q * (2.0 / 15.0 - q * (17.0 / 315.0 - q * (62.0 / 2835.0)))));
    }
    let e = exp(-2.0 * abs(x));
    return sign(x) * ((1.0 - e) / (1.0 + e));
}

fn value(x: f32) -> f32 {
    switch call.kind {
        case 0u: { return -x; }
        case 1u: { return exp(x); }
        case 2u: { return log(x); }
        case 3u: { return sigmoid(x); }
        case 4u: { return silu(x); }
        case 5u: { return tanh_of(x); }
        case 6u: { return select(x, 0.0, x < 0.0); }
        case 7u: { return softplus(x); }
        case 8u: { return x * x; }
        case 9u: { return sqrt(x); }
        case 10u: { return 1.0 / x; }
        case 11u: { return call.c * x; }
        default: { return x + call.c; }
    }
}

// f'; `kept` is x or y = f(x), as the kind says.
fn slope(kept: f32) -> f32 {
    switch call.kind {
        case 0u: { return -1.0; }
        case 1u: { return kept; }
        case 2u: { return 1.0 / kept; }
        case 3u: { return kept * (1.0 - kept); }
        case 4u: { return silu_slope(kept); }
        case 5u: { return (1.0 - kept) * (1.0 + kept); }
        case 6u: { return select(0.0, 1.0, kept > 0.0); }
        case 7u: { return sigmoid(kept); }
        case 8u: { return kept + kept; }
        case 9u: { return 0.5 / kept; }
        case 10u: { return -kept * kept; }
        case 11u: { return call.c; }
        default: { return 1.0; }
    }
}

@compute @workgroup_size(256)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        y[i] = value(x[i]);
    }
}

@compute @workgroup_size(256)
fn backward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        y[i] = dy[i] * slope(x[i]);
    }
}

@compute @workgroup_size(256)
fn add_to(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        y[i] = y[i] + x[i];
    }
}

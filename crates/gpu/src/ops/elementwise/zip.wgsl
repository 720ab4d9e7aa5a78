// forward:  y = a + b, a − b, a b, a / b
// one:      out = dy ∂y/∂a, or dy ∂y/∂b if `operand` is 1
// both:     out = dy ∂y/∂a, second = dy ∂y/∂b
//
// y, dy, out, second: n numbers, the broadcast shape in at most 6 dimensions (size, stride of a, stride of b; a stride
// is 0 where the operand repeats). The host sums over what repeats. A workgroup owns 256 numbers, an invocation one.
// Dimensions are vec4s because some backends give every array element of the call's numbers 16 bytes.

//!include group

struct Call { n: u32, kind: u32, rank: u32, operand: u32, dims: array<vec4<u32>, 6> }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
@group(0) @binding(3) var<storage, read_write> first: array<f32>;
@group(0) @binding(4) var<storage, read_write> second: array<f32>;

// Indices of both operands for number `i` of the result. The outermost dimension needs no division.
fn places(i: u32) -> vec2<u32> {
    var found = vec2<u32>(0u, 0u);
    var rest = i;
    for (var d = call.rank - 1u; d > 0u; d -= 1u) {
        let dim = call.dims[d];
        let outer = rest / dim.x;
        found += (rest - outer * dim.x) * dim.yz;
        rest = outer;
    }
    return found + rest * call.dims[0].yz;
}

fn slope_a(b: f32) -> f32 {
    switch call.kind {
        case 2u: { return b; }
        case 3u: { return 1.0 / b; }
        default: { return 1.0; }
    }
}

fn slope_b(a: f32, b: f32) -> f32 {
    switch call.kind {
        case 0u: { return 1.0; }
        case 1u: { return -1.0; }
        case 2u: { return a; }
        default: { return -(a / b) / b; }
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
        let at = places(i);
        let left = a[at.x];
        let right = b[at.y];
        switch call.kind {
            case 0u: { first[i] = left + right; }
            case 1u: { first[i] = left - right; }
            case 2u: { first[i] = left * right; }
            default: { first[i] = left / right; }
        }
    }
}

@compute @workgroup_size(256)
fn one(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        let at = places(i);
        if call.operand == 0u {
            first[i] = dy[i] * slope_a(b[at.y]);
        } else {
            first[i] = dy[i] * slope_b(a[at.x], b[at.y]);
        }
    }
}

@compute @workgroup_size(256)
fn both(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        let at = places(i);
        let right = b[at.y];
        first[i] = dy[i] * slope_a(right);
        second[i] = dy[i] * slope_b(a[at.x], right);
    }
}

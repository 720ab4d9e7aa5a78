// slice:   y[o, k, i] = x[o, start + k, i]
// place:   y[o, start + k, i] = x[o, k, i], 0 elsewhere
// permute: y[i₀, i₁, ..] = x[Σ i_d stride_d]
//
// slice:   y has n = outer·len numbers; `len` is the length of its runs, `step` that of the runs of x.
// place:   y has n = outer·step numbers; `len` is the length of the runs of x.
// permute: y has n numbers in at most 6 dimensions (size, stride of x). Dimensions are vec4s because some backends give
//          every array element of the call's numbers 16 bytes.
// A workgroup owns 256 numbers of y, an invocation one.

//!include group

struct Call { n: u32, len: u32, step: u32, start: u32, dims: array<vec4<u32>, 6> }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn slice(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        let run = i / call.len;
        y[i] = x[run * call.step + call.start + (i - run * call.len)];
    }
}

@compute @workgroup_size(256)
fn place(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        let run = i / call.step;
        let at = i - run * call.step;
        var value = 0.0;
        if at >= call.start && at < call.start + call.len {
            value = x[run * call.len + (at - call.start)];
        }
        y[i] = value;
    }
}

// `len` is the number of dimensions.
@compute @workgroup_size(256)
fn permute(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i < call.n {
        var at = 0u;
        var rest = i;
        for (var d = call.len - 1u; d > 0u; d -= 1u) {
            let dim = call.dims[d];
            let outer = rest / dim.x;
            at += (rest - outer * dim.x) * dim.y;
            rest = outer;
        }
        y[i] = x[at + rest * call.dims[0].y];
    }
}

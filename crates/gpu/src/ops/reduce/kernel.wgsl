// y[o, p, i] = factor Σ_n x[o, n, i],  n in part p: p·per_part ≤ n < min((p + 1)·per_part, size)
//
// x [outer, size, inner], y [outer, parts, inner]. A long sum takes several turns, each over the parts of the one
// before; the parts depend on size and inner only.
//
// columns: an invocation owns one number of y and adds its terms in order; neighbours read neighbouring numbers, so
//          it suits a large `inner`.
// rows:    a workgroup of 64 owns one number of y; its invocations read neighbouring terms, so it suits inner = 1.

//!include group
//!include sum

struct Call { outer: u32, size: u32, inner: u32, parts: u32, per_part: u32, factor: f32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn columns(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = group_index(workgroup, groups) * 256u + local;
    if at >= call.outer * call.parts * call.inner {
        return;
    }
    let row = at / call.inner;
    let i = at - row * call.inner;
    let o = row / call.parts;
    let begin = (row - o * call.parts) * call.per_part;
    let end = min(begin + call.per_part, call.size);
    var total = 0.0;
    for (var n = begin; n < end; n += 1u) {
        total += x[(o * call.size + n) * call.inner + i];
    }
    y[at] = total * call.factor;
}

@compute @workgroup_size(64)
fn rows(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = group_index(workgroup, groups);
    if at >= call.outer * call.parts * call.inner {
        return;
    }
    let row = at / call.inner;
    let i = at - row * call.inner;
    let o = row / call.parts;
    let begin = (row - o * call.parts) * call.per_part;
    let end = min(begin + call.per_part, call.size);
    var total = 0.0;
    for (var n = begin + local; n < end; n += SUM_SIZE) {
        total += x[(o * call.size + n) * call.inner + i];
    }
    total = workgroup_sum(total, local);
    if local == 0u {
        y[at] = total * call.factor;
    }
}

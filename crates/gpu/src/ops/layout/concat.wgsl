// y[o, start + k] = x_p[o, k − begin_p],  p the part with begin_p ≤ k < begin_p + len_p
//
// Up to 8 parts x_p [outer, len_p] of a row of y, which is `step` long; together they are `len` long and begin at
// `start`. `ends` are begin_p + len_p; parts that the call has not are empty. A workgroup owns 256 numbers of the
// result, an invocation one.

//!include group

struct Call { n: u32, len: u32, step: u32, start: u32, ends: array<vec4<u32>, 2> }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x0: array<f32>;
@group(0) @binding(1) var<storage, read> x1: array<f32>;
@group(0) @binding(2) var<storage, read> x2: array<f32>;
@group(0) @binding(3) var<storage, read> x3: array<f32>;
@group(0) @binding(4) var<storage, read> x4: array<f32>;
@group(0) @binding(5) var<storage, read> x5: array<f32>;
@group(0) @binding(6) var<storage, read> x6: array<f32>;
@group(0) @binding(7) var<storage, read> x7: array<f32>;
@group(0) @binding(8) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn concat(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i >= call.n {
        return;
    }
    let run = i / call.len;
    let k = i - run * call.len;
    // Indices into the call's numbers stay constant: a software device reads them wrongly where invocations differ.
    let low = call.ends[0];
    let high = call.ends[1];
    let past_low = low <= vec4<u32>(k);
    let past_high = high <= vec4<u32>(k);
    let counts = vec4<u32>(past_low) + vec4<u32>(past_high);
    let part = counts.x + counts.y + counts.z + counts.w;
    // Ends grow, so the part begins at the largest that is passed and ends at the smallest that is not.
    let begins = max(select(vec4<u32>(0u), low, past_low), select(vec4<u32>(0u), high, past_high));
    let begin = max(max(begins.x, begins.y), max(begins.z, begins.w));
    let none = vec4<u32>(call.len);
    let ends = min(select(low, none, past_low), select(high, none, past_high));
    let end = min(min(ends.x, ends.y), min(ends.z, ends.w));
    let at = run * (end - begin) + (k - begin);
    var value = 0.0;
    switch part {
        case 0u: { value = x0[at]; }
        case 1u: { value = x1[at]; }
        case 2u: { value = x2[at]; }
        case 3u: { value = x3[at]; }
        case 4u: { value = x4[at]; }
        case 5u: { value = x5[at]; }
        case 6u: { value = x6[at]; }
        default: { value = x7[at]; }
    }
    y[run * call.step + call.start + k] = value;
}

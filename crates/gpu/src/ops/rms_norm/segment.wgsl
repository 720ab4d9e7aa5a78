// A workgroup of 256 is split into segments of call.lanes invocations, a power of two; each segment owns a row. Short
// rows have short segments, so that no invocation idles.
var<workgroup> segment_parts: array<f32, 256>;

// Sum over the invocations of a segment, in one fixed order; every invocation gets it. All invocations of the workgroup
// must call it: it has barriers.
fn segment_sum(value: f32, local: u32, lanes: u32) -> f32 {
    segment_parts[local] = value;
    workgroupBarrier();
    let lane = local % lanes;
    for (var step = lanes / 2u; step > 0u; step /= 2u) {
        if lane < step {
            segment_parts[local] += segment_parts[local + step];
        }
        workgroupBarrier();
    }
    let total = segment_parts[local - lane];
    workgroupBarrier();
    return total;
}

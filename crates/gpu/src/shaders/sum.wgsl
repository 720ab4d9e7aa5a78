// Sum over the 64 invocations of a workgroup, in one fixed order; every invocation gets it. All invocations must call
// it: it has barriers.
const SUM_SIZE: u32 = 64u;
var<workgroup> sum_parts: array<f32, 64>;

fn workgroup_sum(value: f32, local: u32) -> f32 {
    sum_parts[local] = value;
    workgroupBarrier();
    for (var step = 32u; step > 0u; step /= 2u) {
        if local < step {
            sum_parts[local] += sum_parts[local + step];
        }
        workgroupBarrier();
    }
    let total = sum_parts[0];
    workgroupBarrier();
    return total;
}

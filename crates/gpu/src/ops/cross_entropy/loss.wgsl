// loss = factor · Σ_t nll_t
//
// nll [count], loss: one number. One workgroup; invocation i adds every 256th number from i on, then the sums are added
// as a tree.

struct Call { count: u32, factor: f32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> nll: array<f32>;
@group(0) @binding(1) var<storage, read_write> loss: array<f32>;

var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256)
fn total(@builtin(local_invocation_index) local: u32) {
    var sum = 0.0;
    for (var t = local; t < call.count; t += 256u) {
        sum += nll[t];
    }
    sums[local] = sum;
    workgroupBarrier();
    for (var step = 128u; step > 0u; step /= 2u) {
        if local < step {
            sums[local] += sums[local + step];
        }
        workgroupBarrier();
    }
    if local == 0u {
        loss[0] = sums[0] * call.factor;
    }
}

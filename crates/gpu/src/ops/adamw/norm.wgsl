// sums[first + k] = Σ x², over block k of up to 8 tensors
//
// A block is 4,096 numbers of one tensor, the last of a tensor fewer; a workgroup owns a block. An invocation adds 16
// squares in order, then the workgroup adds its 256 sums as a tree, so that each block is accurate to about 1e-6. The
// host adds the blocks in f64, in order. `ends` are the numbers of blocks up to and including each tensor, `lens` the
// sizes of the tensors.

//!include group

struct Call { first: u32, pad0: u32, pad1: u32, pad2: u32, ends: array<vec4<u32>, 2>, lens: array<vec4<u32>, 2> }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x0: array<f32>;
@group(0) @binding(1) var<storage, read> x1: array<f32>;
@group(0) @binding(2) var<storage, read> x2: array<f32>;
@group(0) @binding(3) var<storage, read> x3: array<f32>;
@group(0) @binding(4) var<storage, read> x4: array<f32>;
@group(0) @binding(5) var<storage, read> x5: array<f32>;
@group(0) @binding(6) var<storage, read> x6: array<f32>;
@group(0) @binding(7) var<storage, read> x7: array<f32>;
@group(0) @binding(8) var<storage, read_write> sums: array<f32>;

var<workgroup> parts: array<f32, 256>;

fn number(tensor: u32, i: u32) -> f32 {
    switch tensor {
        case 0u: { return x0[i]; }
        case 1u: { return x1[i]; }
        case 2u: { return x2[i]; }
        case 3u: { return x3[i]; }
        case 4u: { return x4[i]; }
        case 5u: { return x5[i]; }
        case 6u: { return x6[i]; }
        default: { return x7[i]; }
    }
}

@compute @workgroup_size(256)
fn squares(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let block = group_index(workgroup, groups);
    if block >= call.ends[1].w {
        return;
    }
    var tensor = 0u;
    var begin = 0u;
    while block >= call.ends[tensor / 4u][tensor % 4u] {
        begin = call.ends[tensor / 4u][tensor % 4u];
        tensor += 1u;
    }
    let start = (block - begin) * 4096u;
    let end = min(start + 4096u, call.lens[tensor / 4u][tensor % 4u]);
    var total = 0.0;
    for (var i = start + local; i < end; i += 256u) {
        let v = number(tensor, i);
        total = fma(v, v, total);
    }
    parts[local] = total;
    workgroupBarrier();
    for (var step = 128u; step > 0u; step /= 2u) {
        if local < step {
            parts[local] += parts[local + step];
        }
        workgroupBarrier();
    }
    if local == 0u {
        sums[call.first + block] = parts[0];
    }
}

// y_i = table[ids_i]
//
// table [V, d] in FORMAT (see `product/each.wgsl`: f32, bf16 or int8 with scales), each row in `stride` words; ids
// [rows]; y [rows, d], n numbers. A workgroup owns 256 numbers of y, an invocation one: nothing is shared.

//!include group

struct Call { n: u32, d: u32, stride: u32, table_rows: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> table: array<u32>;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let i = group_index(workgroup, groups) * 256u + local;
    if i >= call.n {
        return;
    }
    let id = ids[i / call.d];
    let at = i % call.d;
    let row = id * call.stride;
    if FORMAT == 1u {
        let pair = table[row + at / 2u];
        y[i] = bitcast<f32>(select(pair << 16u, pair & 0xffff0000u, at % 2u == 1u));
    } else if FORMAT == 2u {
        let four = table[call.table_rows + row + at / 4u];
        let code = f32(bitcast<i32>(four << (24u - 8u * (at % 4u))) >> 24u);
        y[i] = code * bitcast<f32>(table[id]);
    } else {
        y[i] = bitcast<f32>(table[row + at]);
    }
}

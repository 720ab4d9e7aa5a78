// db = Σ_r dy_r
//
// dy [rows, n], db [n]. A workgroup owns 16 columns. Sixteen invocations share a column: each adds every sixteenth row,
// then one adds the sixteen sums in order.

//!include group

struct Call { rows: u32, n: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> dy: array<f32>;
@group(0) @binding(1) var<storage, read_write> db: array<f32>;

var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256)
fn bias(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let column = group_index(workgroup, groups) * 16u + local % 16u;
    var sum = 0.0;
    if column < call.n {
        for (var row = local / 16u; row < call.rows; row += 16u) {
            sum += dy[row * call.n + column];
        }
    }
    sums[local] = sum;
    workgroupBarrier();
    if local < 16u && column < call.n {
        for (var part = 1u; part < 16u; part++) {
            sum += sums[part * 16u + local];
        }
        db[column] = sum;
    }
}

// d_table[v] = Σ_{i: ids_i = v} dy_i
//
// The host sorts the positions i by id: entry e of `lists` = (id, first, end) says which part of `positions` belongs to
// which id. dy [rows, d]; d_table [V, d] holds zeros. A workgroup owns 32 columns of one row of the table. Eight
// invocations share a column: each adds every eighth of the positions, then one adds the eight sums in order.

//!include group

struct Call { entries: u32, d: u32, strips: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> lists: array<u32>;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
@group(0) @binding(3) var<storage, read_write> d_table: array<f32>;

var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256)
fn backward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    let entry = group / call.strips;
    if entry >= call.entries {
        return;
    }
    let column = group % call.strips * 32u + local % 32u;
    let end = lists[3u * entry + 2u];
    var sum = 0.0;
    if column < call.d {
        for (var at = lists[3u * entry + 1u] + local / 32u; at < end; at += 8u) {
            sum += dy[positions[at] * call.d + column];
        }
    }
    sums[local] = sum;
    workgroupBarrier();
    if local < 32u && column < call.d {
        for (var part = 1u; part < 8u; part++) {
            sum += sums[part * 32u + local];
        }
        d_table[lists[3u * entry] * call.d + column] = sum;
    }
}

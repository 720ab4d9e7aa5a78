// q ← s q / sqrt(Σq² + 1e-6);   o_n = A_nᵀ q_n      each row reads its own state
//
// query [rows, key_heads·d_k]     states [rows, heads, d_k, d_v]     readout [rows, heads·d_v]
//
// A workgroup owns a row, a head, and 64 columns of d_v, an invocation one of them: neighbours read neighbouring
// columns. The query is in workgroup memory.

//!include group

struct Call { heads: u32, group: u32, dk: u32, dv: u32, strips: u32, rows: u32, query_scale: f32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> states: array<f32>;
@group(0) @binding(2) var<storage, read_write> readout: array<f32>;

var<workgroup> q: array<f32, DK>;
var<workgroup> factor: f32;

@compute @workgroup_size(64)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups);
    let strip = index % call.strips;
    let state = index / call.strips; // row · heads + head
    let row = state / call.heads;
    if row >= call.rows {
        return;
    }
    let start = (row * (call.heads / call.group) + (state % call.heads) / call.group) * call.dk;
    for (var i = 63u - lane; i < call.dk; i += 64u) {
        q[i] = query[start + i];
    }
    workgroupBarrier();
    if lane == 32u {
        var sum = 0.0;
        for (var i = 0u; i < call.dk; i++) {
            sum = fma(q[i], q[i], sum);
        }
        factor = call.query_scale / sqrt(sum + 1e-6);
    }
    workgroupBarrier();
    let column = strip * 64u + lane;
    if column < call.dv {
        var sum = 0.0;
        for (var i = 0u; i < call.dk; i++) {
            sum = fma(states[(state * call.dk + i) * call.dv + column], q[i], sum);
        }
        readout[state * call.dv + column] = sum * factor;
    }
}

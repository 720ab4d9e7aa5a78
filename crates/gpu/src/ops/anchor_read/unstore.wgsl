// One stored anchor as f32, for lists whose entries have different precisions or lie in different buffers
//
// states: an arena, see states.wgsl     whole [N, heads, d_k, d_v]
//
// Slot `first_tile` becomes anchor `rows`. A workgroup owns 64 elements, an invocation one.

//!include group

@group(0) @binding(0) var<storage, read> plan: array<u32>;
@group(0) @binding(1) var<storage, read> states: array<u32>;
@group(0) @binding(2) var<storage, read_write> whole: array<f32>;

@compute @workgroup_size(64)
fn unstore(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let e = group_index(workgroup, groups) * 64u + lane;
    let count = call.heads * call.dk * call.dv;
    if e < count {
        whole[call.rows * count + e] = state(call.first_tile * call.slot_words, e / call.dv, e % call.dv);
    }
}

// π for each token, head and anchor, from the lists of chosen anchors; zero if the token did not choose the anchor
//
// lists as in choose.wgsl     weights [rows, heads, N]
//
// A workgroup owns 64 weights, an invocation one, which it looks up in its token's list.

//!include group

struct Call { count: u32, anchors: u32, k: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> lists: array<u32>;
@group(0) @binding(1) var<storage, read_write> weights: array<f32>;

@compute @workgroup_size(64)
fn chosen_weights(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups) * 64u + lane;
    if index >= call.count * call.anchors {
        return;
    }
    let at = (index / call.anchors) * call.k;
    var weight = 0.0;
    for (var i = 0u; i < call.k; i++) {
        if lists[call.count * call.k + at + i] == index % call.anchors {
            weight = bitcast<f32>(lists[at + i]);
        }
    }
    weights[index] = weight;
}

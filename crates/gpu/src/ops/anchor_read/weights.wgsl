// π = softmax([a_m …, null])      for each token, head and visible anchor
//
// Shapes as in read.wgsl; weights [rows, heads, N], written where an anchor is visible.
//
// A workgroup owns a tile of tokens and a head, an invocation one anchor for four tokens at a time.

//!include group

@group(0) @binding(0) var<storage, read> plan: array<u32>;
@group(0) @binding(1) var<storage, read> routing_query: array<f32>;
@group(0) @binding(2) var<storage, read> routing_keys: array<f32>;
@group(0) @binding(3) var<storage, read> null_score: array<f32>;
@group(0) @binding(4) var<storage, read_write> weights: array<f32>;

@compute @workgroup_size(LANES)
fn all_weights(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups);
    let head = index % call.heads;
    let number = index / call.heads;
    if number >= call.tiles {
        return;
    }
    let tile = tile_at(number);
    load_rho(tile, head, lane);
    workgroupBarrier();
    tile_softmax(tile, head, lane);
    for (var e = lane; e < tile.visible * QUADS; e += LANES) {
        let quad = e % QUADS;
        let anchor = visible_anchor(tile, e / QUADS);
        let weight = weight_quad(score_quad(anchor, head, quad), quad);
        for (var c = 0u; c < 4u; c++) {
            let t = quad * 4u + c;
            if t < tile.count {
                weights[((tile.row + t) * call.heads + head) * call.anchors + anchor] = weight[c];
            }
        }
    }
}

// dA_m = Σ_t π_m q doᵀ;   dκ_m = scale Σ_t da_m ρ_t      over the tokens that see anchor m
//
// Shapes as in read.wgsl; numbers as in delta.wgsl; matrix as in tokens.wgsl. seen: for each anchor the end of its
// entries (ends [N + 1], the first is where the entries start), each (first tile, tiles, position of the anchor among
// those that the tiles see, or ANY if it follows from the tiles' runs).
//
// A workgroup owns an anchor, a head, and a block of 64 × 64 elements of dA, or, as the last of the blocks, dκ.
// An invocation owns 4 × 4 elements. Tokens come tile by tile in ascending order, so the sums have one order.

//!include group

@group(0) @binding(0) var<storage, read> plan: array<u32>;
@group(0) @binding(1) var<storage, read> seen: array<u32>;
@group(0) @binding(2) var<storage, read> query: array<f32>;
@group(0) @binding(3) var<storage, read> routing_query: array<f32>;
@group(0) @binding(4) var<storage, read> numbers: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> gradient: array<f32>;
@group(0) @binding(6) var<storage, read> matrix: array<vec2<f32>>;
@group(0) @binding(7) var<storage, read_write> d_states: array<f32>;
@group(0) @binding(8) var<storage, read_write> d_keys: array<f32>;

const ANY: u32 = 0xffffffffu;

// Where (π, da) of the tile's tokens for the anchor start.
fn matrix_at(tile: Tile, head: u32, anchor: u32, position: u32) -> u32 {
    let p = select(position, anchor - tile.start, position == ANY);
    return (tile.matrix + head * tile.visible + p) * TOKENS;
}

fn keys_gradient(anchor: u32, head: u32, lane: u32) {
    for (var r = lane; r < call.dr; r += 256u) {
        let to = (anchor * call.heads + head) * call.dr + r;
        var sum = 0.0;
        for (var e = seen[anchor]; e < seen[anchor + 1u]; e += 3u) {
            for (var number = seen[e]; number < seen[e] + seen[e + 1u]; number++) {
                let tile = tile_at(number);
                let at = matrix_at(tile, head, anchor, seen[e + 2u]);
                for (var t = 0u; t < tile.count; t++) {
                    let value = routing_query[((tile.row + t) * call.heads + head) * call.dr + r];
                    sum = fma(matrix[at + t].y, value, sum);
                }
            }
        }
        sum *= call.routing_scale;
        if call.add == 1u {
            sum += d_keys[to];
        }
        d_keys[to] = sum;
    }
}

@compute @workgroup_size(256)
fn anchors(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups);
    let block = index % call.strips;
    let head = (index / call.strips) % call.heads;
    let anchor = index / (call.strips * call.heads);
    if anchor >= call.anchors {
        return;
    }
    if block == call.strips - 1u {
        keys_gradient(anchor, head, lane);
        return;
    }
    outer_start();
    for (var e = seen[anchor]; e < seen[anchor + 1u]; e += 3u) {
        for (var number = seen[e]; number < seen[e] + seen[e + 1u]; number++) {
            let tile = tile_at(number);
            let t = lane / 16u;
            var weight = 0.0;
            if t < tile.count {
                weight = matrix[matrix_at(tile, head, anchor, seen[e + 2u]) + t].x;
            }
            outer_add(block, head, tile.row + t, weight, t < tile.count, tile.count, lane);
        }
    }
    outer_write(block, anchor, head, lane);
}

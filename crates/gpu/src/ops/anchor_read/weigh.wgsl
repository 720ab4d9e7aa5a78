// Weights of a tile: π = exp(score − largest) / Σ exp(score − largest).

var<workgroup> largest: array<f32, TOKENS>;
var<workgroup> inverse: array<f32, TOKENS>; // 1 / Σ exp(score − largest)

// π of one anchor for four tokens.
fn weight_quad(score: vec4<f32>, quad: u32) -> vec4<f32> {
    let t = quad * 4u;
    let top = vec4<f32>(largest[t], largest[t + 1u], largest[t + 2u], largest[t + 3u]);
    let factor = vec4<f32>(inverse[t], inverse[t + 1u], inverse[t + 2u], inverse[t + 3u]);
    return exp(score - top) * factor;
}

// `score_chunk` with weights in place of scores. A barrier must follow.
fn weigh_chunk(tile: Tile, head: u32, base: u32, count: u32, lane: u32) {
    for (var e = lane; e < count * QUADS; e += LANES) {
        let anchor = visible_anchor(tile, base + e / QUADS);
        scores[e] = weight_quad(score_quad(anchor, head, e % QUADS), e % QUADS);
    }
}

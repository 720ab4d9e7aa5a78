// Scores of a tile's tokens: a = scale · ρ·κ. Every kernel scores by `score_quad`, so that equal inputs have equal
// bits everywhere and near-ties choose the same anchors.

// HELD: anchors whose scores are held at a time.

var<workgroup> rho: array<vec4<f32>, DR * QUADS>;           // [d_r][token]
var<workgroup> scores: array<vec4<f32>, HELD * QUADS>;      // [anchor of the chunk][token]

// Routing queries of a tile, zero beyond its last token. A barrier must follow.
fn load_rho(tile: Tile, head: u32, lane: u32) {
    for (var e = lane; e < call.dr * QUADS; e += LANES) {
        let r = e % call.dr;
        let quad = e / call.dr;
        var value = vec4<f32>();
        for (var c = 0u; c < 4u; c++) {
            let t = quad * 4u + c;
            if t < tile.count {
                value[c] = routing_query[((tile.row + t) * call.heads + head) * call.dr + r];
            }
        }
        rho[r * QUADS + quad] = value;
    }
}

// Scores of one anchor for four tokens.
fn score_quad(anchor: u32, head: u32, quad: u32) -> vec4<f32> {
    let at = (anchor * call.heads + head) * call.dr;
    var score = vec4<f32>();
    for (var r = 0u; r < call.dr; r++) {
        score = fma(vec4<f32>(routing_keys[at + r]), rho[r * QUADS + quad], score);
    }
    return score * call.routing_scale;
}

// Scores of `count` anchors, from the `base`-th visible one. A barrier must follow.
fn score_chunk(tile: Tile, head: u32, base: u32, count: u32, lane: u32) {
    for (var e = lane; e < count * QUADS; e += LANES) {
        let c = e / QUADS;
        scores[e] = score_quad(visible_anchor(tile, base + c), head, e % QUADS);
    }
}

fn score_at(c: u32, t: u32) -> f32 {
    return scores[c * QUADS + t / 4u][t % 4u];
}

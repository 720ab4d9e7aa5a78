// Queries of a tile: q ← s q / sqrt(Σq² + 1e-6).

var<workgroup> queries: array<vec4<f32>, DK * QUADS>;   // [d_k][token]
var<workgroup> factors: array<f32, TOKENS>;             // 1 / sqrt(Σq² + 1e-6)

// Fills `queries` and `factors`; zero beyond the last token. Has barriers, the last after the last write.
fn load_queries(tile: Tile, head: u32, lane: u32) {
    let key_heads = call.heads / call.group;
    for (var e = lane; e < call.dk * QUADS; e += LANES) {
        let i = e % call.dk;
        let quad = e / call.dk;
        var value = vec4<f32>();
        for (var c = 0u; c < 4u; c++) {
            let t = quad * 4u + c;
            if t < tile.count {
                value[c] = query[((tile.row + t) * key_heads + head / call.group) * call.dk + i];
            }
        }
        queries[i * QUADS + quad] = value;
    }
    workgroupBarrier();
    if lane < TOKENS {
        var sum = 0.0;
        for (var i = 0u; i < call.dk; i++) {
            let value = queries[i * QUADS + lane / 4u][lane % 4u];
            sum = fma(value, value, sum);
        }
        factors[lane] = 1.0 / sqrt(sum + 1e-6);
    }
    workgroupBarrier();
    for (var e = lane; e < call.dk * QUADS; e += LANES) {
        let t = (e % QUADS) * 4u;
        let factor = vec4<f32>(factors[t], factors[t + 1u], factors[t + 2u], factors[t + 3u]);
        queries[e] = queries[e] * factor * call.query_scale;
    }
    workgroupBarrier();
}

// Softmax of a tile's tokens over all their visible anchors, in one pass over the scores.

// Fills `largest` and `inverse`. Has barriers, the last after the last write.
fn tile_softmax(tile: Tile, head: u32, lane: u32) {
    var state = Softmax(0.0, 1.0);
    if lane < tile.count {
        state = softmax_start(tile.row + lane, head);
    }
    for (var base = 0u; base < tile.visible; base += HELD) {
        let held = min(HELD, tile.visible - base);
        score_chunk(tile, head, base, held, lane);
        workgroupBarrier();
        if lane < tile.count {
            for (var first = 0u; first < held; first += CHUNK) {
                let end = min(first + CHUNK, held);
                var best = state.largest;
                for (var c = first; c < end; c++) {
                    best = larger(best, score_at(c, lane));
                }
                var sum = state.sum * exp(state.largest - best);
                for (var c = first; c < end; c++) {
                    sum += exp(score_at(c, lane) - best);
                }
                state = Softmax(best, sum);
            }
        }
        workgroupBarrier();
    }
    if lane < TOKENS {
        largest[lane] = state.largest;
        inverse[lane] = 1.0 / state.sum;
    }
    workgroupBarrier();
}

// The plan: which anchors each tile of tokens sees.
//
// plan: records of tiles, TILE_WORDS each; then lists of anchors; then, for stored states, a slot for each anchor.
// A tile is up to TOKENS = 4·QUADS consecutive tokens that see the same anchors, oldest first.

const TOKENS: u32 = 4u * QUADS;
const TILE_WORDS: u32 = 6u;

struct Tile {
    row: u32,       // first token
    count: u32,     // tokens
    start: u32,     // first visible anchor, or where its list starts in the plan
    visible: u32,   // visible anchors
    listed: u32,    // 1 if the anchors are listed
    matrix: u32,    // see tokens.wgsl
}

fn tile_at(index: u32) -> Tile {
    let at = index * TILE_WORDS;
    return Tile(plan[at], plan[at + 1u], plan[at + 2u], plan[at + 3u], plan[at + 4u], plan[at + 5u]);
}

// The i-th oldest anchor that a tile sees.
fn visible_anchor(tile: Tile, i: u32) -> u32 {
    if tile.listed == 1u {
        return plan[tile.start + i];
    }
    return tile.start + i;
}

// The call, and the plan: which anchors each tile of tokens sees.
//
// plan: records of tiles, TILE_WORDS each; then lists of anchors; then, for stored states, a slot for each anchor.
// A tile is up to TOKENS = 4·QUADS consecutive tokens that see the same anchors, oldest first.

struct Call {
    tiles: u32,         // tiles of this dispatch
    first_tile: u32,
    rows: u32,          // tokens of the call
    heads: u32,         // value heads
    group: u32,         // value heads for each key head
    dk: u32,
    dv: u32,
    dr: u32,
    anchors: u32,
    k: u32,             // anchors that a token reads at the most, for top-K
    strips: u32,        // blocks of the output that share a tile
    has_null: u32,       // 1 if there is a null entry
    slots: u32,         // where the slots start in the plan
    slot_words: u32,    // size of one anchor's states
    scale_start: u32,   // where the int8 scales of a slot start
    add: u32,           // 1 to add to what the output holds
    routing_scale: f32,
    query_scale: f32,   // d_k^-½
    root: f32,          // d_k^½
}
var<immediate> call: Call;

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

// Numbers of a call.

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

// Elements of anchor states, as f32 (STORAGE 0), bf16 codes, two to a word (1), or int8 codes, four to a word, and
// one scale for each row of d_v codes (2).

// Where the states of an anchor start.
fn state_start(anchor: u32) -> u32 {
    if SLOTS == 1u {
        return plan[call.slots + anchor] * call.slot_words;
    }
    return anchor * call.slot_words;
}

// Element (row, column) of the states that start at `start`; row = head · d_k + i.
fn state(start: u32, row: u32, column: u32) -> f32 {
    let e = row * call.dv + column;
    if STORAGE == 0u {
        return bitcast<f32>(states[start + e]);
    }
    if STORAGE == 1u {
        let word = states[start + e / 2u];
        return bitcast<f32>(select(word << 16u, word & 0xffff0000u, e % 2u == 1u));
    }
    let word = bitcast<i32>(states[start + e / 4u]);
    let scale = bitcast<f32>(states[start + call.scale_start + row]);
    return f32((word << (24u - (e % 4u) * 8u)) >> 24u) * scale;
}

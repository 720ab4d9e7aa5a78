// Keys and values of a forward call in up to four blocks of a cache, [1, BLOCK_TOKENS, G·d] and [1, BLOCK_TOKENS, G·e];
// the last may be shorter. No tile crosses blocks.
@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key_0: array<f32>;
@group(0) @binding(2) var<storage, read> value_0: array<f32>;
@group(0) @binding(3) var<storage, read> key_1: array<f32>;
@group(0) @binding(4) var<storage, read> value_1: array<f32>;
@group(0) @binding(5) var<storage, read> key_2: array<f32>;
@group(0) @binding(6) var<storage, read> value_2: array<f32>;
@group(0) @binding(7) var<storage, read> key_3: array<f32>;
@group(0) @binding(8) var<storage, read> value_3: array<f32>;
@group(0) @binding(9) var<storage, read_write> out: array<f32>;

fn other(which: u32, row: u32, column: u32) -> f32 {
    let t = key0 + row;
    if t >= call.keys {
        return 0.0;
    }
    let at = t % BLOCK_TOKENS * call.kv_heads + head / (call.heads / call.kv_heads);
    let block = key0 / BLOCK_TOKENS;
    if which == 0u {
        let i = at * call.d + column;
        switch block {
            case 0u: { return key_0[i]; }
            case 1u: { return key_1[i]; }
            case 2u: { return key_2[i]; }
            default: { return key_3[i]; }
        }
    }
    let i = at * call.e + column;
    switch block {
        case 0u: { return value_0[i]; }
        case 1u: { return value_1[i]; }
        case 2u: { return value_2[i]; }
        default: { return value_3[i]; }
    }
}

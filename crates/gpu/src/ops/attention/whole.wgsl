// Keys and values of a forward call in one tensor each, [B, Tk, G·d] and [B, Tk, G·e].
@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key: array<f32>;
@group(0) @binding(2) var<storage, read> value: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

fn other(which: u32, row: u32, column: u32) -> f32 {
    let t = key0 + row;
    if t >= call.keys {
        return 0.0;
    }
    let at = (batch * call.keys + t) * call.kv_heads + head / (call.heads / call.kv_heads);
    if which == 0u {
        return key[at * call.d + column];
    }
    return value[at * call.e + column];
}

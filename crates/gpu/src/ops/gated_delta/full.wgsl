// Bindings of the scan with boundaries, or with what the backward pass needs. The scan itself follows in kernel.wgsl.
//
// gates [B·T, Hv, 4]   list: for each batch row the index of its first chunk, then the number of chunks, then for each
// chunk (start, end, boundary), where boundary − 1 is the index of the boundary state at its end, or boundary is 0
// boundary_states [N, Hv, d_k, d_v]
// kept: the errors e = v − α Sᵀk [B·T, Hv, d_v], then the state before each chunk [chunks, Hv, d_k, d_v]

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key: array<f32>;
@group(0) @binding(2) var<storage, read> value: array<f32>;
@group(0) @binding(3) var<storage, read> gates: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> list: array<u32>;
@group(0) @binding(5) var<storage, read> initial: array<f32>;
@group(0) @binding(6) var<storage, read_write> readout: array<f32>;
@group(0) @binding(7) var<storage, read_write> final_state: array<f32>;
@group(0) @binding(8) var<storage, read_write> boundary_states: array<f32>;
@group(0) @binding(9) var<storage, read_write> kept: array<f32>;

// The chunk of the current token, and the end of the row's chunks.
var<private> chunk: u32;
var<private> last_chunk: u32;

fn gates_of(row: u32, h: u32) -> vec2<f32> {
    return gates[row * call.value_heads + h].xy;
}

fn open_row(b: u32) {
    chunk = list[b];
    last_chunk = list[b + 1u];
    while chunk < last_chunk && list[call.batch + 1u + 3u * chunk + 1u] <= call.begin {
        chunk += 1u;
    }
}

// 1 + index of the chunk that starts with token t if its state is kept, otherwise 0.
fn checkpoint_before(t: u32) -> u32 {
    if call.keeps == 1u && chunk < last_chunk && list[call.batch + 1u + 3u * chunk] == t {
        return chunk + 1u;
    }
    return 0u;
}

fn store_checkpoint(i: u32, x: f32) {
    kept[call.errors + i] = x;
}

fn store_error(i: u32, x: f32) {
    if call.keeps == 1u {
        kept[i] = x;
    }
}

// 1 + index of the boundary after the first t tokens, or 0. Steps to the next chunk where one ends.
fn boundary_after(t: u32) -> u32 {
    let at = call.batch + 1u + 3u * chunk;
    if chunk < last_chunk && list[at + 1u] == t {
        chunk += 1u;
        return list[at + 2u];
    }
    return 0u;
}

fn store_boundary(i: u32, x: f32) {
    boundary_states[i] = x;
}


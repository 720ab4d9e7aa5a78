// P_ij = e^(S_ij − L_i),  dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ − D),  dK = d^-½ dSᵀ Q
//
// Shapes as in kernel.wgsl, D from backward_query.wgsl. A workgroup owns ROWS keys of one batch entry and key head, and
// reads the queries that see them, of one query head after the other, in tiles of 64, so that each sum over queries is in
// order and in one place. Tiles are
// transposed: rows are keys, columns are queries.

//!include group

struct Call {
    groups: u32,
    key_tiles: u32,
    queries: u32,
    keys: u32,
    heads: u32,
    scale: f32,
    d: u32,
    e: u32,
    // Where L starts in the buffer of the output.
    sums: u32,
    // G, and the number of keys that a query sees at most.
    kv_heads: u32,
    window: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key: array<f32>;
@group(0) @binding(2) var<storage, read> value: array<f32>;
// The output, followed by L.
@group(0) @binding(3) var<storage, read> out: array<f32>;
@group(0) @binding(4) var<storage, read> d_out: array<f32>;
@group(0) @binding(5) var<storage, read> deltas: array<f32>;
@group(0) @binding(6) var<storage, read_write> d_key: array<f32>;
@group(0) @binding(7) var<storage, read_write> d_value: array<f32>;

var<private> batch: u32;
var<private> head: u32;
var<private> kv_head: u32;
var<private> query0: u32;
var<private> key0: u32;

fn place(row: u32) -> u32 {
    return (batch * call.keys + key0 + row) * call.kv_heads + kv_head;
}

fn query_place(row: u32) -> u32 {
    return (batch * call.queries + query0 + row) * call.heads + head;
}

fn own(which: u32, row: u32, column: u32) -> f32 {
    if key0 + row >= call.keys {
        return 0.0;
    }
    if which == 0u {
        return key[place(row) * call.d + column];
    }
    return value[place(row) * call.e + column];
}

fn other(which: u32, row: u32, column: u32) -> f32 {
    if query0 + row >= call.queries {
        return 0.0;
    }
    if which == 0u {
        return query[query_place(row) * call.d + column] * call.scale;
    }
    return d_out[query_place(row) * call.e + column];
}

@compute @workgroup_size(THREADS)
fn backward_key(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    if group >= call.groups {
        return;
    }
    let at = thread(local);
    key0 = group % call.key_tiles * ROWS;
    kv_head = group / call.key_tiles % call.kv_heads;
    batch = group / call.key_tiles / call.kv_heads;
    let rows = min(ROWS, call.keys - key0);

    var dk: array<f32, R * COLUMNS>;
    var dv: array<f32, R * COLUMNS>;
    for (var i = 0u; i < R * COLUMNS; i++) {
        dk[i] = 0.0;
        dv[i] = 0.0;
    }
    let offset = call.keys - call.queries;
    // The first query that sees one of the keys, rounded down to a tile.
    var first = 0u;
    if key0 > offset {
        first = (key0 - offset) / OTHERS * OTHERS;
    }
    let sharing = call.heads / call.kv_heads;
    for (head = kv_head * sharing; head < (kv_head + 1u) * sharing; head++) {
        for (query0 = first; query0 < call.queries; query0 += OTHERS) {
            let count = min(OTHERS, call.queries - query0);
            var p: array<f32, R * C>;
            products(at, 0u, call.d, &p);
            // The barriers of `products` lie between this and the last reads of the tile.
            for (var c = 0u; c < C; c++) {
                let column = at.tx + TX * c;
                var l = 0.0;
                if column < count {
                    l = out[call.sums + query_place(column)];
                }
                for (var r = 0u; r < R; r++) {
                    let row = at.ty + TY * r;
                    var weight = 0.0;
                    let position = offset + query0 + column;
                    if column < count && row < rows && key0 + row <= position && position - (key0 + row) < call.window {
                        weight = exp(p[r * C + c] - l);
                    }
                    p[r * C + c] = weight;
                    tile[row * TILE_STRIDE + column] = weight;
                }
            }
            add_products(at, 1u, call.e, count, &dv);
            var ds: array<f32, R * C>;
            products(at, 1u, call.e, &ds);
            for (var c = 0u; c < C; c++) {
                let column = at.tx + TX * c;
                var delta = 0.0;
                if column < count {
                    delta = deltas[query_place(column)];
                }
                for (var r = 0u; r < R; r++) {
                    tile[(at.ty + TY * r) * TILE_STRIDE + column] = p[r * C + c] * (ds[r * C + c] - delta);
                }
            }
            add_products(at, 0u, call.d, count, &dk);
        }
    }
    for (var r = 0u; r < R; r++) {
        let row = at.ty + TY * r;
        for (var c = 0u; c < COLUMNS; c++) {
            let column = at.tx + TX * c;
            if row < rows && column < call.d {
                d_key[place(row) * call.d + column] = dk[r * COLUMNS + c];
            }
            if row < rows && column < call.e {
                d_value[place(row) * call.e + column] = dv[r * COLUMNS + c];
            }
        }
    }
}

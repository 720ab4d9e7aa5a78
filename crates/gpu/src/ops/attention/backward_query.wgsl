// D_i = Σ dO_i ∘ O_i,  P_ij = e^(S_ij − L_i),  dS = P ∘ (dO Vᵀ − D),  dQ = d^-½ dS K
//
// Shapes as in kernel.wgsl; D [B, Tq, H] is stored for backward_key.wgsl. A workgroup owns ROWS queries of one batch
// entry and head, and reads the keys it sees in tiles of 64; scores are computed again, which costs less than storing
// Tq × Tk of them.

//!include group

struct Call {
    groups: u32,
    query_tiles: u32,
    queries: u32,
    keys: u32,
    heads: u32,
    scale: f32,
    d: u32,
    e: u32,
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
@group(0) @binding(5) var<storage, read_write> deltas: array<f32>;
@group(0) @binding(6) var<storage, read_write> d_query: array<f32>;

// Per row of the workgroup: L and D.
var<workgroup> log_sum: array<f32, ROWS>;
var<workgroup> delta: array<f32, ROWS>;

var<private> batch: u32;
var<private> head: u32;
var<private> query0: u32;
var<private> key0: u32;

fn place(row: u32) -> u32 {
    return (batch * call.queries + query0 + row) * call.heads + head;
}

fn own(which: u32, row: u32, column: u32) -> f32 {
    if query0 + row >= call.queries {
        return 0.0;
    }
    if which == 0u {
        return query[place(row) * call.d + column] * call.scale;
    }
    return d_out[place(row) * call.e + column];
}

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

@compute @workgroup_size(THREADS)
fn backward_query(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    if group >= call.groups {
        return;
    }
    let at = thread(local);
    query0 = (call.query_tiles - 1u - group % call.query_tiles) * ROWS;
    head = group / call.query_tiles % call.heads;
    batch = group / call.query_tiles / call.heads;
    let rows = min(ROWS, call.queries - query0);

    if local < ROWS {
        var sum = 0.0;
        var l = 0.0;
        if local < rows {
            for (var c = 0u; c < call.e; c++) {
                let i = place(local) * call.e + c;
                sum = fma(d_out[i], out[i], sum);
            }
            deltas[place(local)] = sum;
            l = out[call.groups / call.query_tiles * call.queries * call.e + place(local)];
        }
        delta[local] = sum;
        log_sum[local] = l;
    }

    var dq: array<f32, R * COLUMNS>;
    for (var i = 0u; i < R * COLUMNS; i++) {
        dq[i] = 0.0;
    }
    // The position of query 0 is keys − queries; the last query of the workgroup sees itself and all before.
    let visible = call.keys - call.queries + query0 + rows;
    for (key0 = 0u; key0 < visible; key0 += OTHERS) {
        var s: array<f32, R * C>;
        var dp: array<f32, R * C>;
        products(at, 0u, call.d, &s);
        products(at, 1u, call.e, &dp);
        // The barriers of `products` lie between this and the last reads of the tile, and the writes of L and D.
        for (var r = 0u; r < R; r++) {
            let row = at.ty + TY * r;
            for (var c = 0u; c < C; c++) {
                let column = at.tx + TX * c;
                var ds = 0.0;
                let position = call.keys - call.queries + query0 + row;
                if key0 + column <= position && position - (key0 + column) < call.window && row < rows {
                    ds = exp(s[r * C + c] - log_sum[row]) * (dp[r * C + c] - delta[row]);
                }
                tile[row * TILE_STRIDE + column] = ds;
            }
        }
        // The barriers of `add_products` lie between these writes and its reads.
        add_products(at, 0u, call.d, min(OTHERS, visible - key0), &dq);
    }
    for (var r = 0u; r < R; r++) {
        let row = at.ty + TY * r;
        for (var c = 0u; c < COLUMNS; c++) {
            let column = at.tx + TX * c;
            if row < rows && column < call.d {
                d_query[place(row) * call.d + column] = dq[r * COLUMNS + c] * call.scale;
            }
        }
    }
}

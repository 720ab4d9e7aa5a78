// S = d^-½ Q Kᵀ,  L_i = ln Σ_j e^S_ij,  O_i = Σ_j e^(S_ij − L_i) V_j,  over the keys j ≤ Tk − Tq + i
//
// Q [B, Tq, H·d], K [B, Tk, G·d], V [B, Tk, G·e], O [B, Tq, H·e]; head h reads key head h / (H / G), and with a window
// w only the keys j > Tk − Tq + i − w. The buffer of O continues with m [B, Tq, H] and l [B, Tq, H]. A workgroup owns ROWS queries of one batch entry and head, and reads the keys it sees in tiles of 64,
// so that the scores never leave the chip. Per tile, with the largest score so far m, the sum l and the output o:
//
//   m' = max(m, max_j S_ij),  P_ij = e^(S_ij − m'),  l' = l e^(m − m') + Σ_j P_ij,  o' = o e^(m − m') + Σ_j P_ij V_j
//
// A call may bring only some of the keys, from position `start`: then o, m, l continue from those of the call before,
// unless it is the first; the last divides o by l, and stores L in place of m. Tiles begin at multiples of 64 keys in
// any division, and every sum is in the order of the keys (Σ_j P_ij in four parts of 16), so a query's bits depend on
// its own query, keys and values only.
//
// The bindings, `own` and `other` come with `whole.wgsl` or `blocks.wgsl`, the products with `tiles.wgsl`.

//!include group

struct Call {
    groups: u32,
    query_tiles: u32,
    queries: u32,
    heads: u32,
    // Position of the first query among all keys.
    offset: u32,
    // Position of the first key of this call, and the number of keys in it.
    start: u32,
    keys: u32,
    first: u32,
    last: u32,
    scale: f32,
    d: u32,
    e: u32,
    // G, and the number of keys that a query sees at most.
    kv_heads: u32,
    window: u32,
}
var<immediate> call: Call;

const LOWEST: f32 = -3.0e38;
const PARTS: u32 = 4u;
const PART: u32 = OTHERS / PARTS;

var<workgroup> part_max: array<f32, ROWS * PARTS>;
var<workgroup> part_sum: array<f32, ROWS * PARTS>;
// Per row: e^(m − m'), at the end l.
var<workgroup> factor: array<f32, ROWS>;

var<private> batch: u32;
var<private> head: u32;
var<private> query0: u32;
var<private> key0: u32;

// Row of m and l, and of O in units of e, of query `row` of the workgroup.
fn place(row: u32) -> u32 {
    return (batch * call.queries + query0 + row) * call.heads + head;
}

fn own(which: u32, row: u32, column: u32) -> f32 {
    if query0 + row >= call.queries {
        return 0.0;
    }
    return query[place(row) * call.d + column] * call.scale;
}

@compute @workgroup_size(THREADS)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    if group >= call.groups {
        return;
    }
    let at = thread(local);
    // The last queries see the most keys: their workgroups start first.
    query0 = (call.query_tiles - 1u - group % call.query_tiles) * ROWS;
    head = group / call.query_tiles % call.heads;
    batch = group / call.query_tiles / call.heads;
    let rows = min(ROWS, call.queries - query0);

    var o: array<f32, R * COLUMNS>;
    for (var r = 0u; r < R; r++) {
        for (var c = 0u; c < COLUMNS; c++) {
            o[r * COLUMNS + c] = 0.0;
            if call.first == 0u && at.ty + TY * r < rows && at.tx + TX * c < call.e {
                o[r * COLUMNS + c] = out[place(at.ty + TY * r) * call.e + at.tx + TX * c];
            }
        }
    }
    // Four threads share a row of the softmax, each with a quarter of the tile; all four keep its m and l. Neighbouring
    // threads have neighbouring rows, which lie in different banks.
    let softmax_row = local % ROWS;
    let part = local / ROWS;
    let softmax = part < PARTS;
    let sums = call.groups / call.query_tiles * call.queries;
    let m_at = sums * call.e + place(softmax_row);
    var m = LOWEST;
    var l = 0.0;
    if call.first == 0u && softmax && softmax_row < rows {
        m = out[m_at];
        l = out[m_at + sums];
    }

    // Keys of this call that the last query of the workgroup sees.
    let end = call.offset + query0 + rows;
    var visible = 0u;
    if end > call.start {
        visible = min(end - call.start, call.keys);
    }
    for (key0 = 0u; key0 < visible; key0 += OTHERS) {
        var s: array<f32, R * C>;
        products(at, 0u, call.d, &s);
        // The barriers of `products` lie between this and the last reads of the tile.
        for (var r = 0u; r < R; r++) {
            let row = at.ty + TY * r;
            for (var c = 0u; c < C; c++) {
                let column = at.tx + TX * c;
                let seen = key0 + column < call.keys
                    && call.start + key0 + column <= call.offset + query0 + row
                    && call.offset + query0 + row - (call.start + key0 + column) < call.window;
                tile[row * TILE_STRIDE + column] = select(LOWEST, s[r * C + c], seen);
            }
        }
        workgroupBarrier();
        let first = softmax_row * TILE_STRIDE + part * PART;
        if softmax {
            var largest = LOWEST;
            for (var j = first; j < first + PART; j++) {
                largest = max(largest, tile[j]);
            }
            part_max[local] = largest;
        }
        workgroupBarrier();
        var decay = 1.0;
        if softmax {
            let i = softmax_row;
            let largest = max(
                max(part_max[i], part_max[i + ROWS]),
                max(part_max[i + 2u * ROWS], part_max[i + 3u * ROWS]),
            );
            if largest > m {
                decay = exp(m - largest);
                m = largest;
            }
            var sum = 0.0;
            for (var j = first; j < first + PART; j++) {
                var p = 0.0;
                if tile[j] != LOWEST {
                    p = exp(tile[j] - m);
                }
                tile[j] = p;
                sum += p;
            }
            part_sum[local] = sum;
            if part == 0u {
                factor[softmax_row] = decay;
            }
        }
        workgroupBarrier();
        if softmax {
            let i = softmax_row;
            let halves = vec2(
                part_sum[i] + part_sum[i + ROWS],
                part_sum[i + 2u * ROWS] + part_sum[i + 3u * ROWS],
            );
            l = fma(l, decay, halves.x + halves.y);
        }
        for (var r = 0u; r < R; r++) {
            let decay = factor[at.ty + TY * r];
            for (var c = 0u; c < COLUMNS; c++) {
                o[r * COLUMNS + c] *= decay;
            }
        }
        add_products(at, 1u, call.e, min(OTHERS, visible - key0), &o);
    }

    // The barriers of `add_products` lie between this and the last reads of `factor`.
    if part == 0u {
        factor[softmax_row] = select(1.0, l, call.last != 0u);
        if softmax_row < rows {
            out[m_at] = select(m, m + log(l), call.last != 0u);
            out[m_at + sums] = l;
        }
    }
    workgroupBarrier();
    for (var r = 0u; r < R; r++) {
        let row = at.ty + TY * r;
        for (var c = 0u; c < COLUMNS; c++) {
            let column = at.tx + TX * c;
            if row < rows && column < call.e {
                out[place(row) * call.e + column] = o[r * COLUMNS + c] / factor[row];
            }
        }
    }
}

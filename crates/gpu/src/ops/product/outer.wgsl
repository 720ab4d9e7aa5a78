// dW_q = dy_qᵀ x (+ dW_q), q = 0 .. 3, and db = Σ dy_q over the rows for one of them
//
// dy_q [rows, n_q], x [rows, k] from element `first` on, dW_q [n_q, k]. The tiles of all dW_q are numbered in one list,
// those of dW_q from `tile_q` on, row by row. Few tiles would leave most of a device idle, so the rows may be divided
// into pieces of `length` rows: tile t of piece p has number p · tiles + t and writes to dW_q [pieces, n_q, k], whose
// sum over the pieces is left to another kernel. Bit q of `add` says whether dW_q is added to.
// If `bias` is q + 1, db [n_q] is dy_qᵀ times a column of ones, in the tiles from `bias_tile` on.

struct Call {
    n: vec4<u32>,
    tile: vec4<u32>,
    rows: u32,
    k: u32,
    first: u32,
    length: u32,
    add: u32,
    each: u32,
    tiles: u32,
    bias: u32,
    bias_tile: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> dy0: array<f32>;
@group(0) @binding(2) var<storage, read> dy1: array<f32>;
@group(0) @binding(3) var<storage, read> dy2: array<f32>;
@group(0) @binding(4) var<storage, read> dy3: array<f32>;
@group(0) @binding(5) var<storage, read_write> dw0: array<f32>;
@group(0) @binding(6) var<storage, read_write> dw1: array<f32>;
@group(0) @binding(7) var<storage, read_write> dw2: array<f32>;
@group(0) @binding(8) var<storage, read_write> dw3: array<f32>;
@group(0) @binding(9) var<storage, read_write> db: array<f32>;

// dyᵀ and x both have contiguous lines across the inner index.
const A_ROWS: u32 = 0u;
const B_COLUMNS: u32 = 0u;

// q is the number of dy; `ones` is 1 for the bias.
struct Job { q: u32, piece: u32, row: u32, column: u32, m: u32, n: u32, ones: u32 }

fn job_of(number: u32) -> Job {
    let piece = number / call.each;
    let tile = number % call.each;
    let ones = call.bias != 0u && tile >= call.bias_tile;
    var q = u32(tile >= call.tile.y) + u32(tile >= call.tile.z) + u32(tile >= call.tile.w);
    if ones {
        q = call.bias - 1u;
    }
    var m = call.n.x;
    var start = call.tile.x;
    if q == 1u {
        m = call.n.y;
        start = call.tile.y;
    } else if q == 2u {
        m = call.n.z;
        start = call.tile.z;
    } else if q == 3u {
        m = call.n.w;
        start = call.tile.w;
    }
    if ones {
        return Job(q, piece, (tile - call.bias_tile) * TILE, 0u, m, 1u, 1u);
    }
    let across = (call.k + TILE - 1u) / TILE;
    let place = tile - start;
    return Job(q, piece, place / across * TILE, place % across * TILE, m, call.k, 0u);
}

fn parts() -> u32 {
    return 1u;
}

fn range_of(job: Job, part: u32) -> vec2<u32> {
    let begin = job.piece * call.length;
    return vec2<u32>(begin, min(begin + call.length, call.rows));
}

fn a_at(job: Job, part: u32, i: u32, l: u32) -> f32 {
    let at = l * job.m + i;
    switch job.q {
        case 0u: { return dy0[at]; }
        case 1u: { return dy1[at]; }
        case 2u: { return dy2[at]; }
        default: { return dy3[at]; }
    }
}

fn b_at(job: Job, part: u32, l: u32, j: u32) -> f32 {
    if job.ones == 1u {
        return 1.0;
    }
    return x[call.first + l * call.k + j];
}

fn put(job: Job, i: u32, j: u32, sum: f32) {
    if job.ones == 1u {
        db[i] = sum;
        return;
    }
    let at = (job.piece * job.m + i) * call.k + j;
    var value = sum;
    switch job.q {
        case 0u: {
            if (call.add & 1u) != 0u {
                value += dw0[at];
            }
            dw0[at] = value;
        }
        case 1u: {
            if (call.add & 2u) != 0u {
                value += dw1[at];
            }
            dw1[at] = value;
        }
        case 2u: {
            if (call.add & 4u) != 0u {
                value += dw2[at];
            }
            dw2[at] = value;
        }
        default: {
            if (call.add & 8u) != 0u {
                value += dw3[at];
            }
            dw3[at] = value;
        }
    }
}

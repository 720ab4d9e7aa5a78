// y_q = x W_qᵀ, q = 0 .. 3, plus a bias or a residual for one of them
//
// x [m, k] from element `first` on, W_q [n_q, k], y_q [m, n_q]. What is added to y_q is a bias [n_q] if `bias` is
// q + 1, or a residual [m, n_q] if `residual` is. The tiles of all y_q are numbered in one list, those of y_q from
// `tile_q` on, row by row. W_q is stored as FORMAT says, each row in `stride` words:
//   0  f32
//   1  bf16, two codes a word
//   2  int8, four codes a word; before the rows, the n_q scales. The scale multiplies the finished sum.

struct Call {
    n: vec4<u32>,
    tile: vec4<u32>,
    m: u32,
    k: u32,
    first: u32,
    stride: u32,
    bias: u32,
    residual: u32,
    tiles: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> added: array<f32>;
@group(0) @binding(2) var<storage, read> w0: array<u32>;
@group(0) @binding(3) var<storage, read> w1: array<u32>;
@group(0) @binding(4) var<storage, read> w2: array<u32>;
@group(0) @binding(5) var<storage, read> w3: array<u32>;
@group(0) @binding(6) var<storage, read_write> y0: array<f32>;
@group(0) @binding(7) var<storage, read_write> y1: array<f32>;
@group(0) @binding(8) var<storage, read_write> y2: array<f32>;
@group(0) @binding(9) var<storage, read_write> y3: array<f32>;

// Rows of x lie in memory as rows of A, rows of W as columns of B.
const A_ROWS: u32 = 1u;
const B_COLUMNS: u32 = 1u;

struct Job { q: u32, row: u32, column: u32, m: u32, n: u32 }

fn job_of(tile: u32) -> Job {
    let q = u32(tile >= call.tile.y) + u32(tile >= call.tile.z) + u32(tile >= call.tile.w);
    var n = call.n.x;
    var start = call.tile.x;
    if q == 1u {
        n = call.n.y;
        start = call.tile.y;
    } else if q == 2u {
        n = call.n.z;
        start = call.tile.z;
    } else if q == 3u {
        n = call.n.w;
        start = call.tile.w;
    }
    let across = (n + TILE - 1u) / TILE;
    let place = tile - start;
    return Job(q, place / across * TILE, place % across * TILE, call.m, n);
}

fn parts() -> u32 {
    return 1u;
}

fn range_of(job: Job, part: u32) -> vec2<u32> {
    return vec2<u32>(0u, call.k);
}

fn word(q: u32, at: u32) -> u32 {
    switch q {
        case 0u: { return w0[at]; }
        case 1u: { return w1[at]; }
        case 2u: { return w2[at]; }
        default: { return w3[at]; }
    }
}

fn a_at(job: Job, part: u32, i: u32, l: u32) -> f32 {
    return x[call.first + i * call.k + l];
}

fn put(job: Job, i: u32, j: u32, sum: f32) {
    var value = scaled(job, j, sum);
    let at = i * job.n + j;
    if call.bias == job.q + 1u {
        value += added[j];
    }
    if call.residual == job.q + 1u {
        value += added[at];
    }
    switch job.q {
        case 0u: { y0[at] = value; }
        case 1u: { y1[at] = value; }
        case 2u: { y2[at] = value; }
        default: { y3[at] = value; }
    }
}

// y_ps = x_s W_pᵀ (+ r_s), p, s = 0, 1: two streams of rows with one or two weights
//
// x_s [m_s, k], W_p [n_p, k], r_s [m_s, n_0], y_ps [m_s, n_p], with q = 2 p + s. The tiles of all y_q are numbered in one
// list, those of y_q from `tile_q` on, row by row. W_p is stored as FORMAT says, as in each.wgsl.

struct Call {
    tile: vec4<u32>,
    n: vec2<u32>,
    m: vec2<u32>,
    k: u32,
    stride: u32,
    residual: u32,
    tiles: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x0: array<f32>;
@group(0) @binding(1) var<storage, read> x1: array<f32>;
@group(0) @binding(2) var<storage, read> r0: array<f32>;
@group(0) @binding(3) var<storage, read> r1: array<f32>;
@group(0) @binding(4) var<storage, read> w0: array<u32>;
@group(0) @binding(5) var<storage, read> w1: array<u32>;
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
    var start = call.tile.x;
    if q == 1u {
        start = call.tile.y;
    } else if q == 2u {
        start = call.tile.z;
    } else if q == 3u {
        start = call.tile.w;
    }
    let n = select(call.n.y, call.n.x, q < 2u);
    let m = select(call.m.y, call.m.x, q % 2u == 0u);
    let across = (n + TILE - 1u) / TILE;
    let place = tile - start;
    return Job(q, place / across * TILE, place % across * TILE, m, n);
}

fn parts() -> u32 {
    return 1u;
}

fn range_of(job: Job, part: u32) -> vec2<u32> {
    return vec2<u32>(0u, call.k);
}

fn word(q: u32, at: u32) -> u32 {
    if q < 2u {
        return w0[at];
    }
    return w1[at];
}

fn a_at(job: Job, part: u32, i: u32, l: u32) -> f32 {
    if job.q % 2u == 0u {
        return x0[i * call.k + l];
    }
    return x1[i * call.k + l];
}

fn put(job: Job, i: u32, j: u32, sum: f32) {
    var value = scaled(job, j, sum);
    let at = i * job.n + j;
    if call.residual != 0u {
        if job.q == 0u {
            value += r0[at];
        } else {
            value += r1[at];
        }
    }
    switch job.q {
        case 0u: { y0[at] = value; }
        case 1u: { y1[at] = value; }
        case 2u: { y2[at] = value; }
        default: { y3[at] = value; }
    }
}

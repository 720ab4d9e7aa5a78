// dx_s = Σ_p dy_ps W_p (+ dx_s), p, s = 0, 1: two streams of rows with one or two weights
//
// dy_ps [m_s, n_p] with q = 2 p + s, W_p [n_p, k], dx_s [m_s, k]. One chain of fma over all n_p, in the order of p. The
// tiles of dx_0 come before those of dx_1, from `second` on, each row by row. Bit s of `add` says whether dx_s is added
// to.

struct Call {
    n: vec2<u32>,
    m: vec2<u32>,
    k: u32,
    count: u32,
    add: u32,
    second: u32,
    tiles: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> dy0: array<f32>;
@group(0) @binding(1) var<storage, read> dy1: array<f32>;
@group(0) @binding(2) var<storage, read> dy2: array<f32>;
@group(0) @binding(3) var<storage, read> dy3: array<f32>;
@group(0) @binding(4) var<storage, read> w0: array<f32>;
@group(0) @binding(5) var<storage, read> w1: array<f32>;
@group(0) @binding(6) var<storage, read_write> dx0: array<f32>;
@group(0) @binding(7) var<storage, read_write> dx1: array<f32>;

// Rows of dy lie in memory as rows of A; columns of B are not contiguous.
const A_ROWS: u32 = 1u;
const B_COLUMNS: u32 = 0u;

struct Job { s: u32, row: u32, column: u32, m: u32, n: u32 }

fn job_of(tile: u32) -> Job {
    let across = (call.k + TILE - 1u) / TILE;
    if tile < call.second {
        return Job(0u, tile / across * TILE, tile % across * TILE, call.m.x, call.k);
    }
    let place = tile - call.second;
    return Job(1u, place / across * TILE, place % across * TILE, call.m.y, call.k);
}

fn parts() -> u32 {
    return call.count;
}

fn range_of(job: Job, p: u32) -> vec2<u32> {
    return vec2<u32>(0u, select(call.n.y, call.n.x, p == 0u));
}

fn a_at(job: Job, p: u32, i: u32, l: u32) -> f32 {
    if p == 0u {
        let at = i * call.n.x + l;
        if job.s == 0u {
            return dy0[at];
        }
        return dy1[at];
    }
    let at = i * call.n.y + l;
    if job.s == 0u {
        return dy2[at];
    }
    return dy3[at];
}

fn b_at(job: Job, p: u32, l: u32, j: u32) -> f32 {
    let at = l * call.k + j;
    if p == 0u {
        return w0[at];
    }
    return w1[at];
}

fn put(job: Job, i: u32, j: u32, sum: f32) {
    let at = i * call.k + j;
    var value = sum;
    if job.s == 0u {
        if (call.add & 1u) != 0u {
            value += dx0[at];
        }
        dx0[at] = value;
    } else {
        if (call.add & 2u) != 0u {
            value += dx1[at];
        }
        dx1[at] = value;
    }
}

// dx = Σ_q dy_q W_q (+ dx), q = 0 .. 3
//
// dy_q [m, n_q], W_q [n_q, k], dx [m, k] from element `first` on. One chain of fma over all n_q, in the order of q.
// The tiles of dx are numbered row by row.

struct Call {
    n: vec4<u32>,
    m: u32,
    k: u32,
    first: u32,
    count: u32,
    add: u32,
    tiles: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> dy0: array<f32>;
@group(0) @binding(1) var<storage, read> dy1: array<f32>;
@group(0) @binding(2) var<storage, read> dy2: array<f32>;
@group(0) @binding(3) var<storage, read> dy3: array<f32>;
@group(0) @binding(4) var<storage, read> w0: array<f32>;
@group(0) @binding(5) var<storage, read> w1: array<f32>;
@group(0) @binding(6) var<storage, read> w2: array<f32>;
@group(0) @binding(7) var<storage, read> w3: array<f32>;
@group(0) @binding(8) var<storage, read_write> dx: array<f32>;

// Rows of dy lie in memory as rows of A; columns of B are not contiguous.
const A_ROWS: u32 = 1u;
const B_COLUMNS: u32 = 0u;

struct Job { row: u32, column: u32, m: u32, n: u32 }

fn job_of(tile: u32) -> Job {
    let across = (call.k + TILE - 1u) / TILE;
    return Job(tile / across * TILE, tile % across * TILE, call.m, call.k);
}

fn parts() -> u32 {
    return call.count;
}

fn range_of(job: Job, q: u32) -> vec2<u32> {
    switch q {
        case 0u: { return vec2<u32>(0u, call.n.x); }
        case 1u: { return vec2<u32>(0u, call.n.y); }
        case 2u: { return vec2<u32>(0u, call.n.z); }
        default: { return vec2<u32>(0u, call.n.w); }
    }
}

fn a_at(job: Job, q: u32, i: u32, l: u32) -> f32 {
    switch q {
        case 0u: { return dy0[i * call.n.x + l]; }
        case 1u: { return dy1[i * call.n.y + l]; }
        case 2u: { return dy2[i * call.n.z + l]; }
        default: { return dy3[i * call.n.w + l]; }
    }
}

fn b_at(job: Job, q: u32, l: u32, j: u32) -> f32 {
    let at = l * call.k + j;
    switch q {
        case 0u: { return w0[at]; }
        case 1u: { return w1[at]; }
        case 2u: { return w2[at]; }
        default: { return w3[at]; }
    }
}

fn put(job: Job, i: u32, j: u32, sum: f32) {
    let at = call.first + i * call.k + j;
    var value = sum;
    if call.add != 0u {
        value += dx[at];
    }
    dx[at] = value;
}

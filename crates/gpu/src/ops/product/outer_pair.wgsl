// dW_p = Σ_s dy_psᵀ x_s, p, s = 0, 1: two streams of rows with one or two weights
//
// dy_ps [rows_s, n_p] with q = 2 p + s, x_s [rows_s, k], dW_p [n_p, k]. One chain of fma over the rows of both streams.
// The tiles of dW_0 come before those of dW_1, from `second` on, each row by row.

struct Call {
    n: vec2<u32>,
    rows: vec2<u32>,
    k: u32,
    second: u32,
    tiles: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x0: array<f32>;
@group(0) @binding(1) var<storage, read> x1: array<f32>;
@group(0) @binding(2) var<storage, read> dy0: array<f32>;
@group(0) @binding(3) var<storage, read> dy1: array<f32>;
@group(0) @binding(4) var<storage, read> dy2: array<f32>;
@group(0) @binding(5) var<storage, read> dy3: array<f32>;
@group(0) @binding(6) var<storage, read_write> dw0: array<f32>;
@group(0) @binding(7) var<storage, read_write> dw1: array<f32>;

// dyᵀ and x both have contiguous lines across the inner index.
const A_ROWS: u32 = 0u;
const B_COLUMNS: u32 = 0u;

struct Job { p: u32, row: u32, column: u32, m: u32, n: u32 }

fn job_of(tile: u32) -> Job {
    let across = (call.k + TILE - 1u) / TILE;
    if tile < call.second {
        return Job(0u, tile / across * TILE, tile % across * TILE, call.n.x, call.k);
    }
    let place = tile - call.second;
    return Job(1u, place / across * TILE, place % across * TILE, call.n.y, call.k);
}

fn parts() -> u32 {
    return 2u;
}

fn range_of(job: Job, s: u32) -> vec2<u32> {
    return vec2<u32>(0u, select(call.rows.y, call.rows.x, s == 0u));
}

fn a_at(job: Job, s: u32, i: u32, l: u32) -> f32 {
    let at = l * job.m + i;
    if job.p == 0u {
        if s == 0u {
            return dy0[at];
        }
        return dy1[at];
    }
    if s == 0u {
        return dy2[at];
    }
    return dy3[at];
}

fn b_at(job: Job, s: u32, l: u32, j: u32) -> f32 {
    if s == 0u {
        return x0[l * call.k + j];
    }
    return x1[l * call.k + j];
}

fn put(job: Job, i: u32, j: u32, sum: f32) {
    let at = i * call.k + j;
    if job.p == 0u {
        dw0[at] = sum;
    } else {
        dw1[at] = sum;
    }
}

// C_e(i, j) = Σ_s Σ_l A_es(i, l) B_es(l, j), e = 0 .. batch
//
// A_es(i, l) = a[e a.x + s a.y + i a.z + l a.w], B_es(l, j) = b[e b.x + s b.y + l b.z + j b.w], C [batch, m, n], with
// s below `parts` and l below `depth`: any transposition is a choice of strides, and s sums over a batch that shares
// one C. The tiles of C are numbered entry by entry, row by row.

struct Call {
    a: vec4<u32>,
    b: vec4<u32>,
    m: u32,
    n: u32,
    depth: u32,
    parts: u32,
    tiles: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;

struct Job { entry: u32, row: u32, column: u32, m: u32, n: u32 }

fn job_of(number: u32) -> Job {
    let across = (call.n + TILE - 1u) / TILE;
    let each = (call.m + TILE - 1u) / TILE * across;
    let tile = number % each;
    return Job(number / each, tile / across * TILE, tile % across * TILE, call.m, call.n);
}

fn parts() -> u32 {
    return call.parts;
}

fn range_of(job: Job, part: u32) -> vec2<u32> {
    return vec2<u32>(0u, call.depth);
}

fn a_at(job: Job, part: u32, i: u32, l: u32) -> f32 {
    return a[job.entry * call.a.x + part * call.a.y + i * call.a.z + l * call.a.w];
}

fn b_at(job: Job, part: u32, l: u32, j: u32) -> f32 {
    return b[job.entry * call.b.x + part * call.b.y + l * call.b.z + j * call.b.w];
}

fn put(job: Job, i: u32, j: u32, sum: f32) {
    c[(job.entry * job.m + i) * job.n + j] = sum;
}

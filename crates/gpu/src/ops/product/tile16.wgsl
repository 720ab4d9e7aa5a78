
// ---- tile of 16 × 16: the second half of a product kernel ----
//
// C(i, j) = Σ_l A(i, l) B(l, j), where the first half of the kernel defines A, B and C (`a_at`, `b_at`, `b_four`,
// `put`), the tile that a workgroup owns (`job_of`) and the range of l (`parts`, `range_of`).
//
// For matrices with few rows or columns, such as decoding a few tokens, where reading the larger matrix once is all
// the work. A workgroup owns 16 × 16 elements of C, an invocation one of them. l advances in steps of 128, so that
// much is read at once; all invocations copy, even if few rows leave most of them without an element. Every element
// is one chain of fma over ascending l, as in the tile of 64 × 64, and has the same bits.

//!include group

const TILE: u32 = 16u;
// Vectors of four l in workgroup memory, and the length of a row there: one more, which keeps rows out of the same
// memory bank.
const VECTORS: u32 = 32u;
const ROW: u32 = 33u;

var<workgroup> tile_a: array<vec4<f32>, 528>;
var<workgroup> tile_b: array<vec4<f32>, 528>;

fn a_or_zero(job: Job, part: u32, i: u32, l: u32, end: u32) -> f32 {
    if i < job.m && l < end {
        return a_at(job, part, i, l);
    }
    return 0.0;
}

@compute @workgroup_size(256)
fn product(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let tile = group_index(workgroup, groups);
    if tile >= call.tiles {
        return;
    }
    let job = job_of(tile);
    // Which vectors this invocation copies: neighbours read neighbouring numbers of the device's memory.
    var a_l = local / 16u;
    var a_i = local % 16u;
    var a_down = 0u;
    var a_along = 16u;
    if A_ROWS == 1u {
        a_l = local % 32u;
        a_i = local / 32u;
        a_down = 8u;
        a_along = 0u;
    }
    var b_l = local / 16u;
    var b_j = local % 16u;
    var b_down = 0u;
    var b_along = 16u;
    if B_COLUMNS == 1u {
        b_l = local % 32u;
        b_j = local / 32u;
        b_down = 8u;
        b_along = 0u;
    }
    let y = local / 16u;
    let x = local % 16u;
    var c = 0.0;
    for (var part = 0u; part < parts(); part++) {
        let range = range_of(job, part);
        for (var start = range.x; start < range.y; start += 4u * VECTORS) {
            for (var turn = 0u; turn < 2u; turn++) {
                let ai = a_i + turn * a_down;
                let av = a_l + turn * a_along;
                let al = start + 4u * av;
                let i = job.row + ai;
                tile_a[ai * ROW + av] = vec4<f32>(
                    a_or_zero(job, part, i, al, range.y),
                    a_or_zero(job, part, i, al + 1u, range.y),
                    a_or_zero(job, part, i, al + 2u, range.y),
                    a_or_zero(job, part, i, al + 3u, range.y),
                );
                let bj = b_j + turn * b_down;
                let bv = b_l + turn * b_along;
                let bl = start + 4u * bv;
                let j = job.column + bj;
                var four = vec4<f32>(0.0);
                if j < job.n && bl < range.y {
                    four = b_four(job, part, bl, j, range.y);
                }
                tile_b[bj * ROW + bv] = four;
            }
            workgroupBarrier();
            let vectors = min(VECTORS, (range.y - start + 3u) / 4u);
            for (var l = 0u; l < vectors; l++) {
                let a = tile_a[y * ROW + l];
                let b = tile_b[x * ROW + l];
                c = fma(a.x, b.x, c);
                c = fma(a.y, b.y, c);
                c = fma(a.z, b.z, c);
                c = fma(a.w, b.w, c);
            }
            workgroupBarrier();
        }
    }
    let i = job.row + y;
    let j = job.column + x;
    if i < job.m && j < job.n {
        put(job, i, j, c);
    }
}

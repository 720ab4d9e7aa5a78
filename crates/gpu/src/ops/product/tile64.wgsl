
// ---- tile of 64 × 64: the second half of a product kernel ----
//
// C(i, j) = Σ_l A(i, l) B(l, j), where the first half of the kernel defines A, B and C (`a_at`, `b_at`, `put`), the
// tile that a workgroup owns (`job_of`) and the range of l (`parts`, `range_of`).
//
// A workgroup owns 64 × 64 elements of C, an invocation 4 × 4 of them in registers. l advances in steps of 16: the
// workgroup copies 64 × 16 numbers of A and of B to its memory, so that each is read once from the device instead of
// 16 times, and each read of workgroup memory serves four products. Every element is one chain of fma over ascending
// l. Numbers outside the matrices count as 0.

//!include group

const TILE: u32 = 64u;
// Numbers of l in workgroup memory, and the length of a row there: 16 vectors, and one that keeps rows out of the
// same memory bank.
const STEP: u32 = 16u;
const ROW: u32 = 17u;

var<workgroup> tile_a: array<vec4<f32>, 272>;
var<workgroup> tile_b: array<vec4<f32>, 272>;

fn a_or_zero(job: Job, part: u32, i: u32, l: u32, end: u32) -> f32 {
    if i < job.m && l < end {
        return a_at(job, part, i, l);
    }
    return 0.0;
}

fn b_or_zero(job: Job, part: u32, l: u32, j: u32, end: u32) -> f32 {
    if j < job.n && l < end {
        return b_at(job, part, l, j);
    }
    return 0.0;
}

fn put_four(job: Job, i: u32, j: u32, values: vec4<f32>) {
    if i < job.m {
        if j < job.n {
            put(job, i, j, values.x);
        }
        if j + 1u < job.n {
            put(job, i, j + 1u, values.y);
        }
        if j + 2u < job.n {
            put(job, i, j + 2u, values.z);
        }
        if j + 3u < job.n {
            put(job, i, j + 3u, values.w);
        }
    }
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
    // Which vector of each tile this invocation copies: neighbours read neighbouring numbers of the device's memory.
    var a_l = local / 16u;
    var a_i = local % 16u;
    if A_ROWS == 1u {
        a_l = local % 16u;
        a_i = local / 16u;
    }
    var b_l = local / 16u;
    var b_j = local % 16u;
    if B_COLUMNS == 1u {
        b_l = local % 16u;
        b_j = local / 16u;
    }
    let i = job.row + 4u * a_i;
    let j = job.column + 4u * b_j;
    // Which 4 × 4 elements of C it owns.
    let y = local / 16u;
    let x = local % 16u;
    var c0 = vec4<f32>(0.0);
    var c1 = vec4<f32>(0.0);
    var c2 = vec4<f32>(0.0);
    var c3 = vec4<f32>(0.0);
    for (var part = 0u; part < parts(); part++) {
        let range = range_of(job, part);
        for (var start = range.x; start < range.y; start += STEP) {
            let al = start + a_l;
            tile_a[a_l * ROW + a_i] = vec4<f32>(
                a_or_zero(job, part, i, al, range.y),
                a_or_zero(job, part, i + 1u, al, range.y),
                a_or_zero(job, part, i + 2u, al, range.y),
                a_or_zero(job, part, i + 3u, al, range.y),
            );
            let bl = start + b_l;
            tile_b[b_l * ROW + b_j] = vec4<f32>(
                b_or_zero(job, part, bl, j, range.y),
                b_or_zero(job, part, bl, j + 1u, range.y),
                b_or_zero(job, part, bl, j + 2u, range.y),
                b_or_zero(job, part, bl, j + 3u, range.y),
            );
            workgroupBarrier();
            for (var l = 0u; l < STEP; l++) {
                let a = tile_a[l * ROW + y];
                let b = tile_b[l * ROW + x];
                c0 = fma(vec4<f32>(a.x), b, c0);
                c1 = fma(vec4<f32>(a.y), b, c1);
                c2 = fma(vec4<f32>(a.z), b, c2);
                c3 = fma(vec4<f32>(a.w), b, c3);
            }
            workgroupBarrier();
        }
    }
    let row = job.row + 4u * y;
    let column = job.column + 4u * x;
    put_four(job, row, column, c0);
    put_four(job, row + 1u, column, c1);
    put_four(job, row + 2u, column, c2);
    put_four(job, row + 3u, column, c3);
}

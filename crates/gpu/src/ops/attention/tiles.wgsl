// What the kernels of attention share: products of tiles. A workgroup owns ROWS rows (of queries, or of keys) of one
// batch entry and head, and reads 64 rows of the other kind at a time. Its threads form a grid of TY × TX; thread
// (ty, tx) holds elements (ty + TY r, tx + TX c) of a product, r < R, c < C.
//
// A kernel that uses it defines the rows it multiplies: own(which, row, column) and other(which, row, column), which
// are 0 past the ends of the tensors.
//
// Constants: TY, TX, R, C with TX C = 64; WIDEST: the larger of the widths d of keys and e of values, rounded up.
const ROWS: u32 = TY * R;
const THREADS: u32 = TY * TX;
const OTHERS: u32 = 64u;
// Columns or rows of a factor that are in workgroup memory at a time.
const DEPTH: u32 = 16u;
// Distance of rows in workgroup memory: odd, so that neighbouring rows lie in different banks.
const STRIDE: u32 = DEPTH + 1u;
const TILE_STRIDE: u32 = OTHERS + 1u;
// Elements of a row of an accumulator that a thread holds.
const COLUMNS: u32 = WIDEST / TX;

var<workgroup> factors: array<f32, max((ROWS + OTHERS) * STRIDE, DEPTH * WIDEST + TX)>;
var<workgroup> tile: array<f32, ROWS * TILE_STRIDE>;

struct Thread { local: u32, ty: u32, tx: u32 }

fn thread(local: u32) -> Thread {
    return Thread(local, local / TX, local % TX);
}

// s_ij = Σ_k own_ik other_jk, k ascending, for the ROWS × 64 pairs of rows.
fn products(at: Thread, which: u32, width: u32, s: ptr<function, array<f32, R * C>>) {
    for (var i = 0u; i < R * C; i++) {
        (*s)[i] = 0.0;
    }
    for (var k0 = 0u; k0 < width; k0 += DEPTH) {
        let depth = min(DEPTH, width - k0);
        workgroupBarrier();
        for (var i = at.local; i < (ROWS + OTHERS) * DEPTH; i += THREADS) {
            let row = i / DEPTH;
            let k = i % DEPTH;
            var value = 0.0;
            if k < depth {
                if row < ROWS {
                    value = own(which, row, k0 + k);
                } else {
                    value = other(which, row - ROWS, k0 + k);
                }
            }
            factors[row * STRIDE + k] = value;
        }
        workgroupBarrier();
        for (var k = 0u; k < depth; k++) {
            var b: array<f32, C>;
            for (var c = 0u; c < C; c++) {
                b[c] = factors[(ROWS + at.tx + TX * c) * STRIDE + k];
            }
            for (var r = 0u; r < R; r++) {
                let a = factors[(at.ty + TY * r) * STRIDE + k];
                for (var c = 0u; c < C; c++) {
                    (*s)[r * C + c] = fma(a, b[c], (*s)[r * C + c]);
                }
            }
        }
    }
}

// sum_ic += Σ_j tile_ij other_jc, j ascending below `count`: the tile times rows of the given width.
fn add_products(
    at: Thread,
    which: u32,
    width: u32,
    count: u32,
    sum: ptr<function, array<f32, R * COLUMNS>>,
) {
    for (var j0 = 0u; j0 < count; j0 += DEPTH) {
        let depth = min(DEPTH, count - j0);
        workgroupBarrier();
        for (var i = at.local; i < depth * width; i += THREADS) {
            factors[i] = other(which, j0 + i / width, i % width);
        }
        workgroupBarrier();
        for (var j = 0u; j < depth; j++) {
            var a: array<f32, R>;
            for (var r = 0u; r < R; r++) {
                a[r] = tile[(at.ty + TY * r) * TILE_STRIDE + j0 + j];
            }
            for (var c = 0u; c < COLUMNS; c++) {
                let b = factors[j * width + at.tx + TX * c];
                for (var r = 0u; r < R; r++) {
                    (*sum)[r * COLUMNS + c] = fma(a[r], b, (*sum)[r * COLUMNS + c]);
                }
            }
        }
    }
}

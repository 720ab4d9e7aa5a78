// A block of 64 × 64 elements of Σ_t π_t q_t do_tᵀ; 256 invocations own 4 × 4 elements each. Up to 16 tokens at a time
// pass through workgroup memory.

var<workgroup> left: array<vec4<f32>, 256>;     // [token][16]: π q, four rows of d_k each
var<workgroup> right: array<vec4<f32>, 256>;    // [token][16]: do, four columns of d_v each

var<private> outer_sum: array<vec4<f32>, 4>;

fn outer_corner(block: u32) -> vec2<u32> {
    let across = (call.dv + 63u) / 64u;
    return vec2<u32>(block / across, block % across) * 64u;
}

fn outer_start() {
    for (var i = 0u; i < 4u; i++) {
        outer_sum[i] = vec4<f32>();
    }
}

// Adds `count` tokens. Invocation 16 t + s loads part s of token t, which has row `row` and weight `weight` and is
// there if `valid`. Has barriers, the last after the last read.
fn outer_add(block: u32, head: u32, row: u32, weight: f32, valid: bool, count: u32, lane: u32) {
    let corner = outer_corner(block);
    let key_heads = call.heads / call.group;
    let i = corner.x + (lane % 16u) * 4u;
    let j = corner.y + (lane % 16u) * 4u;
    var l = vec4<f32>();
    var r = vec4<f32>();
    if valid {
        let factor = numbers[row * call.heads + head].w;
        for (var c = 0u; c < 4u; c++) {
            if i + c < call.dk {
                let value = query[(row * key_heads + head / call.group) * call.dk + i + c];
                l[c] = value * factor * call.query_scale * weight;
            }
            if j + c < call.dv {
                r[c] = gradient[(row * call.heads + head) * call.dv + j + c];
            }
        }
    }
    left[lane] = l;
    right[lane] = r;
    workgroupBarrier();
    for (var t = 0u; t < count; t++) {
        let a = left[t * 16u + lane / 16u];
        let b = right[t * 16u + lane % 16u];
        for (var c = 0u; c < 4u; c++) {
            outer_sum[c] = fma(vec4<f32>(a[c]), b, outer_sum[c]);
        }
    }
    workgroupBarrier();
}

fn outer_write(block: u32, anchor: u32, head: u32, lane: u32) {
    let corner = outer_corner(block);
    for (var a = 0u; a < 4u; a++) {
        let i = corner.x + (lane / 16u) * 4u + a;
        for (var b = 0u; b < 4u; b++) {
            let j = corner.y + (lane % 16u) * 4u + b;
            if i < call.dk && j < call.dv {
                let at = ((anchor * call.heads + head) * call.dk + i) * call.dv + j;
                var value = outer_sum[a][b];
                if call.add == 1u {
                    value += d_states[at];
                }
                d_states[at] = value;
            }
        }
    }
}

// States in storage precision: bf16 rounds to nearest, ties to even; int8 has scale = max |v| / 127 for each row of d_v
// numbers and code = round(v / scale), ties away from zero. Codes and scales are those of the CPU engine, bit for bit,
// but for numbers below 1e-38.
//
// values [n, rows, d_v] as bits; slots [n]; arena: slots of slot_words words, see states.wgsl; inverses [n, rows]
//
// `scales` runs first, for int8: an invocation owns a row. Then `codes`: an invocation owns a word of codes, which may
// belong to two rows. Divisions of WGSL are not exact, so the two of a row are done in integers.

//!include group

struct Call { anchors: u32, rows: u32, width: u32, slot_words: u32, code_words: u32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> values: array<u32>;
@group(0) @binding(1) var<storage, read> slots: array<u32>;
@group(0) @binding(2) var<storage, read_write> arena: array<u32>;
@group(0) @binding(3) var<storage, read_write> inverses: array<f32>;

const INFINITY: u32 = 0x7f800000u;

// Significand of a positive number with its highest bit at 23, and the exponent that belongs to it.
fn parts_of(bits: u32) -> vec2<i32> {
    let exponent = i32(bits >> 23u);
    let fraction = bits & 0x7fffffu;
    if exponent > 0 {
        return vec2<i32>(i32(fraction | 0x800000u), exponent);
    }
    let shift = i32(countLeadingZeros(fraction)) - 8;
    return vec2<i32>(i32(fraction << u32(shift)), 1 - shift);
}

// Bits of a / b, rounded to nearest, ties to even, for positive finite a and b.
fn divide(a: u32, b: u32) -> u32 {
    let top = parts_of(a);
    let bottom = parts_of(b);
    var exponent = top.y - bottom.y + 127;
    var rest = u32(top.x);
    let by = u32(bottom.x);
    if rest < by {
        rest <<= 1u;
        exponent -= 1;
    }
    // 25 bits: the significand and one more.
    var quotient = 0u;
    for (var i = 0u; i < 25u; i++) {
        quotient <<= 1u;
        if rest >= by {
            rest -= by;
            quotient |= 1u;
        }
        rest <<= 1u;
    }
    let drop = u32(1 + max(0, 1 - exponent));
    if drop > 26u {
        return 0u;
    }
    let half = (quotient >> (drop - 1u)) & 1u;
    let below = (quotient & ((1u << (drop - 1u)) - 1u)) | rest;
    var significand = quotient >> drop;
    if half == 1u && (below != 0u || significand % 2u == 1u) {
        significand += 1u;
    }
    if exponent <= 0 {
        return significand;
    }
    return (u32(exponent) << 23u) + significand - 0x800000u;
}

@compute @workgroup_size(64)
fn scales(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group_index(workgroup, groups) * 64u + lane;
    if row >= call.anchors * call.rows {
        return;
    }
    var largest = 0u;
    for (var j = 0u; j < call.width; j++) {
        let size = values[row * call.width + j] & 0x7fffffffu;
        if size <= INFINITY {
            largest = max(largest, size);
        }
    }
    var scale = largest;
    if largest != 0u && largest != INFINITY {
        scale = divide(largest, 0x42fe0000u); // 127
    }
    var inverse = 0u;
    if scale >= 0x800000u && scale != INFINITY {
        inverse = divide(0x3f800000u, scale);
    }
    let slot = slots[row / call.rows] * call.slot_words;
    arena[slot + call.code_words + row % call.rows] = scale;
    inverses[row] = bitcast<f32>(inverse);
}

fn to_bf16(bits: u32) -> u32 {
    if (bits & 0x7fffffffu) > INFINITY {
        return (bits >> 16u) | 0x40u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

fn to_int8(bits: u32, inverse: f32) -> u32 {
    if (bits & 0x7fffffffu) > INFINITY || inverse == 0.0 {
        return 0u;
    }
    let size = min(abs(bitcast<f32>(bits) * inverse), 127.0);
    var code = i32(floor(size));
    if size - floor(size) >= 0.5 {
        code += 1;
    }
    if (bits >> 31u) == 1u {
        code = -code;
    }
    return bitcast<u32>(code) & 0xffu;
}

@compute @workgroup_size(64)
fn codes(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups) * 64u + lane;
    if index >= call.anchors * call.code_words {
        return;
    }
    let anchor = index / call.code_words;
    let word = index % call.code_words;
    let count = call.rows * call.width;
    let each = 1u << STORAGE; // codes in a word
    var packed = 0u;
    for (var c = 0u; c < each; c++) {
        let e = word * each + c;
        if e < count {
            let bits = values[anchor * count + e];
            if STORAGE == 0u {
                packed = bits;
            } else if STORAGE == 1u {
                packed |= to_bf16(bits) << (16u * c);
            } else {
                packed |= to_int8(bits, inverses[anchor * call.rows + e / call.width]) << (8u * c);
            }
        }
    }
    arena[slots[anchor] * call.slot_words + word] = packed;
}

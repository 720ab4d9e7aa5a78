// y[i] = x[i] cos a − x[i + r/2] sin a,  y[i + r/2] = x[i + r/2] cos a + x[i] sin a,  a = p f_i;  y[j] = x[j], j ≥ r
//
// x, y [B, T, H·d]; token t is at position p = offset + t. Devices compute sines of large angles badly, so the host
// gives, from f64, e^(ia) of every 64th position (`coarse` rows of table) and of the distances 0 to 63 (the rows after
// them); e^(ia) of a position is the product of two. Each row holds r/2 cosines, then r/2 sines. The backward pass turns
// by −a (`direction` is −1). A workgroup owns 256 items, an invocation one:
// a pair, or an element that does not turn. Nothing is shared.

//!include group

struct Call {
    // Items of all heads.
    all: u32,
    tokens: u32,
    heads: u32,
    half: u32,
    // offset mod 64
    first: u32,
    // Rows of table before those of the distances, and the distance of the first of these.
    coarse: u32,
    first_distance: u32,
    direction: f32,
    // Items of a head: r/2 pairs, then d − r elements.
    items: u32,
}
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> table: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(256)
fn turn(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let n = group_index(workgroup, groups) * 256u + local;
    if n >= call.all {
        return;
    }
    let i = n % call.items;
    let row = n / call.items;
    let at = row * (call.items + call.half) + i;
    if i >= call.half {
        y[at + call.half] = x[at + call.half];
        return;
    }
    let p = call.first + row / call.heads % call.tokens;
    let one = p / 64u * 2u * call.half + i;
    let two = (call.coarse + p % 64u - call.first_distance) * 2u * call.half + i;
    let cos1 = table[one];
    let sin1 = table[one + call.half];
    let cos2 = table[two];
    let sin2 = table[two + call.half];
    let cosine = fma(cos1, cos2, -(sin1 * sin2));
    let sine = call.direction * fma(sin1, cos2, cos1 * sin2);
    let a = x[at];
    let b = x[at + call.half];
    y[at] = fma(a, cosine, -(b * sine));
    y[at + call.half] = fma(b, cosine, a * sine);
}

// Softmax over scores that come in chunks of CHUNK: the largest so far and Σ exp(score − largest). The null entry,
// if there is one, comes first. A NaN score makes the sum NaN, and so every weight.

// Scores that are added at a time; the same in every kernel, for the same bits.
const CHUNK: u32 = 16u;
const LOWEST: f32 = -3.4028235e38;

struct Softmax {
    largest: f32,
    sum: f32,
}

fn softmax_start(row: u32, head: u32) -> Softmax {
    if call.has_null == 1u {
        return Softmax(null_score[row * call.heads + head], 1.0);
    }
    return Softmax(LOWEST, 0.0);
}

fn larger(a: f32, b: f32) -> f32 {
    return select(a, b, b > a);
}

// Weight of the null entry, once the softmax is complete.
fn null_weight(row: u32, head: u32, largest: f32, inverse: f32) -> f32 {
    if call.has_null == 1u {
        return exp(null_score[row * call.heads + head] - largest) * inverse;
    }
    return 0.0;
}

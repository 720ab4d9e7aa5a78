
// ---- weights in f32, bf16 or int8: B(l, j) = W_q[j, l] ----

fn code(word: u32, at: u32) -> f32 {
    return f32(bitcast<i32>(word << (24u - 8u * at)) >> 24u);
}

fn b_at(job: Job, part: u32, l: u32, j: u32) -> f32 {
    if FORMAT == 1u {
        let pair = word(job.q, j * call.stride + l / 2u);
        return bitcast<f32>(select(pair << 16u, pair & 0xffff0000u, l % 2u == 1u));
    }
    if FORMAT == 2u {
        return code(word(job.q, job.n + j * call.stride + l / 4u), l % 4u);
    }
    return bitcast<f32>(word(job.q, j * call.stride + l));
}

// B(l .. l + 4, j) for l a multiple of 4, with 0 from `end` on: rows of codes are filled with zeros.
fn b_four(job: Job, part: u32, l: u32, j: u32, end: u32) -> vec4<f32> {
    let row = j * call.stride;
    if FORMAT == 1u {
        let low = word(job.q, row + l / 2u);
        var high = 0u;
        if l + 2u < end {
            high = word(job.q, row + l / 2u + 1u);
        }
        return bitcast<vec4<f32>>(vec4<u32>(low << 16u, low & 0xffff0000u, high << 16u, high & 0xffff0000u));
    }
    if FORMAT == 2u {
        let four = word(job.q, job.n + row + l / 4u);
        return vec4<f32>(code(four, 0u), code(four, 1u), code(four, 2u), code(four, 3u));
    }
    var four = vec4<f32>(b_at(job, part, l, j), 0.0, 0.0, 0.0);
    if l + 1u < end {
        four.y = b_at(job, part, l + 1u, j);
    }
    if l + 2u < end {
        four.z = b_at(job, part, l + 2u, j);
    }
    if l + 3u < end {
        four.w = b_at(job, part, l + 3u, j);
    }
    return four;
}

// A finished sum for column j: in int8, the scale of the weight's row multiplies it.
fn scaled(job: Job, j: u32, sum: f32) -> f32 {
    if FORMAT == 2u {
        return sum * bitcast<f32>(word(job.q, j));
    }
    return sum;
}

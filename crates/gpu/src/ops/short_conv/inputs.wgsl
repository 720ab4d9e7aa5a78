// Inputs and weights of up to three convolutions, which differ in their channels only: x_q [B, T, D_q], w_q [D_q, K].

@group(0) @binding(0) var<storage, read> x0: array<f32>;
@group(0) @binding(1) var<storage, read> x1: array<f32>;
@group(0) @binding(2) var<storage, read> x2: array<f32>;
@group(0) @binding(3) var<storage, read> w0: array<f32>;
@group(0) @binding(4) var<storage, read> w1: array<f32>;
@group(0) @binding(5) var<storage, read> w2: array<f32>;

// A place in lists of rows, one list per convolution: convolution, row, channel, and the index within the list.
struct Place { q: u32, row: u32, d: u32, width: u32, at: u32 }

// Number `number` of the lists with `rows` rows each.
fn place_of(number: u32, rows: u32) -> Place {
    var q = 0u;
    var at = number;
    var width = call.width.x;
    if at >= rows * width {
        at -= rows * width;
        q = 1u;
        width = call.width.y;
        if at >= rows * width {
            at -= rows * width;
            q = 2u;
            width = call.width.z;
        }
    }
    let row = at / width;
    return Place(q, row, at - row * width, width, at);
}

// Numbers of all lists with `rows` rows each.
fn numbers(rows: u32) -> u32 {
    return rows * (call.width.x + call.width.y + call.width.z);
}

fn start_of(q: u32, starts: vec4<u32>) -> u32 {
    return select(select(starts.z, starts.y, q == 1u), starts.x, q == 0u);
}

fn x_at(q: u32, at: u32) -> f32 {
    switch q {
        case 0u: { return x0[at]; }
        case 1u: { return x1[at]; }
        default: { return x2[at]; }
    }
}

fn w_at(q: u32, at: u32) -> f32 {
    switch q {
        case 0u: { return w0[at]; }
        case 1u: { return w1[at]; }
        default: { return w2[at]; }
    }
}

// x_q[b, t − K + 1 + j, d], t up to T
fn token(q: u32, b: u32, t: u32, j: u32, d: u32, width: u32) -> f32 {
    let before = call.kernel - 1u;
    if t + j >= before {
        return x_at(q, (b * call.tokens + (t + j - before)) * width + d);
    }
    return tail_at(q, (b * before + t + j) * width + d);
}

fn convolved(q: u32, b: u32, t: u32, d: u32, width: u32) -> f32 {
    var z = 0.0;
    for (var j = 0u; j < call.kernel; j += 1u) {
        z = fma(w_at(q, d * call.kernel + j), token(q, b, t, j, d, width), z);
    }
    return z;
}

// Activations that do not overflow at either end.
fn sigmoid(x: f32) -> f32 {
    if x >= 0.0 {
        return 1.0 / (1.0 + exp(-x));
    }
    let e = exp(x);
    return e / (1.0 + e);
}

fn silu(x: f32) -> f32 {
    return x * sigmoid(x);
}

fn silu_slope(x: f32) -> f32 {
    let s = sigmoid(x);
    return s * (1.0 + x * (1.0 - s));
}

// log(1 + exp(x)). For small exp(x) the plain form would lose all digits, so its series is used there.
fn softplus(x: f32) -> f32 {
    let e = exp(-abs(x));
    var small = log(1.0 + e);
    if e < 0.01 {
        small = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - 0.25 * e)));
    }
    return max(x, 0.0) + small;
}

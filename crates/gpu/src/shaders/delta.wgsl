//!include activation

// Gates of the delta rules: (log α, β, d log α / d retention, d β / d write).
fn delta_gates(retention: f32, write: f32, a_log: f32, dt_bias: f32, strength: f32) -> vec4<f32> {
    let z = retention + dt_bias;
    let rate = -exp(a_log);
    let beta = strength * sigmoid(write);
    return vec4<f32>(rate * softplus(z), beta, rate * sigmoid(z), beta * sigmoid(-write));
}

// Factor of the L2 norm, from the sum of squares.
fn l2_factor(squares: f32) -> f32 {
    return 1.0 / sqrt(squares + 1e-6);
}

fn across(x: vec4<f32>) -> f32 {
    return (x.x + x.y) + (x.z + x.w);
}

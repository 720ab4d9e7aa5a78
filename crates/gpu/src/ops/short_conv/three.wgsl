
// Three convolutions without tails.
@group(0) @binding(6) var<storage, read> dy0: array<f32>;
@group(0) @binding(7) var<storage, read> dy1: array<f32>;
@group(0) @binding(8) var<storage, read> dy2: array<f32>;
@group(0) @binding(9) var<storage, read_write> results: array<f32>;

fn dy_at(q: u32, at: u32) -> f32 {
    switch q {
        case 0u: { return dy0[at]; }
        case 1u: { return dy1[at]; }
        default: { return dy2[at]; }
    }
}

fn tail_at(q: u32, at: u32) -> f32 {
    return 0.0;
}

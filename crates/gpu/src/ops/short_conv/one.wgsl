
// One convolution, which may have a tail.
@group(0) @binding(6) var<storage, read> tail: array<f32>;
@group(0) @binding(7) var<storage, read> dy: array<f32>;
@group(0) @binding(8) var<storage, read_write> results: array<f32>;

fn dy_at(q: u32, at: u32) -> f32 {
    return dy[at];
}

fn tail_at(q: u32, at: u32) -> f32 {
    if call.has_tail == 0u {
        return 0.0;
    }
    return tail[at];
}

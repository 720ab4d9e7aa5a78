
// The last K − 1 inputs before the call, [B, K − 1, D_q]; zeros if there are none.
@group(0) @binding(6) var<storage, read> tail0: array<f32>;
@group(0) @binding(7) var<storage, read> tail1: array<f32>;
@group(0) @binding(8) var<storage, read> tail2: array<f32>;

// Results and new tails.
@group(0) @binding(9) var<storage, read_write> results: array<f32>;

fn put_tail(at: u32, value: f32) {
    results[at] = value;
}

fn tail_at(q: u32, at: u32) -> f32 {
    if call.has_tail == 0u {
        return 0.0;
    }
    switch q {
        case 0u: { return tail0[at]; }
        case 1u: { return tail1[at]; }
        default: { return tail2[at]; }
    }
}

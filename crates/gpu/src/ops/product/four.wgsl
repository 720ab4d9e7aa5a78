
// B(l .. l + 4, j), with 0 from `end` on.
fn b_four(job: Job, part: u32, l: u32, j: u32, end: u32) -> vec4<f32> {
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

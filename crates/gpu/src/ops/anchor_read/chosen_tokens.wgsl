// g_m = A_m do;   da_m = π_m (<q, g_m> − δ);   dq = Σ_m π_m g_m;   dρ = scale Σ_m da_m κ_m      over chosen anchors
//
// Shapes as in read.wgsl; lists as in choose.wgsl; numbers as in delta.wgsl; d_scores [rows, heads, K]: da.
//
// A workgroup owns a token and a key head with all its value heads, whose dq it adds in order. For g, 16 invocations
// share a row of the state and read neighbouring columns; their products are added in order. For the rest, an
// invocation owns elements of d_k and of d_r.

//!include group

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> routing_keys: array<f32>;
@group(0) @binding(2) var<storage, read> states: array<f32>;
@group(0) @binding(3) var<storage, read> numbers: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> gradient: array<f32>;
@group(0) @binding(5) var<storage, read> lists: array<u32>;
@group(0) @binding(6) var<storage, read_write> d_query: array<f32>;
@group(0) @binding(7) var<storage, read_write> d_routing: array<f32>;
@group(0) @binding(8) var<storage, read_write> d_scores: array<f32>;

const NO_ANCHOR: u32 = 0xffffffffu;
const LANES: u32 = 256u;
const ROWS: u32 = LANES / 16u;

var<workgroup> q: array<f32, DK>;
var<workgroup> dq: array<f32, DK>;
var<workgroup> g: array<f32, DK>;
var<workgroup> d_rho: array<f32, DR>;
var<workgroup> parts: array<f32, LANES>;

// <q, x> over d_k, in a fixed order. An invocation reads its own elements of q and dq; a barrier must precede if it is to
// read g. Has barriers, the last after its last read.
fn along_query(of_gradient: bool, lane: u32) -> f32 {
    var sum = 0.0;
    for (var i = lane; i < call.dk; i += LANES) {
        sum = fma(q[i], select(g[i], dq[i], of_gradient), sum);
    }
    parts[lane] = sum;
    workgroupBarrier();
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        if lane < step {
            parts[lane] += parts[lane + step];
        }
        workgroupBarrier();
    }
    let total = parts[0];
    workgroupBarrier();
    return total;
}

// g = A do, for the state of `anchor`. Has barriers, the last after its last write.
fn apply_state(anchor: u32, row: u32, head: u32, lane: u32) {
    let start = (anchor * call.heads + head) * call.dk;
    let out = (row * call.heads + head) * call.dv;
    // Tested at its end, so that software devices notice if its last barrier is missing (docs/gpu.md).
    var block = 0u;
    loop {
        let i = block + lane / 16u;
        var sum = 0.0;
        if i < call.dk {
            for (var j = lane % 16u; j < call.dv; j += 16u) {
                sum = fma(states[(start + i) * call.dv + j], gradient[out + j], sum);
            }
        }
        parts[lane] = sum;
        workgroupBarrier();
        if lane % 16u == 0u && i < call.dk {
            sum = 0.0;
            for (var s = 0u; s < 16u; s++) {
                sum += parts[lane + s];
            }
            g[i] = sum;
        }
        workgroupBarrier();
        continuing {
            block += ROWS;
            break if block >= call.dk;
        }
    }
}

@compute @workgroup_size(LANES)
fn chosen_tokens(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups);
    let key_heads = call.heads / call.group;
    let key_head = index % key_heads;
    let row = index / key_heads;
    if row >= call.rows {
        return;
    }
    let factor = numbers[row * call.heads + key_head * call.group].w;
    for (var i = lane; i < call.dk; i += LANES) {
        q[i] = query[index * call.dk + i] * factor * call.query_scale;
        dq[i] = 0.0;
    }
    for (var member = 0u; member < call.group; member++) {
        let head = key_head * call.group + member;
        let at = (row * call.heads + head) * call.k;
        let delta = numbers[row * call.heads + head].z;
        for (var r = lane; r < call.dr; r += LANES) {
            d_rho[r] = 0.0;
        }
        for (var k = 0u; k < call.k; k++) {
            let anchor = lists[call.rows * call.heads * call.k + at + k];
            if anchor == NO_ANCHOR {
                break;
            }
            let weight = bitcast<f32>(lists[at + k]);
            apply_state(anchor, row, head, lane);
            let d_score = weight * (along_query(false, lane) - delta);
            if lane == 0u {
                d_scores[at + k] = d_score;
            }
            for (var i = lane; i < call.dk; i += LANES) {
                dq[i] = fma(weight, g[i], dq[i]);
            }
            for (var r = lane; r < call.dr; r += LANES) {
                let key = routing_keys[(anchor * call.heads + head) * call.dr + r];
                d_rho[r] = fma(d_score, key, d_rho[r]);
            }
        }
        for (var r = lane; r < call.dr; r += LANES) {
            d_routing[(row * call.heads + head) * call.dr + r] = d_rho[r] * call.routing_scale;
        }
    }
    // Back through the norm: dx = (s dq − u <u, s dq>) / |q| with u = q / s.
    let along = along_query(true, lane);
    for (var i = lane; i < call.dk; i += LANES) {
        let inner = fma(-q[i] * call.root, along, dq[i] * call.query_scale);
        d_query[index * call.dk + i] = inner * factor;
    }
}

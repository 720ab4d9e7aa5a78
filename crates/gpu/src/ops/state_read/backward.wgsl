// u = q / sqrt(Σq² + 1e-6);   dA = s u doᵀ;   du = s A do;   dq = (du − u <u, du>) / sqrt(Σq² + 1e-6)
//
// Shapes as in kernel.wgsl; gradient as readout; d_query as query; d_states as states.
//
// A workgroup owns a row and a key head with all its value heads, whose du it adds in order. An invocation owns one of
// 16 columns in four rows of d_k at a time for dA and for the products, and rows of d_k for du. The 16 products of a
// row pass through workgroup memory and are added in order.

//!include group

struct Call { heads: u32, group: u32, dk: u32, dv: u32, strips: u32, rows: u32, query_scale: f32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> states: array<f32>;
@group(0) @binding(2) var<storage, read> gradient: array<f32>;
@group(0) @binding(3) var<storage, read_write> d_query: array<f32>;
@group(0) @binding(4) var<storage, read_write> d_states: array<f32>;

var<workgroup> u: array<f32, DK>;
var<workgroup> du: array<f32, DK>;
var<workgroup> parts: array<f32, 64>;
var<workgroup> factor: f32;
var<workgroup> along: f32;

@compute @workgroup_size(64)
fn backward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group_index(workgroup, groups);
    let key_heads = call.heads / call.group;
    let row = index / key_heads;
    if row >= call.rows {
        return;
    }
    for (var i = 63u - lane; i < call.dk; i += 64u) {
        u[i] = query[index * call.dk + i];
        du[i] = 0.0;
    }
    workgroupBarrier();
    if lane == 32u {
        var sum = 0.0;
        for (var i = 0u; i < call.dk; i++) {
            sum = fma(u[i], u[i], sum);
        }
        factor = 1.0 / sqrt(sum + 1e-6);
    }
    workgroupBarrier();
    for (var i = 63u - lane; i < call.dk; i += 64u) {
        u[i] *= factor;
    }
    workgroupBarrier();
    for (var member = 0u; member < call.group; member++) {
        let state = row * call.heads + (index % key_heads) * call.group + member;
        for (var block = 0u; block < call.dk; block += 4u) {
            let i = block + lane / 16u;
            var sum = 0.0;
            if i < call.dk {
                let scaled = u[i] * call.query_scale;
                for (var j = lane % 16u; j < call.dv; j += 16u) {
                    let at = (state * call.dk + i) * call.dv + j;
                    let d = gradient[state * call.dv + j];
                    sum = fma(states[at], d, sum);
                    d_states[at] = scaled * d;
                }
            }
            parts[lane] = sum;
            workgroupBarrier();
            if lane % 16u == 8u && i < call.dk {
                sum = 0.0;
                for (var s = 0u; s < 16u; s++) {
                    sum += parts[lane - 8u + s];
                }
                du[i] = fma(sum, call.query_scale, du[i]);
            }
            workgroupBarrier();
        }
    }
    if lane == 32u {
        var sum = 0.0;
        for (var i = 0u; i < call.dk; i++) {
            sum = fma(u[i], du[i], sum);
        }
        along = sum;
    }
    workgroupBarrier();
    for (var i = lane; i < call.dk; i += 64u) {
        d_query[index * call.dk + i] = factor * fma(-u[i], along, du[i]);
    }
}

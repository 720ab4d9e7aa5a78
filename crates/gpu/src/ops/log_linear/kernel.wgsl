// Forward pass: see step.wgsl for the recurrence and its constants.
//
// query, key [B, T, Hk·d_k]; value, readout [B, T, Hv·d_v]; gates [B·T, Hv, 4]; weights λ [B·T, Hv, NL]; initial
// [B, Hv, initial_levels, d_k, d_v]; states [B, Hv, levels, d_k, d_v], in the end those for position + T.
//
// A call may be one of several that share the work, for tokens begin … end − 1: the states pass through `states`.
//
// A workgroup owns 64 columns of the level states of one (batch row, value head), an invocation one column.

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key: array<f32>;
@group(0) @binding(2) var<storage, read> value: array<f32>;
@group(0) @binding(3) var<storage, read> gates: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> weights: array<f32>;
@group(0) @binding(5) var<storage, read> initial: array<f32>;
@group(0) @binding(6) var<storage, read_write> readout: array<f32>;
@group(0) @binding(7) var<storage, read_write> states: array<f32>;

@compute @workgroup_size(64)
fn forward(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let group = group_index(workgroup, groups);
    let owner = group / call.strips;
    if owner >= call.count {
        return;
    }
    let h = owner % call.value_heads;
    let b = owner / call.value_heads;
    let j = (group % call.strips) * 64u + local;
    let owns = j < call.d_v;
    let key_head = h / (call.value_heads / call.key_heads);
    let size = call.d_k * call.d_v;
    let own = owner * call.levels * size + j;
    if owns && call.begin == 0u {
        start_column(owner, j, own);
    }
    for (var first = call.begin; first < call.end; first += TILE) {
        let count = min(TILE, call.end - first);
        load_tile(b * call.tokens + first, count, key_head, local);
        if owns {
            for (var x = 0u; x < count; x += 1u) {
                let row = (b * call.tokens + first + x) * call.value_heads + h;
                let place = row * call.d_v + j;
                readout[place] = step(x, call.position + first + x, row, value[place], own, own);
            }
        }
    }
    if owns && call.end == call.tokens {
        let end = call.position + call.tokens;
        for (var m = 0u; m < call.levels; m += 1u) {
            if m == 0u || ((end >> (m - 1u)) & 1u) == 0u {
                for (var i = 0u; i < call.d_k; i += 1u) {
                    states[own + m * size + i * call.d_v] = 0.0;
                }
            }
        }
    }
}

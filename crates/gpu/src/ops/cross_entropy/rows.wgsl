// nll_t = ln Σ_v exp(L_tv) − L_t,target;  if GRADIENT, L ← (softmax(L) − onehot(target)) · factor in place;  if GREEDY,
// the first v with the largest L_tv
//
// L [rows, V], a block of the tokens that starts at token `first` of `count`; targets [count]; result [count] or, with
// GREEDY, [2, count]: nll, then the bits of v. A workgroup owns a token; invocation i owns every 256th logit from i on
// and overwrites only those, so that only the maximum and the sum pass through workgroup memory.

//!include group

struct Call { rows: u32, vocabulary: u32, first: u32, count: u32, factor: f32 }
var<immediate> call: Call;

@group(0) @binding(0) var<storage, read_write> logits: array<f32>;
@group(0) @binding(1) var<storage, read> targets: array<u32>;
@group(0) @binding(2) var<storage, read_write> result: array<f32>;

const SIZE: u32 = 256u;
var<workgroup> values: array<f32, 256>;
var<workgroup> places: array<u32, 256>;

@compute @workgroup_size(256)
fn rows(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = group_index(workgroup, groups);
    if row >= call.rows {
        return;
    }
    let token = call.first + row;
    let start = row * call.vocabulary;
    let target_at = targets[token];

    // The largest logit; among equal ones the first.
    var top = -3.4028234e38;
    var place = 0xffffffffu;
    for (var v = local; v < call.vocabulary; v += SIZE) {
        let value = logits[start + v];
        if value > top || place == 0xffffffffu {
            top = value;
            place = v;
        }
    }
    values[local] = top;
    places[local] = place;
    workgroupBarrier();
    for (var step = SIZE / 2u; step > 0u; step /= 2u) {
        if local < step {
            let other = values[local + step];
            let there = places[local + step];
            if there != 0xffffffffu && (other > values[local] || (other == values[local] && there < places[local])) {
                values[local] = other;
                places[local] = there;
            }
        }
        workgroupBarrier();
    }
    top = values[0];
    place = places[0];
    workgroupBarrier();

    var sum = 0.0;
    for (var v = local; v < call.vocabulary; v += SIZE) {
        sum += exp(logits[start + v] - top);
    }
    values[local] = sum;
    workgroupBarrier();
    for (var step = SIZE / 2u; step > 0u; step /= 2u) {
        if local < step {
            values[local] += values[local + step];
        }
        workgroupBarrier();
    }
    sum = values[0];

    // The owner of the target's logit writes the loss before it overwrites the logit.
    if target_at % SIZE == local {
        result[token] = log(sum) + (top - logits[start + target_at]);
        if GREEDY == 1u {
            result[call.count + token] = bitcast<f32>(place);
        }
    }
    if GRADIENT == 1u {
        let scale = call.factor / sum;
        for (var v = local; v < call.vocabulary; v += SIZE) {
            var d = exp(logits[start + v] - top) * scale;
            if v == target_at {
                d -= call.factor;
            }
            logits[start + v] = d;
        }
    }
}

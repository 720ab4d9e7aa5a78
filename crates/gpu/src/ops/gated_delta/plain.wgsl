// Bindings of the scan for inference without boundaries: gates are computed where they are needed, so one dispatch
// does all. The scan itself follows in kernel.wgsl.

@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key: array<f32>;
@group(0) @binding(2) var<storage, read> value: array<f32>;
@group(0) @binding(3) var<storage, read> retention: array<f32>;
@group(0) @binding(4) var<storage, read> write: array<f32>;
@group(0) @binding(5) var<storage, read> a_log: array<f32>;
@group(0) @binding(6) var<storage, read> dt_bias: array<f32>;
@group(0) @binding(7) var<storage, read> initial: array<f32>;
@group(0) @binding(8) var<storage, read_write> readout: array<f32>;
@group(0) @binding(9) var<storage, read_write> final_state: array<f32>;

fn gates_of(row: u32, h: u32) -> vec2<f32> {
    let i = row * call.value_heads + h;
    return delta_gates(retention[i], write[i], a_log[h], dt_bias[h], call.strength).xy;
}

fn open_row(b: u32) {}

fn checkpoint_before(t: u32) -> u32 {
    return 0u;
}

fn store_checkpoint(i: u32, x: f32) {}

fn store_error(i: u32, x: f32) {}

fn boundary_after(t: u32) -> u32 {
    return 0u;
}

fn store_boundary(i: u32, x: f32) {}


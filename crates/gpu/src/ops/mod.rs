//! The operations, a folder each: `kernel.wgsl` opens with its equation, shapes, and what a workgroup owns; `mod.rs`
//! binds tensors and dispatches.

pub(crate) mod adamw;
pub(crate) mod anchor_read;
pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod gated_delta;
pub(crate) mod layout;
pub(crate) mod linear;
pub(crate) mod log_linear;
pub(crate) mod matmul;
pub(crate) mod product;
pub(crate) mod reduce;
pub(crate) mod rms_norm;
pub(crate) mod rotary;
pub(crate) mod short_conv;
pub(crate) mod softmax;
pub(crate) mod state_read;
pub(crate) mod swiglu;

use crate::kernel::Kernel;

/// Every kernel of every operation, each with the constants of some call.
pub(crate) fn kernels() -> Vec<Kernel> {
    [
        adamw::kernels(),
        anchor_read::kernels(),
        attention::kernels(),
        cross_entropy::kernels(),
        elementwise::kernels(),
        embedding::kernels(),
        gated_delta::kernels(),
        layout::kernels(),
        linear::kernels(),
        log_linear::kernels(),
        matmul::kernels(),
        reduce::kernels(),
        rms_norm::kernels(),
        rotary::kernels(),
        short_conv::kernels(),
        softmax::kernels(),
        state_read::kernels(),
        swiglu::kernels(),
    ]
    .concat()
}

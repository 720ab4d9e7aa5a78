//! Operations. Each folder contains `mod` (equation, inputs, check, methods that record the backward rule), `reference`
//! (a direct transcription of the equations, in f64) and `fast` (SIMD, threads, tiles).

pub mod accumulate;
pub mod adamw;
pub mod anchor_read;
pub mod attention;
pub mod cross_entropy;
pub mod elementwise;
pub mod embedding;
pub mod gated_delta;
pub mod layout;
pub mod linear;
pub mod log_linear;
pub mod matmul;
pub mod pack;
pub mod reduce;
pub mod rms_norm;
pub mod rotary;
pub mod short_conv;
pub mod softmax;
pub mod state_read;
pub mod swiglu;

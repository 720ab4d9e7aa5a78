//! The operations. Each folder has `mod` (what it computes, its shapes, its entry on the tape), `reference`
//! (the equation, in f32 or f64) and `fast` (SIMD, threads, tiles).

pub mod adamw;
pub mod anchor_read;
pub mod gated_delta;
pub mod linear;
pub mod log_linear;
pub mod rms_norm;

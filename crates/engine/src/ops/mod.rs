//! Operations. Each folder contains `mod` (equation, inputs, check, methods that record the backward rule), `reference`
//! (a direct transcription of the equations, in f64) and `fast` (SIMD, threads, tiles).

pub mod accumulate;
pub mod gated_delta;
pub mod layout;
pub mod pack;
pub mod rms_norm;
// To be ported:
pub mod anchor_read {
    mod numbers;
    pub(crate) mod stored;
    pub use stored::StoredStates;
    pub use numbers::Source;
}

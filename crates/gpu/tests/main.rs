//! The tests of the GPU engine, as one program, which is linked once: a module for each operation.

mod common;

mod adamw;
mod anchor_read;
mod attention;
mod cross_entropy;
mod doctor;
mod elementwise;
mod embedding;
mod gated_delta;
mod layout;
mod linear;
mod lists;
mod log_linear;
mod matmul;
mod reduce;
mod rms_norm;
mod rotary;
mod shaders;
mod short_conv;
mod softmax;
mod state_read;
mod swiglu;

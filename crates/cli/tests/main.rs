//! The tests of the `march` command, as one program, which is linked once: a module for each part of the command.

mod common;
mod server;

mod arguments;
mod banks;
mod built_in;
mod commands;
mod conversations;
mod convert;
mod data;
mod device;
#[cfg(unix)]
mod documented;
mod generate;
mod gguf;
#[cfg(feature = "gpu")]
mod gpu;
#[cfg(feature = "gpu")]
mod gpu_golden;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(unix)]
mod output;
#[cfg(target_os = "linux")]
mod prompts;
mod recall;
mod reproduce;
mod resume;
mod serve;
mod suites;
mod train;
mod units;

//! Tests of the command's parts, without the program.

#[cfg(feature = "serve")]
mod address;
mod demo_learn;
mod demo_table;
mod device;
#[cfg(feature = "gpu")]
mod device_test;
mod display;
mod doctor;
mod inspect_policies;
mod machine;
mod number;
mod view;
mod writing;

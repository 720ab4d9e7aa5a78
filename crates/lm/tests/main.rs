//! The tests of the library, as one program, which is linked once: a module for each part of the library.

mod common;

mod anchors;
mod bank;
mod bank_files;
mod batches;
mod checkpoint;
mod config;
mod damage;
mod data;
mod earlier;
mod equations;
mod foreign;
mod generate;
mod gguf;
mod golden;
mod models;
mod module_order;
mod pipeline;
mod precision;
mod properties;
mod run;
mod training;
mod upcycling;

//! The tests of the library, as one program, which is linked once: a module for each part of the library.

#[path = "../../lm/tests/common/mod.rs"]
#[allow(dead_code)] // the tests of march-lm use all of it
mod common;

mod damage;
mod evaluation;
mod experiments;
mod measure;
mod ruler;

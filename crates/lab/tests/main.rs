//! The tests of the library, as one program, which is linked once: a module for each part of the library.

#[path = "../../lm/tests/common/mod.rs"]
#[allow(dead_code)] // the tests of march-lm use all of it
mod common;

mod axis;
mod chart;
mod damage;
mod demo;
mod efficiency;
mod efficiency_page;
mod encode;
mod evaluation;
mod evidence;
mod experiment_page;
mod experiments;
mod journal;
mod measure;
mod metric;
mod paired;
mod python;
mod recall_results;
mod routing;
mod ruler;
mod run_page;
mod source;
mod statistics;
mod suites;

//! Operations that take lists: device = reference, on odd and empty sizes, where some results receive no gradient; and the
//! same bits twice.

mod common;

use common::compare;
use common::lists::{Convolutions, Norms, Products, SwiGlus};

#[test]
fn products() {
    Products::cases(|label, program, inputs| compare(label, program, inputs));
}

#[test]
fn norms() {
    Norms::cases(|label, program, inputs| compare(label, program, inputs));
}

#[test]
fn swiglus() {
    SwiGlus::cases(|label, program, inputs| compare(label, program, inputs));
}

#[test]
fn convolutions() {
    Convolutions::cases(|label, program, inputs| compare(label, program, inputs));
}

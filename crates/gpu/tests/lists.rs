//! Operations that take lists: device = reference, on odd and empty sizes, where some results receive no gradient; and the
//! same bits twice.

use crate::common::compare;
use crate::common::lists::{Convolutions, Norms, Products, SwiGlus};

#[test]
fn products() {
    Products::cases(compare);
}

#[test]
fn norms() {
    Norms::cases(compare);
}

#[test]
fn swiglus() {
    SwiGlus::cases(compare);
}

#[test]
fn convolutions() {
    Convolutions::cases(compare);
}

//! Operations that take lists: device = reference, on odd and empty sizes, where some results receive no gradient; and the
//! same bits twice.

use crate::common::{compare, lists, tests};

tests![products, norms, swiglus, convolutions];

fn products() {
    lists::products(compare);
}

fn norms() {
    lists::norms(compare);
}

fn swiglus() {
    lists::swiglus(compare);
}

fn convolutions() {
    lists::convolutions(compare);
}

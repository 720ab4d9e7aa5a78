//! The operations of the CPU: one line each.

use crate::cpu::Cpu;
use crate::device::Table;
use crate::ops::{accumulate, gated_delta, layout, pack, rms_norm};

pub(crate) fn table() -> Table {
    Table::of::<Cpu>()
        .with(accumulate::fast::accumulate)
        .with(accumulate::fast::append)
        .with(pack::pack)
        .with(pack::unpack)
        .with(layout::fast::slice)
        .with(layout::fast::place)
        .with(layout::fast::concat)
        .with(layout::fast::permute)
        .with(layout::fast::reshape)
        .with(rms_norm::fast::forward)
        .with(rms_norm::fast::backward)
        .with(rms_norm::fast::gated_forward)
        .with(rms_norm::fast::gated_backward)
        .with(gated_delta::fast::forward)
        .with(gated_delta::fast::backward)
        .build()
}

//! A GPU implements every operation, which needs no device to know.

use march_engine::Device;

use crate::common::{cpu, tests};

tests![every_operation_is_there];

fn every_operation_is_there() {
    assert_eq!(march_gpu::operations(), cpu(1).operations());
    assert_eq!(march_gpu::operations(), Device::reference().operations());
}

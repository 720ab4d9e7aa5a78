use super::{LogLinear, LogLinearOptions};
use crate::cpu::Cpu;
use crate::error::Result;
use crate::tensor::Tensor;
pub(crate) fn backward(
    _cpu: &Cpu,
    _input: LogLinear<&Tensor<f32>>,
    _options: &LogLinearOptions,
    _initial: Option<&Tensor<f32>>,
    _saved: Option<&Tensor<f32>>,
    _gradient: &Tensor<f32>,
) -> Result<LogLinear<Tensor<f32>>> {
    crate::error::bad_value("log_linear_delta", "not written")
}

//! An operation: named inputs and a check. Devices have the kernels, in their tables ([`crate::Table`]).
//!
//! An operation is a struct that owns its inputs (cloning a tensor copies a handle), defined in its folder under
//! `ops/`. A backward pass is an operation of its own. The methods of [`Tensor`] and of the input structs run an
//! operation and record it ([`crate::tape`]), so model code sees neither the structs nor the tape.

use crate::device::Device;
use crate::error::{Error, Result, bad_value};
use crate::tensor::Tensor;

/// An operation that devices can run.
pub trait Op: Sized + 'static {
    /// Name in error messages and in [`crate::Device::operations`].
    const NAME: &'static str;
    /// What the check found out and kernels need again: validated dimensions.
    type Sizes;
    /// What a kernel returns.
    type Output;

    /// Tensors of the call. They must be plain, and all on one device.
    fn inputs(&self) -> Vec<&Tensor>;

    /// Tensors of the call that may be packed or stored in reduced precision. They must be on the same device.
    fn weights(&self) -> Vec<&Tensor> {
        Vec::new()
    }

    /// Rejects invalid shapes and options. It runs once per call, before any kernel, for all devices.
    fn check(&self) -> Result<Self::Sizes>;

    /// Checks the call and runs it on the device of its inputs, without recording it.
    fn run(self) -> Result<Self::Output> {
        let (device, sizes) = self.prepare()?;
        device.run(self, sizes)
    }

    /// Checks the call; returns the device of its inputs, and the validated dimensions.
    #[doc(hidden)]
    fn prepare(&self) -> Result<(Device, Self::Sizes)> {
        let device = common_device(Self::NAME, &self.inputs(), &self.weights())?;
        Ok((device, self.check()?))
    }
}

/// The device of all tensors of a call. Inputs must be plain.
fn common_device(operation: &'static str, inputs: &[&Tensor], weights: &[&Tensor]) -> Result<Device> {
    let Some(first) = inputs.first().or(weights.first()) else {
        return bad_value(operation, "got no tensors");
    };
    for tensor in inputs.iter().chain(weights) {
        if tensor.device() != first.device() {
            let (left, right) = (first.device().to_string(), tensor.device().to_string());
            return Err(Error::Devices { operation, left, right });
        }
    }
    if let Some(tensor) = inputs.iter().find(|tensor| !tensor.is_plain()) {
        return bad_value(operation, format!("cannot read a tensor in {}; unpack it first", tensor.dtype()));
    }
    Ok(first.device().clone())
}

/// Runs an operation into which tensors were moved so that it can change them in place. If the call is wrong, `restore`
/// gets the operation back.
pub(crate) fn run_in_place<O: Op>(op: O, restore: impl FnOnce(O)) -> Result<O::Output> {
    match op.prepare() {
        Ok((device, sizes)) => device.run(op, sizes),
        Err(error) => {
            restore(op);
            Err(error)
        }
    }
}

/// Handles to the tensors of a list.
pub(crate) fn owned(list: &[&Tensor]) -> Vec<Tensor> {
    list.iter().map(|&tensor| tensor.clone()).collect()
}

/// Handles to some tensors of a list.
pub(crate) fn chosen(list: &[Tensor], places: &[usize]) -> Vec<Tensor> {
    places.iter().map(|&i| list[i].clone()).collect()
}

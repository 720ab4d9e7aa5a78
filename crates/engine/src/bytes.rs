//! Numbers as bytes and back, in the little-endian order in which stored states are kept and summed.

use std::borrow::Cow;

/// Number types for which every bit pattern is valid, and which have no padding.
pub(crate) trait Plain: Copy + Default + std::fmt::Debug + Send + Sync + 'static {
    /// Adds the number's bytes in little-endian order.
    fn write_to(self, bytes: &mut Vec<u8>);

    /// The number whose little-endian bytes are those that this one has in memory.
    fn from_little_endian(self) -> Self;
}

macro_rules! plain {
    ($($number:ty),*) => {
        $(impl Plain for $number {
            fn write_to(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }

            fn from_little_endian(self) -> Self {
                Self::from_le_bytes(self.to_ne_bytes())
            }
        })*
    };
}

plain!(f32, u16, i8);

/// The bytes of numbers in little-endian order, borrowed where that is the machine's own order.
pub fn little_endian_bytes(numbers: &[f32]) -> Cow<'_, [u8]> {
    plain_bytes(numbers)
}

/// The f32 numbers that little-endian bytes hold, without a copy. None if the bytes are not a whole number of f32, if
/// they do not lie at an address that f32 may have, or if the machine is big-endian.
pub fn f32s_of_bytes(bytes: &[u8]) -> Option<&[f32]> {
    if cfg!(target_endian = "big") {
        return None;
    }
    #[allow(unsafe_code)]
    // SAFETY: every bit pattern is a valid f32.
    let (before, numbers, after) = unsafe { bytes.align_to::<f32>() };
    (before.is_empty() && after.is_empty()).then_some(numbers)
}

/// [`little_endian_bytes`] for any number type.
pub(crate) fn plain_bytes<T: Plain>(numbers: &[T]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "big") {
        let mut bytes = Vec::with_capacity(size_of_val(numbers));
        numbers.iter().for_each(|number| number.write_to(&mut bytes));
        return Cow::Owned(bytes);
    }
    #[allow(unsafe_code)]
    // SAFETY: a `Plain` number has no uninitialised bytes, and bytes may lie at any address.
    let (_, bytes, _) = unsafe { numbers.align_to::<u8>() };
    Cow::Borrowed(bytes)
}

/// The memory of numbers as bytes to be overwritten.
pub(crate) fn plain_bytes_mut<T: Plain>(numbers: &mut [T]) -> &mut [u8] {
    #[allow(unsafe_code)]
    // SAFETY: every bit pattern is a valid `Plain` number, such numbers have no padding, and bytes may lie at any
    // address.
    let (_, bytes, _) = unsafe { numbers.align_to_mut::<u8>() };
    bytes
}

//! Conversion between numbers and little-endian bytes, the format in which stored states are saved and checksummed.

use std::borrow::Cow;

/// Number types for which every bit pattern is valid, and which have no padding.
pub(crate) trait Plain: Copy + Default + std::fmt::Debug + Send + Sync + 'static {
    /// Appends the little-endian bytes of the number.
    fn write_to(self, bytes: &mut Vec<u8>);

    /// Reinterprets the in-memory bytes of this value as little-endian.
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

/// Little-endian bytes of `numbers`; borrowed on little-endian machines.
pub fn little_endian_bytes(numbers: &[f32]) -> Cow<'_, [u8]> {
    plain_bytes(numbers)
}

/// Reinterprets little-endian bytes as f32 without copying. `None` if the length is not a multiple of four, if the
/// bytes are not aligned for f32, or on big-endian machines.
pub fn f32s_of_bytes(bytes: &[u8]) -> Option<&[f32]> {
    if cfg!(target_endian = "big") {
        return None;
    }
    #[allow(unsafe_code)]
    // SAFETY: every bit pattern is a valid f32.
    let (before, numbers, after) = unsafe { bytes.align_to::<f32>() };
    (before.is_empty() && after.is_empty()).then_some(numbers)
}

/// Variant of [`little_endian_bytes`] for any [`Plain`] type.
pub(crate) fn plain_bytes<T: Plain>(numbers: &[T]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "big") {
        let mut bytes = Vec::with_capacity(size_of_val(numbers));
        numbers.iter().for_each(|number| number.write_to(&mut bytes));
        return Cow::Owned(bytes);
    }
    #[allow(unsafe_code)]
    // SAFETY: a `Plain` number has no uninitialised bytes, and `u8` has alignment 1.
    let (_, bytes, _) = unsafe { numbers.align_to::<u8>() };
    Cow::Borrowed(bytes)
}

/// Mutable view of the memory of `numbers` as bytes.
pub(crate) fn plain_bytes_mut<T: Plain>(numbers: &mut [T]) -> &mut [u8] {
    #[allow(unsafe_code)]
    // SAFETY: every bit pattern is a valid `Plain` number, such numbers have no padding, and `u8` has alignment 1.
    let (_, bytes, _) = unsafe { numbers.align_to_mut::<u8>() };
    bytes
}

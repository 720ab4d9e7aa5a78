//! What the thread pool takes from std, or from loom when its models run (`tests/loom.rs`).

#[cfg(not(all(test, loom)))]
mod imp {
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64};
    pub(crate) use std::sync::{Arc, Condvar, Mutex};
    pub(crate) use std::thread::{Builder, JoinHandle, yield_now};
    pub(crate) use std::thread_local as local;
    pub(crate) use std::time::Instant;

    /// How often an idle worker looks for work before it looks at the clock.
    pub(crate) const LOOKS: u32 = 256;

    /// A cell with loom's interface.
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }
        #[inline(always)]
        pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get())
        }
        #[inline(always)]
        pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            write(self.0.get())
        }
    }
}

#[cfg(all(test, loom))]
mod imp {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::hint::spin_loop;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64};
    pub(crate) use loom::sync::{Arc, Condvar, Mutex};
    pub(crate) use loom::thread::{Builder, JoinHandle, yield_now};

    /// loom's macro does not take `const`.
    macro_rules! local {
        ($(#[$doc:meta])* static $name:ident: $type:ty = const $value:block;) => {
            loom::thread_local! { $(#[$doc])* static $name: $type = $value; }
        };
    }
    pub(crate) use local;

    /// A worker looks once, then goes to sleep.
    pub(crate) const LOOKS: u32 = 2;

    /// A clock on which any time has passed.
    pub(crate) struct Instant;

    impl Instant {
        pub(crate) fn now() -> Self {
            Self
        }
        pub(crate) fn elapsed(&self) -> std::time::Duration {
            std::time::Duration::MAX
        }
    }
}

pub(super) use imp::*;

//! Notices forks: the child has only the thread that forked, and none of the workers.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

static FORKS: AtomicU64 = AtomicU64::new(0);

/// The number of forks between the first process that counted them and this one.
pub(super) fn forks() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// From now on, forks are counted.
pub(super) fn count_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        #[cfg(unix)]
        // SAFETY: the handler only changes an atomic number, which is allowed after a fork. If it cannot be installed
        // for lack of memory, forks are not noticed.
        unsafe {
            libc::pthread_atfork(None, None, Some(count));
        }
    });
}

#[cfg(unix)]
unsafe extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

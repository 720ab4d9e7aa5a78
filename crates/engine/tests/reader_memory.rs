//! The memory of the historical reader grows linearly with the text: twice the tokens, at most 2.2 times the bytes.
//!
//! The file has one test only, because the allocator counts the bytes of the whole process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Random, cpu};
use march_engine::Op;
use march_engine::ops::anchor_read::{
    AnchorRead, AnchorReadBackward, AnchorReadForward, AnchorReadOptions, ReadPlan,
};

/// Counts the bytes in use and their peak, scratch memory included.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code)]
// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = IN_USE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Peak bytes of a forward and a backward pass over `tokens` tokens, on top of the inputs.
fn peak(tokens: usize, top_k: Option<usize>) -> usize {
    let (heads, key_dim, value_dim, routing_dim, interval) = (2, 16, 32, 8, 256);
    let boundaries: Vec<usize> = (1..=tokens / interval).map(|m| m * interval).collect();
    let anchors = boundaries.len();
    let cpu = cpu(2);
    let mut random = Random(31);
    let mut tensor = |shape: &[usize]| random.input("input", shape, 1.0).on(&cpu);
    let input = AnchorRead {
        query: tensor(&[tokens, heads * key_dim]),
        routing_query: tensor(&[tokens, heads * routing_dim]),
        routing_keys: tensor(&[anchors, heads * routing_dim]),
        anchor_states: tensor(&[anchors, heads, key_dim, value_dim]),
        null_score: Some(tensor(&[tokens, heads])),
    };
    let gradient = tensor(&[tokens, heads * value_dim]);
    let plan = Arc::new(ReadPlan::from_boundaries(tokens, &[boundaries]));
    let options = AnchorReadOptions { key_heads: heads, value_heads: heads, top_k, routing_scale: 1.0, plan };
    let before = IN_USE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let forward = AnchorReadForward { input: input.clone(), options: options.clone(), keep: true };
    let (readout, kept) = forward.run().unwrap();
    AnchorReadBackward { input, options, readout, kept, gradient }.run().unwrap();
    PEAK.load(Ordering::Relaxed) - before
}

#[test]
fn memory_grows_linearly() {
    for top_k in [None, Some(4)] {
        // Both sizes stay below the size from which buffers are aligned to large pages, which adds 2 MiB to a buffer.
        let (short, long) = (peak(4096, top_k), peak(8192, top_k));
        let growth = long as f64 / short as f64;
        assert!(growth <= 2.2, "top_k {top_k:?}: {short} bytes at 4096 tokens, {long} at 8192");
    }
}

use march_lm::anchors::Anchor;
use march_lm::memory::{Ledger, LedgerEntry};

fn entry(ordinal: usize, mass: f64, distance: f64) -> LedgerEntry {
    let anchor = Anchor { ordinal, position: 10 * ordinal };
    LedgerEntry { anchor, mass, exposure: 9.0, norm: 2.0, distance }
}

#[test]
fn the_least_read_and_the_nearest_cost_least() {
    let ledger = |list: &[(f64, f64)]| {
        let entries = list.iter().enumerate().map(|(i, &(mass, distance))| entry(i + 1, mass, distance));
        Ledger { entries: entries.collect(), evictions: Vec::new() }
    };
    let inf = f64::INFINITY;
    assert_eq!(ledger(&[(1.0, inf)]).cheapest(), None);
    assert_eq!(ledger(&[(1.0, inf), (0.0, 0.1)]).cheapest(), Some(0));
    // Equal distances: the entry that is read least.
    assert_eq!(ledger(&[(3.0, inf), (1.0, 1.0), (2.0, 1.0), (0.0, 1.0)]).cheapest(), Some(1));
    // Equal mass: of the two that are close to each other, the older.
    assert_eq!(ledger(&[(1.0, inf), (1.0, 1.0), (1.0, 0.2), (1.0, 1.0)]).cheapest(), Some(1));
}

#[test]
fn weights_are_added_by_token() {
    let mut ledger = Ledger { entries: vec![entry(1, 0.0, 1.0), entry(2, 0.5, 1.0)], evictions: Vec::new() };
    // Two tokens, two heads, three columns; the last column belongs to no entry.
    ledger.note(&[0.1, 0.2, 9.0, 0.3, 0.4, 9.0, 0.0, 1.0, 9.0, 0.0, 1.0, 9.0], 2, 3);
    assert!((ledger.entries[0].mass - 0.2).abs() < 1e-7 && (ledger.entries[1].mass - 1.8).abs() < 1e-7);
    assert_eq!(ledger.entries[0].exposure, 11.0);
}

//! Tests of `command/inspect_policies.rs`.

#[test]
fn budgets_are_round() {
    for (bytes, want) in [(1, 1), (99, 99), (101, 110), (6_389_760, 6_400_000), (1_000_001, 1_100_000)] {
        assert_eq!(march_cli::command::inspect_policies::round(bytes), want);
    }
}

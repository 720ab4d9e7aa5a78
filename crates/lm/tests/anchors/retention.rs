use march_lm::anchors::Retention;

#[test]
fn fenwick_clears_the_lowest_bits() {
    for complete in 1usize..200 {
        let mut want = Vec::new();
        let mut c = complete;
        while c > 0 {
            want.push(c);
            c &= c - 1;
        }
        want.reverse();
        let got: Vec<usize> = (1..=complete).filter(|&m| Retention::Fenwick.keeps(m, complete)).collect();
        assert_eq!(got, want, "{complete} intervals");
    }
}

#[test]
fn texts_and_back() {
    for (text, want) in [
        ("all", Retention::All),
        ("fenwick", Retention::Fenwick),
        ("recent:3", Retention::Recent(3)),
        ("budget:64MB", Retention::Budget(64_000_000)),
        ("budget:1GB", Retention::Budget(1_000_000_000)),
        ("budget:1537", Retention::Budget(1537)),
    ] {
        assert_eq!(text.parse(), Ok(want));
        assert_eq!(want.to_string(), text);
    }
    for (text, want) in [("64MiB", 64 << 20), ("1e6", 1_000_000), ("1.5 kb", 1500), ("2k", 2000), ("9B", 9)] {
        assert_eq!(format!("budget:{text}").parse(), Ok(Retention::Budget(want)));
    }
    for text in ["", "some", "recent", "recent:0", "recent:-1", "budget:", "budget:0", "budget:many", "all:1"]
    {
        let refused = text.parse::<Retention>().unwrap_err();
        assert!(refused.contains("`all`, `fenwick`, `recent:N`"), "{refused}");
    }
}

use march_lm::anchors::Policy;

#[test]
fn lines_and_back() {
    let own = Policy { interval: Some(512), top_k: Some(4), ..Policy::default() };
    assert_eq!(own.with("").unwrap(), own);
    for (settings, line) in [
        ("top-k=dense", "interval=512 top-k=dense"),
        ("  storage=int8  interval=7", "interval=7 top-k=4 storage=int8"),
        (
            "placement=adaptive:3 retention=budget:64MB",
            "interval=512 top-k=4 retention=budget:64MB placement=adaptive:3",
        ),
    ] {
        let policy = own.with(settings).unwrap();
        assert_eq!(policy.to_string(), line);
        assert_eq!(own.with(line).unwrap(), policy);
    }
    assert_eq!(Policy::default().to_string(), "no anchors");
    for (settings, part) in [
        ("top-4", "`top-4` is not of the form `name=value`"),
        ("topk=4", "`topk` is not a setting"),
        ("top-k=0", "`top-k` is `0`; it must be a whole number above 0, or `dense`"),
        ("interval=1 top-k=2 interval=1", "`interval` is given twice"),
        ("interval=many", "`interval` is `many`"),
        ("storage=int8 retention=some", "`retention` is `some`; it must be `all`"),
    ] {
        let refused = own.with(settings).unwrap_err().to_string();
        assert!(refused.contains(part) && refused.contains(settings), "{refused}");
    }
}

use march_lm::anchors::{Placement, Policy, Retention, Storage, Timeline};

#[test]
fn policies_are_written_and_read() {
    let policy = Policy {
        interval: Some(512),
        top_k: Some(4),
        retention: "budget:64MB".parse().unwrap(),
        placement: "adaptive:32".parse().unwrap(),
        storage: Storage::Int8,
    };
    let text = serde_json::to_string(&policy).unwrap();
    assert!(text.contains("\"budget:64MB\"") && text.contains("\"adaptive:32\""), "{text}");
    assert_eq!(serde_json::from_str::<Policy>(&text).unwrap(), policy);
    let timeline = Timeline { usual_movement: 0.1 + 0.2, complete: 3, ..Timeline::default() };
    let text = serde_json::to_string(&timeline).unwrap();
    assert_eq!(serde_json::from_str::<Timeline>(&text).unwrap(), timeline);
}

#[test]
fn what_cannot_be_is_refused() {
    let own = Policy { interval: Some(8), ..Policy::default() };
    let refused = |policy: Policy| policy.check().unwrap_err().to_string();
    assert!(own.check().is_ok());
    assert!(refused(Policy { interval: Some(0), ..own.clone() }).contains("interval of 0"));
    assert!(refused(Policy { retention: Retention::Recent(0), ..own.clone() }).contains("recent:1"));
    let far = Policy { placement: Placement::Adaptive(9), ..own.clone() };
    assert!(refused(far).contains("adaptive:8 or less"));
    assert!(Policy { placement: Placement::Adaptive(8), ..own }.check().is_ok());
}

#[test]
fn what_is_kept_can_be_counted() {
    let policy = |retention| Policy { interval: Some(10), retention, ..Policy::default() };
    let kept = |retention| policy(retention).kept_after(75, 100);
    assert_eq!(kept(Retention::All), 7);
    assert_eq!(kept(Retention::Fenwick), 3);
    assert_eq!(kept(Retention::Recent(4)), 4);
    assert_eq!(kept(Retention::Recent(40)), 7);
    assert_eq!(kept(Retention::Budget(599)), 5);
    assert_eq!(kept(Retention::Budget(9999)), 7);
}

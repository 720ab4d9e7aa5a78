use march_lm::anchors::{AnchorPlan, Policy, Recording, Retention, Timeline};
use march_lm::engine::ops::anchor_read::{ReadPlan, Visible};

/// The visible ordinals of every token, from a plan of one row.
fn seen(plan: &AnchorPlan, read: &ReadPlan, tokens: usize) -> Vec<Vec<usize>> {
    let mut list = vec![Vec::new(); tokens];
    for segment in &read.segments {
        for token in segment.start..segment.start + segment.len {
            list[token] = (0..segment.visible.len()).map(|i| plan.ordinals[segment.visible.get(i)]).collect();
        }
    }
    list
}

#[test]
fn cuts_change_nothing() {
    for retention in [Retention::All, Retention::Fenwick, Retention::Recent(1), Retention::Recent(3)] {
        for interval in [1, 3, 7, 20] {
            let policy = Policy { interval: Some(interval), retention, ..Policy::default() };
            let plan = AnchorPlan::fresh(&policy, 1, 61);
            let whole = seen(&plan, &plan.read, 61);
            for (t, ordinals) in whole.iter().enumerate() {
                let complete = t / interval;
                let want: Vec<usize> = (1..=complete).filter(|&m| retention.keeps(m, complete)).collect();
                assert_eq!(*ordinals, want, "{policy:?}, token {t}");
            }
            for cut in [1, 2, 5, 20, 60] {
                let mut timeline = Timeline { boundaries: Some(Vec::new()), ..Timeline::default() };
                let mut parts = Vec::new();
                while timeline.position < 61 {
                    let tokens = cut.min(61 - timeline.position);
                    let boundaries = policy.periodic(timeline.position, tokens);
                    let (plan, after) = AnchorPlan::next(&policy, &timeline, tokens, &boundaries, 0, 16);
                    parts.extend(seen(&plan, &plan.read, tokens));
                    assert_eq!(plan.keep.len(), after.kept.len());
                    if boundaries.is_empty() {
                        let quiet = AnchorPlan::quiet(&policy, &timeline, tokens, 0);
                        let full = AnchorPlan { keep: plan.keep, ordinals: plan.ordinals, ..quiet.clone() };
                        assert_eq!(seen(&full, &quiet.read, tokens), parts[parts.len() - tokens..]);
                        assert_eq!(quiet.read_newest, plan.read_newest);
                        assert_eq!((&quiet.recent, quiet.since), (&plan.recent, plan.since));
                        timeline.advance(tokens, 16);
                        assert_eq!(timeline, after);
                    }
                    timeline = after;
                }
                assert_eq!(parts, whole, "{policy:?}, calls of {cut}");
                assert_eq!(timeline.kept.len(), policy.kept_after(61, 0));
                assert_eq!(timeline.boundaries, Some(policy.periodic(0, 61)));
            }
        }
    }
}

#[test]
fn rows_have_anchors_of_their_own() {
    let policy = Policy { interval: Some(4), top_k: Some(1), ..Policy::default() };
    let plan = AnchorPlan::fresh(&policy, 2, 12);
    assert_eq!(plan.new, 0..4);
    assert_eq!(*plan.boundaries, [vec![4, 8], vec![4, 8]]);
    let runs = |plan: &ReadPlan| plan.segments.iter().map(|s| s.visible.clone()).collect::<Vec<_>>();
    let run = |a, b| Visible::Run(a..b);
    assert_eq!(runs(&plan.read), [run(0, 1), run(0, 2), run(2, 3), run(2, 4)]);
    assert_eq!(runs(&plan.read_newest), [run(0, 1), run(1, 2), run(2, 3), run(3, 4)]);
    assert!(AnchorPlan::fresh(&Policy::default(), 2, 12).read.segments.is_empty());
}

#[test]
fn rows_may_have_different_numbers_of_anchors() {
    let policy = Policy { interval: Some(4), ..Policy::default() };
    let rows =
        [vec![3], vec![], vec![2, 5, 12]].map(|boundaries| Recording { boundaries, evictions: Vec::new() });
    let plan = AnchorPlan::replayed(&policy, &rows, 12, 2).unwrap();
    assert_eq!(*plan.boundaries, [vec![3], vec![], vec![2, 5]]);
    assert_eq!(plan.new, 0..3);
    let segments: Vec<_> = plan.read.segments.iter().map(|s| (s.start, s.len, s.visible.clone())).collect();
    let run = |a, b| Visible::Run(a..b);
    assert_eq!(segments, [(3, 9, run(0, 1)), (26, 3, run(1, 2)), (29, 7, run(1, 3))]);
    assert_eq!(plan.read.segments.len(), ReadPlan::from_boundaries(12, &plan.boundaries).segments.len());
}

#[test]
fn evictions_are_replayed_by_layer() {
    let policy = Policy { interval: Some(2), retention: Retention::Budget(1), ..Policy::default() };
    let row =
        Recording { boundaries: vec![2, 4, 6], evictions: vec![vec![(3, vec![2])], vec![(2, vec![1])]] };
    let plan = AnchorPlan::replayed(&policy, std::slice::from_ref(&row), 8, 2).unwrap();
    let at = |layer: usize, token: usize| seen(&plan, plan.read_in(layer, false).0, 12)[token].clone();
    assert_eq!((at(0, 5), at(0, 6)), (vec![1, 2], vec![1, 3]));
    assert_eq!((at(1, 5), at(1, 6)), (vec![2], vec![2, 3]));
    let refused = AnchorPlan::replayed(&policy, &[row], 8, 3).unwrap_err();
    assert!(refused.to_string().contains("2 layers; the model has 3"), "{refused}");
    let row = Recording { boundaries: vec![4, 4], evictions: vec![Vec::new(); 3] };
    assert!(AnchorPlan::replayed(&policy, &[row], 8, 3).is_err());
}

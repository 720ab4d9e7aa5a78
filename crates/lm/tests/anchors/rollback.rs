use march_lm::memory::runs;

#[test]
fn numbers_as_runs() {
    assert_eq!(runs(&[1, 2, 3, 4, 6, 8, 9]), "1–4, 6, 8–9");
    assert_eq!(runs(&[5]), "5");
    let odd: Vec<usize> = (0..40).map(|i| 2 * i + 1).collect();
    assert!(runs(&odd).starts_with("40 anchors, the last ones 57, 59"));
}

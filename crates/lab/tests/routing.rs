//! The routing of a text, in numbers and as a page.

use march_lab::report::routing::{Routing, Summary, base64};

/// Five tokens, one head, anchors after the second and the fourth token.
pub fn routing() -> Routing {
    let mut layer = vec![0.0; 5 * 2];
    layer[2 * 2] = 0.5;
    layer[3 * 2] = 1.0;
    (layer[4 * 2], layer[4 * 2 + 1]) = (0.25, 0.25);
    let pieces = ["a", "", "é", "</script>", "d"].map(String::from).to_vec();
    Routing { pieces, boundaries: vec![2, 4], heads: 1, layers: vec![layer] }
}

#[test]
fn a_text_in_numbers() {
    let summary = routing().summary(0, None);
    assert_eq!(summary, routing().summary(0, Some(0)));
    // Nulls 0.5, 0 and 0.5; entropies 1, 0 and 1.5 bits.
    assert!((summary.null - 1.0 / 3.0).abs() < 1e-9, "{summary:?}");
    assert!((summary.entropy - 2.5 / 3.0).abs() < 1e-9);
    assert!((summary.distance - (1.0 + 0.25 * 2.0) / 2.0).abs() < 1e-9);
    assert_eq!(summary.most_read, [(1, 0.875), (2, 0.125)]);
    assert_eq!(routing().snippet(2, 10), "é</script>");
    let none = Routing { boundaries: vec![], layers: vec![vec![]], ..routing() };
    assert_eq!(none.summary(0, None), Summary::default());
}

#[test]
fn a_text_as_a_page() {
    let page = routing().render("a < b", "facts & figures");
    assert!(page.contains("<title>a &lt; b</title>") && page.contains("facts &amp; figures"));
    assert_eq!(page.matches("</script>").count(), page.matches("<script").count(), "the text stays text");
    assert!(!page.contains("{{") && !page.contains("http"), "whole in itself");
    // 0.5; 1; 0.25, 0.25.
    assert!(page.contains(&base64(&[0, 0x80, 0xFF, 0xFF, 0, 0x40, 0, 0x40])));
}

#[test]
fn bytes_in_base64() {
    for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")] {
        assert_eq!(base64(bytes.as_bytes()), text);
    }
}

//! The page and the picture of the demo.

use march_lab::report::demo::{Amount, Demo, DemoModel};

use crate::routing::routing;

pub fn model(name: &str, share: f64) -> DemoModel {
    let amount = |facts, asked| Amount {
        facts,
        correct: (share * asked as f64) as u64,
        asked,
        error: Some(0.01),
        memory_bytes: 1536 * facts,
        rollback_bytes: 512 * facts,
    };
    DemoModel {
        name: name.into(),
        parameters: 1_234_567,
        learning_rate: 0.003,
        seconds: 312.4,
        curve: vec![(0, 0.04), (700, share / 2.0), (1500, share)],
        by_facts: vec![amount(8, 1000), amount(16, 0), amount(32, 1000), amount(128, 1000)],
        without: vec![],
    }
}

pub fn demo(models: Vec<DemoModel>) -> Demo {
    Demo {
        title: "MQAR: 24 pairs & <96> tokens".into(),
        about: vec!["It asks \"a < b\"\u{1}.".into()],
        chance: 0.042,
        most_in_training: 32,
        models,
        asked: None,
        routing: None,
        next: vec!["march demo --seed 2 > log".into(), "march chat".into()],
    }
}

/// Checks that tags are balanced and that no number is NaN or infinite.
pub fn check(text: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = text.trim_start_matches("<!doctype html>");
    while let Some(start) = rest.find('<') {
        let end = start + rest[start..].find('>').expect("a tag ends");
        let tag = &rest[start + 1..end];
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        rest = &rest[end + 1..];
        let name = tag.split_whitespace().next().unwrap();
        if let Some(name) = name.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') && name != "meta" {
            open.push(name);
        }
        if name == "script" {
            rest = &rest[rest.find("</script>").unwrap()..];
        }
    }
    assert!(open.is_empty(), "{open:?}");
    let shown = text.split("<script").next().unwrap();
    for part in ["NaN", "inf\"", "inf,", "inf ", "{{"] {
        assert!(!shown.contains(part), "{part} in {shown}");
    }
    assert!(!text.contains('\u{1}'));
}

#[test]
fn a_page_and_a_picture() {
    let mut demo = demo(vec![model("MARCH", 0.971), model("GDN <b>", 0.35)]);
    demo.routing = Some(routing());
    demo.asked = Some(vec!["Where was the key? In the <mill>.".into()]);
    demo.models[0].without = vec![Amount { correct: 123, ..demo.models[0].by_facts[2] }];
    let (page, picture) = (demo.page(), demo.picture());
    check(&page);
    check(&picture);
    let parts = [
        "<title>MQAR: 24 pairs &amp; &lt;96&gt; tokens</title>",
        "a &lt; b&quot;\u{FFFD}.",
        "128 facts, 32 in training: MARCH 97.1 ± 1.0 %; GDN &lt;b&gt; 35.0 ± 1.0 %; guessing 4.2 %",
        "<title>MARCH, 1500: 97.1 %</title>",
        "<title>MARCH, 8: 97.1 % ± 1.0 %</title>",
        "title=\"971 of 1,000 right\">97.1 ± 1.0 %</td>",
        "title=\"0 of 0 right\">–</td>",
        "32 facts (most in training)",
        "32 facts, without anchors</th><td title=\"123 of 1,000 right\">12.3 ± 1.0 %</td><td>–</td>",
        "Memory after 32 facts</th><td>49,152 bytes</td>",
        "Memory after 128 facts</th><td>196,608 bytes</td>",
        "1,234,567",
        "0.003",
        "312 s",
        "march demo --seed 2 &gt; log\nmarch chat",
        "In the &lt;mill&gt;.",
        "<canvas id=\"map\"",
    ];
    for part in parts {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("http"), "no network");
    assert!(
        picture.contains("facts in the sequence") && !picture.contains("var(") && picture.contains("#6ea8fe")
    );
}

#[test]
fn whatever_is_missing_is_left_out() {
    let mut none = demo(vec![]);
    check(&none.page());
    check(&none.picture());
    (none.title, none.chance, none.about, none.next) = ("x".repeat(300), f64::NAN, vec![], vec![]);
    check(&none.page());
    check(&none.picture());
    let empty = DemoModel {
        curve: vec![],
        by_facts: vec![],
        seconds: 0.0,
        learning_rate: f64::NAN,
        ..model("empty", 0.0)
    };
    let point = DemoModel { curve: vec![(0, 2.0)], ..model("point", 1.0) };
    let odd = DemoModel { curve: vec![(5, f64::NAN), (u64::MAX, -1.0)], ..model("odd", 0.0) };
    let many = (1..40)
        .map(|i| Amount {
            facts: i * 1000,
            correct: 9,
            asked: 3,
            error: None,
            memory_bytes: 0,
            rollback_bytes: 0,
        })
        .collect();
    let many = DemoModel { by_facts: many, curve: (0..5000).map(|i| (i, 0.5)).collect(), ..model("", 1.0) };
    for models in [vec![empty], vec![point], vec![odd, many]] {
        check(&demo(models).page());
    }
}

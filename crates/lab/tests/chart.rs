//! Charts, their marks and texts, and the pictures made of them.

use march_lab::report::axis::Axis;
use march_lab::report::chart::{Chart, Line, Shape};
use march_lab::report::mark::{CLASSES, class, mark};
use march_lab::report::recall::{Point, recall_by_bytes};
use march_lab::report::text::wrapped;
use march_lab::report::{Heat, is_picture};

#[test]
fn few_points_or_none() {
    let flat = Chart::one("flat", &[(1.0, 2.0)]).to_svg();
    assert!(flat.contains("<polyline") && !flat.contains("NaN"));
    assert!(Chart::one("none", &[(f64::NAN, 1.0)]).is_empty());
    let empty = Chart::default().to_svg();
    assert!(!empty.contains("NaN") && !empty.contains("inf"), "{empty}");
}

#[test]
fn bars_stand_beside_each_other() {
    let (a, b) = ([(0.0, 0.5), (1.0, 1.0)], [(0.0, 0.25), (1.0, f64::NAN)]);
    let bars = |name, points, errors| Line {
        name,
        points,
        errors,
        shape: Shape::Bars,
        class: "main",
        ..Line::default()
    };
    let chart = Chart {
        lines: vec![bars("a", &a, &[0.1]), bars("b", &b, &[])],
        x: Axis { range: Some((-0.5, 1.5)), names: vec!["1–2".into(), "<3".into()], ..Axis::default() },
        y: Axis { range: Some((0.0, 1.0)), percent: true, ..Axis::default() },
        ..Chart::default()
    };
    let svg = chart.to_svg();
    // Two in the legend, three bars.
    assert_eq!(svg.matches("<rect").count(), 5, "{svg}");
    assert!(svg.contains("a, 1–2: 50.0 % ± 10.0 %") && svg.contains("a, &lt;3: 100.0 %<"), "{svg}");
    assert!(!svg.contains("NaN"));
}

#[test]
fn no_two_of_many_series_look_alike() {
    let look = |series| mark(series, class(series), (0.0, 0.0));
    for a in 0..3 * CLASSES.len() {
        assert!((0..a).all(|b| look(a) != look(b)), "{a}");
    }
}

#[test]
fn lines_are_full_and_no_longer() {
    assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
    assert_eq!(wrapped("one two three", 6), ["one", "two", "three"]);
    assert_eq!(wrapped("  äöüß-abc d", 4), ["äöüß", "-abc", "d"]);
    assert_eq!(wrapped("a\nb", 80), ["a b"]);
    assert!(wrapped(" \n", 5).is_empty());
    assert_eq!(wrapped("ab", 0), ["a", "b"]);
}

#[test]
fn a_cell_for_each_depth_and_length() {
    let depths = ["<10".to_string(), "10–20".to_string()];
    let cells = [Some(1.0), Some(0.256), None, Some(0.0), Some(f64::NAN)];
    let heat = Heat { title: "a < b", lengths: &[1000, 4096, 32768], depths: &depths, cells: &cells };
    let svg = heat.svg();
    assert!(svg.contains("aria-label=\"a &lt; b. right") && svg.ends_with("</svg>\n"));
    assert!(is_picture(svg.as_bytes()));
    assert_eq!(svg.matches("<rect class=\"cell\"").count(), 3);
    // One that was not asked, one that is not a number, one that is not there.
    assert_eq!(svg.matches("<rect class=\"none\"").count(), 3);
    assert!(svg.contains("depth &lt;10, length 4K: 25.6 %") && svg.contains(">26</text>"));
    assert!(svg.contains("depth 10–20, length 32K: not asked"));
    assert!(svg.contains(">1000<") && !svg.contains("NaN") && !svg.contains("inf"));
    let none = Heat { title: "", lengths: &[], depths: &[], cells: &[] }.svg();
    assert!(none.ends_with("</svg>\n") && !none.contains("NaN"));
}

#[test]
fn a_line_for_each_setting() {
    let point = |varied: &str, bytes, accuracy| Point { varied: varied.into(), bytes, accuracy };
    let svg = recall_by_bytes(
        "a < b",
        "",
        &[point("interval", 2048, 0.9), point("interval", 1024, 0.5), point("recent", 1024, 0.2)],
    );
    assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
    assert_eq!(svg.matches("<polyline").count(), 2);
    assert!(!recall_by_bytes("", "", &[]).contains("NaN"));
}

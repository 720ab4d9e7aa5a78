//! Pages about experiments.

use march_lab::report::evidence::{
    Cell, Figure, Page, Plot, Point, Scale, Section, Series, SeriesStyle, Table,
};
use march_lab::report::is_picture;
use march_lab::report::mark::CLASSES;

use crate::demo::check;

const NAMES: [&str; 8] = [
    "MARCH",
    "Gated DeltaNet",
    "Mamba-2",
    "Transformer",
    "Log-Linear Mamba-2",
    "MARCH without anchors",
    "Sliding window 256",
    "RetNet",
];

fn cell(text: &str) -> Cell {
    Cell { text: text.into(), ..Cell::default() }
}

fn series(i: usize, xs: &[f64], style: SeriesStyle) -> Series {
    let point = |(n, &x): (usize, &f64)| {
        let y = 1.0 / (1.0 + (n as f64 - 4.5 + i as f64 * 0.9).exp());
        let spread = 0.12 * y * (1.2 - y) + 0.01;
        Point { x, y, low: (y - spread).max(0.0), high: (y + spread).min(1.0) }
    };
    Series { name: NAMES[i].into(), points: xs.iter().enumerate().map(point).collect(), style }
}

/// Plots by memory, by length, while learning, by task, by arm and by speed.
pub fn plots() -> [Plot; 6] {
    let percent = || Scale {
        label: "right answers".into(),
        percent: true,
        range: Some((0.0, 1.0)),
        ..Scale::default()
    };
    let bytes: Vec<f64> = (13..21).map(|power| f64::from(1 << power)).collect();
    let lengths: Vec<f64> = (7..18).map(|power| f64::from(1 << power)).collect();
    let steps: Vec<f64> = (0..120).map(|step| 25.0 * f64::from(step)).collect();
    let by_bytes = Plot {
        title: "Right answers by memory of a sequence".into(),
        x: Scale { label: "memory after a sequence".into(), log: true, bytes: true, ..Scale::default() },
        y: percent(),
        series: (0..8).map(|i| series(i, &bytes, SeriesStyle::Line)).collect(),
        levels: vec![("guessing".into(), 0.042)],
    };
    let by_length = Plot {
        title: "Right answers by length".into(),
        x: Scale { label: "tokens".into(), log: true, ..Scale::default() },
        series: (0..4)
            .map(|i| series(i, &lengths, if i == 3 { SeriesStyle::Dashed } else { SeriesStyle::Line }))
            .collect(),
        ..by_bytes.clone()
    };
    let mut learning = Plot {
        title: "Loss on held-back text while learning, in nats per token".into(),
        x: Scale { label: "training step".into(), ..Scale::default() },
        y: Scale { label: "loss".into(), log: true, ..Scale::default() },
        series: (0..3).map(|i| series(i, &steps, SeriesStyle::Line)).collect(),
        levels: vec![("uniform".into(), 4.0), ("entropy".into(), 1.2)],
    };
    for (i, line) in learning.series.iter_mut().enumerate() {
        for (n, point) in line.points.iter_mut().enumerate() {
            let y = 1.3 + 0.2 * i as f64 + 3.0 * (-(n as f64) / 25.0).exp() + 0.05 * (n as f64).sin();
            *point = Point { y, low: f64::NAN, high: f64::NAN, ..*point };
        }
    }
    let categories: [&str; 5] =
        ["single needle", "two needles", "variable tracking", "common words", "questions"];
    let bars = Plot {
        title: "Right answers by task".into(),
        x: Scale { names: categories.map(String::from).to_vec(), ..Scale::default() },
        y: percent(),
        series: (0..4).map(|i| series(i, &[0.0, 1.0, 2.0, 3.0, 4.0], SeriesStyle::Bars)).collect(),
        levels: vec![],
    };
    let mut many = bars.clone();
    many.title = "One bar for each arm".into();
    many.x.names = NAMES.iter().map(|name| (*name).to_string()).collect();
    many.series = vec![series(0, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], SeriesStyle::Bars)];
    let mut scatter = by_bytes.clone();
    scatter.title = "Loss against decoding speed".into();
    scatter.x = Scale { label: "tokens per second".into(), log: true, ..Scale::default() };
    scatter.series.iter_mut().enumerate().for_each(|(i, series)| {
        series.style = SeriesStyle::Points;
        series.points = vec![Point { x: 700.0 * 1.9f64.powi(i as i32), ..series.points[i.min(7)] }];
    });
    [by_bytes, by_length, learning, bars, many, scatter]
}

/// A page with all that a page can have.
pub fn page() -> Page {
    let [by_bytes, by_length, learning, bars, many, scatter] = plots();
    let figure = |name: &str, title: &str, line: &str, charts: Vec<Plot>| Figure {
        name: name.into(),
        title: title.into(),
        line: line.into(),
        charts,
    };
    let row = |name: &str, strong: bool| {
        let number =
            Cell { text: "77.7 ± 16.4 %".into(), strong, title: "95 %: 61.2–94.1, 3 seeds".into() };
        vec![cell(name), number, cell("12,345 tokens/s"), cell("1.5 MiB"), cell("0.003 | 0.001"), cell("–")]
    };
    let long = "Mean over three seeds with 95 % intervals; the arms have the same number of parameters, saw the same \
                tokens in the same order and were trained with the best of three learning rates each, `march \
                reproduce recall --quick`.";
    Page {
        title: "Recall & memory: <8> arms".into(),
        summary: vec![
            format!("**MARCH answers 77.7 %** of the questions with `state <= 1 MiB`. {long}"),
            "See [the paper](https://example.org/a?b&c) for the definitions.".into(),
        ],
        facts: vec![
            ("Command".into(), "`march reproduce recall --seeds 3 | tee log`".into()),
            ("Machine".into(), "2 × AMD EPYC 7763, 8 GiB".into()),
            ("Time".into(), "1 h 12 min".into()),
        ],
        sections: vec![
            Section {
                heading: "Recall by memory".into(),
                text: vec![long.into()],
                tables: vec![Table {
                    caption: "Right answers, `3` seeds.".into(),
                    columns: ["Arm", "Right answers", "Decoding", "Memory", "Learning rates", "Note"]
                        .map(String::from)
                        .to_vec(),
                    rows: NAMES.iter().enumerate().map(|(i, name)| row(name, i == 0)).collect(),
                }],
                figures: vec![
                    figure("memory", "Recall by memory", long, vec![by_bytes.clone()]),
                    figure(
                        "both",
                        "Recall by memory and by length, and a title that is long enough for a second line of text",
                        long,
                        vec![by_bytes, by_length],
                    ),
                    figure("three", "Three plots", "Loss, and tasks.", vec![learning, bars, many]),
                    figure("speed", "Speed", "", vec![scatter]),
                ],
                ..Section::default()
            },
            Section {
                heading: "Again".into(),
                code: vec!["march reproduce recall > log ".into(), "ls".into()],
                list: vec!["One `item`.".into(), long.into()],
                ..Section::default()
            },
        ],
    }
}

#[test]
fn a_page_of_html() {
    let html = page().html();
    check(&html);
    let parts = [
        "<title>Recall &amp; memory: &lt;8&gt; arms</title>",
        "<b>MARCH answers 77.7 %</b> of the questions with <code>state &lt;= 1 MiB</code>.",
        "<a href=\"https://example.org/a?b&amp;c\">the paper</a>",
        "<td title=\"95 %: 61.2–94.1, 3 seeds\"><b>77.7 ± 16.4 %</b></td>",
        "<th scope=\"row\">RetNet</th>",
        "<title>MARCH, 128 KiB: 62.2 % (56.9–67.6)</title>",
        "<title>MARCH, 1K: 81.8 % (77.0–86.5)</title>",
        "<title>Gated DeltaNet, variable tracking: ",
        ">128 KiB</text>",
        ">128K</text>",
        "<pre>march reproduce recall &gt; log \nls</pre>",
        "<li>One <code>item</code>.</li>",
    ];
    for part in parts {
        assert!(html.contains(part), "{part}");
    }
    assert_eq!(html.matches("<svg").count(), 7);
    // MARCH has the same colour in all figures; a plot has eight of them.
    assert!(CLASSES.iter().all(|class| html.contains(&format!("<polyline class=\"{class}\""))));
    assert!(html.contains("class=\"fourth dashed\""));
    assert!(!html.contains("src=") && !html.contains("<link"), "no network");
}

#[test]
fn a_page_of_markdown() {
    let text = page().markdown("images");
    let parts = [
        "# Recall & memory: <8> arms\n\n**MARCH answers",
        "\n\n| | |\n|:---|:---|\n| Command | `march reproduce recall --seeds 3 \\| tee log` |\n",
        "\n\nRight answers, `3` seeds.\n\n| Arm | Right answers | Decoding | Memory | Learning rates | Note |\n\
         |:---|---:|---:|---:|---:|---:|\n\
         | MARCH | **77.7 ± 16.4 %** | 12,345 tokens/s | 1.5 MiB | 0.003 \\| 0.001 | – |\n",
        "\n\n![Recall by memory. Mean over three seeds",
        "](images/memory.svg)\n\n",
        "![Speed](images/speed.svg)\n\n## Again\n\n```sh\nmarch reproduce recall > log\nls\n```\n\n- One `item`.\n- Mean",
    ];
    for part in parts {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(text.ends_with("quick`.\n") && !text.lines().any(|line| line.ends_with(' ')));
    let long = |line: &&str| line.chars().count() > 120 && !line.starts_with(['|', '!']);
    assert_eq!(text.lines().find(long), None);
}

#[test]
fn figures_are_pictures() {
    let figures = page().figures();
    assert_eq!(
        figures.iter().map(|one| one.0.as_str()).collect::<Vec<_>>(),
        ["memory", "both", "three", "speed"]
    );
    for (_, svg) in &figures {
        check(svg);
        assert!(is_picture(svg.as_bytes()) && !svg.contains("var(") && svg.contains("#7d8f1a"));
    }
    // The last word of the long line is there, in a line of its own text.
    assert!(figures[1].1.matches("class=\"result\"").count() > 1 && figures[1].1.contains("--quick.</text>"));
    let three = &figures[2].1;
    assert!(
        three.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1492 "),
        "{}",
        &three[..90]
    );
}

#[test]
fn whatever_is_missing_is_left_out() {
    check(&Page::default().html());
    assert_eq!(Page::default().markdown(""), "#\n");
    let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 0.0, 1e308, f64::MIN_POSITIVE];
    let mut plots = vec![Plot::default()];
    for style in [SeriesStyle::Line, SeriesStyle::Points, SeriesStyle::Bars, SeriesStyle::Dashed] {
        for (log, names) in [(true, vec![]), (false, vec![]), (false, vec!["a".to_string(), "b".repeat(90)])]
        {
            let point = |(i, &y): (usize, &f64)| Point {
                x: bad[(i + 3) % 7],
                y,
                low: bad[(i + 1) % 7],
                high: bad[i],
            };
            let scale = Scale { log, bytes: log, names, range: Some((f64::NAN, 1.0)), ..Scale::default() };
            let series = |points| Series { name: "a <b>".into(), points, style };
            plots.push(Plot {
                x: scale.clone(),
                y: Scale { label: "y".repeat(99), ..scale },
                series: vec![series(bad.iter().enumerate().map(point).collect()), series(vec![])],
                levels: bad.iter().map(|&level| ("level".repeat(20), level)).collect(),
                ..Plot::default()
            });
        }
    }
    for plot in plots {
        let figure = Figure { charts: vec![plot], title: "x".repeat(300), ..Figure::default() };
        let table = Table { rows: vec![vec![], vec![cell("a"), cell("")]], ..Table::default() };
        let section = Section { figures: vec![figure], tables: vec![table], ..Section::default() };
        let page = Page { sections: vec![section], ..Page::default() };
        check(&page.html());
        page.figures().iter().for_each(|(_, svg)| check(svg));
        assert!(page.markdown("i").contains("| | |\n|:---|---:|\n| | |\n| a | |\n"));
    }
}

/// The page of one figure.
fn of(charts: Vec<Plot>) -> Page {
    let figure = Figure { name: "one".into(), charts, ..Figure::default() };
    Page { sections: vec![Section { figures: vec![figure], ..Section::default() }], ..Page::default() }
}

#[test]
fn a_series_keeps_its_colour() {
    let plot = |all: &[usize]| Plot {
        series: all.iter().map(|&i| series(i, &[1.0, 2.0], SeriesStyle::Line)).collect(),
        ..Plot::default()
    };
    let html = of(vec![plot(&[0, 1, 2]), plot(&[2])]).html();
    assert_eq!(html.matches("<polyline class=\"third\"").count(), 2);
    assert_eq!(html.matches("<polyline class=\"main\"").count(), 1);
    // With more series than colours on the page, each figure begins anew.
    let mut page = of(vec![plot(&[0, 1, 2, 3, 4, 5, 6, 7])]);
    let mut other = plot(&[2]);
    other.series[0].name = "ninth".into();
    page.sections.extend(of(vec![other]).sections);
    assert_eq!(page.html().matches("<polyline class=\"main\"").count(), 2);
}

#[test]
fn ranges_hold_what_is_drawn() {
    let points = |ys: &[f64]| {
        let point = |(i, &y): (usize, &f64)| Point { x: 3.0 * i as f64, y, low: f64::NAN, high: f64::NAN };
        ys.iter().enumerate().map(point).collect::<Vec<_>>()
    };
    let plot = |style, range| Plot {
        y: Scale { range, ..Scale::default() },
        series: vec![Series { name: "a".into(), points: points(&[40.0, 50.0, 90.0]), style }],
        levels: vec![("low".into(), 20.0), ("high".into(), 60.0)],
        ..Plot::default()
    };
    // Bars begin at 0, and those at 0, 3 and 6 stand side by side.
    let bars = of(vec![plot(SeriesStyle::Bars, None)]).html();
    assert!(bars.contains(">0</text>") && bars.contains("<title>a, 3: 50</title>"));
    assert_eq!(bars.matches("<rect class=\"main\"").count(), 4, "three bars and the legend");
    // A level outside of the range is not drawn; a point outside of it has no mark.
    let lines = of(vec![plot(SeriesStyle::Line, Some((30.0, 70.0)))]).html();
    assert!(lines.contains("<title>high: 60</title>") && !lines.contains(">low"));
    assert_eq!(lines.matches("<path class=\"mark full main\"").count(), 3, "two points and the legend");
    assert_eq!(lines.matches("<circle class=\"hidden\"").count(), 3);
}

/// A page of one paragraph and one item.
fn written(paragraph: &str, item: &str) -> Page {
    let section = Section { list: vec![item.into()], ..Section::default() };
    Page { summary: vec![paragraph.into()], sections: vec![section], ..Page::default() }
}

#[test]
fn code_bold_and_links() {
    let html = |text: &str| {
        let page = written(text, "").html();
        page.split_once("</h1>\n<p>").unwrap().1.split_once("</p>").unwrap().0.to_string()
    };
    let text = "a < `b<c` **d `e`** [f](https://g?h&i) `";
    let page = "a &lt; <code>b&lt;c</code> <b>d <code>e</code></b> <a href=\"https://g?h&amp;i\">f</a> `";
    assert_eq!(html(text), page);
    let titled = Page { title: text.into(), ..Page::default() }.html();
    assert!(titled.contains("<h1>a &lt; b&lt;c d e f `</h1>"), "{titled}");
    assert_eq!(html("`` a`b `` ```"), "<code>a`b</code> ```");
    assert_eq!(html("2 * 3 ** [1] [x] (y) ****"), "2 * 3 ** [1] [x] (y) ****");
    assert_eq!(html("[a] and [`b`](c/d.md#e)"), "[a] and <a href=\"c/d.md#e\"><code>b</code></a>");
    assert_eq!(html("[x](JavaScript:alert(1\")"), "x");
    assert_eq!(html("é`ü`ß"), "é<code>ü</code>ß");
}

#[test]
fn paragraphs_are_filled() {
    let page = written("a\n\n  b", &"word ".repeat(60)).markdown("");
    let (paragraph, lines) = page.strip_prefix("#\n\n").unwrap().split_once("\n\n").unwrap();
    assert_eq!(paragraph, "a b");
    assert!(lines.lines().count() == 3 && lines.lines().all(|line| line.chars().count() <= 120), "{lines}");
    assert!(lines.lines().skip(1).all(|line| line.starts_with("  word")));
    for word in ["-", "1.", "##", "> a", "```", "---"] {
        let long = format!("{} {word} b", "a".repeat(119));
        assert!(!written(&long, "x").markdown("").contains(&format!("\n{word} b")), "{word}");
    }
}

#[test]
fn names_of_pictures_are_plain() {
    let one = |name: &str, title: &str, line: &str| {
        let figure = Figure { name: name.into(), title: title.into(), line: line.into(), charts: vec![] };
        let section = Section { figures: vec![figure], ..Section::default() };
        let page = Page { sections: vec![section], ..Page::default() }.markdown("images/");
        page.trim_start_matches("#\n\n").to_string()
    };
    assert_eq!(one("a b/c", "T.", "`x` [1] of\n**all**"), "![T. x \\[1\\] of all](images/a-b-c.svg)\n");
    assert_eq!(one("a", "", "x"), "![x](images/a.svg)\n");
}

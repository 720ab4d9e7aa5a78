//! A page about an experiment, with tables and figures: as HTML, as Markdown, and its figures as SVG.

mod inline;
mod markdown;
mod plot;

use std::fmt::Write;

use super::chart::{Chart, Space};
use super::mark::CLASSES;
use super::picture::picture;
use super::{escape, whole_page};
use inline::{html, plain};
use plot::{Drawn, Names, add_names};

/// A page about one experiment.
///
/// Texts may contain inline code in backticks, `**bold**` and `[links](url)`, as in Markdown.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// The heading.
    pub title: String,
    /// Paragraphs below it.
    pub summary: Vec<String>,
    /// Names and values: command, date, machine, …
    pub facts: Vec<(String, String)>,
    /// The rest of the page.
    pub sections: Vec<Section>,
}

/// A part of a page; what it has is shown in the order of the fields.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// The heading.
    pub heading: String,
    /// Paragraphs.
    pub text: Vec<String>,
    /// Tables.
    pub tables: Vec<Table>,
    /// Figures.
    pub figures: Vec<Figure>,
    /// Lines of commands, shown as one block.
    pub code: Vec<String>,
    /// Items of a list.
    pub list: Vec<String>,
}

/// A table.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// The text above it.
    pub caption: String,
    /// The names of the columns.
    pub columns: Vec<String>,
    /// The rows; their first cell is a heading.
    pub rows: Vec<Vec<Cell>>,
}

/// A cell of a table.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// The text.
    pub text: String,
    /// Whether it is bold.
    pub strong: bool,
    /// A text that HTML shows on hover; empty for none.
    pub title: String,
}

/// Plots side by side.
#[derive(Clone, Debug, Default)]
pub struct Figure {
    /// The name of its file, without the ending.
    pub name: String,
    /// The heading.
    pub title: String,
    /// A sentence below the heading.
    pub line: String,
    /// The plots.
    pub charts: Vec<Plot>,
}

/// A plot.
#[derive(Clone, Debug, Default)]
pub struct Plot {
    /// The title.
    pub title: String,
    /// The horizontal axis.
    pub x: Scale,
    /// The vertical axis.
    pub y: Scale,
    /// The series. Those with the same name have the same colour in all plots, if there are not too many.
    pub series: Vec<Series>,
    /// Names and heights of horizontal lines.
    pub levels: Vec<(String, f64)>,
}

/// An axis of a plot.
#[derive(Clone, Debug, Default)]
pub struct Scale {
    /// The text next to the axis.
    pub label: String,
    /// Whether it is logarithmic.
    pub log: bool,
    /// Whether fractions of 1 are shown as percentages.
    pub percent: bool,
    /// Whether numbers are bytes, shown as KiB, MiB, …
    pub bytes: bool,
    /// The range; if not given, it is computed from the points.
    pub range: Option<(f64, f64)>,
    /// On the horizontal axis, categories to show at 0, 1, … instead of numbers.
    pub names: Vec<String>,
}

/// Points of one colour.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// The name in the legend.
    pub name: String,
    /// The points.
    pub points: Vec<Point>,
    /// How they are drawn.
    pub style: SeriesStyle,
}

/// A point.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// The horizontal place; the index of a category if the axis has names.
    pub x: f64,
    /// The value.
    pub y: f64,
    /// The lower end of its 95 % interval; NaN for none.
    pub low: f64,
    /// The upper end of its 95 % interval; NaN for none.
    pub high: f64,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum SeriesStyle {
    /// A line through its points.
    #[default]
    Line,
    /// Points only.
    Points,
    /// Bars.
    Bars,
    /// A dashed line through its points.
    Dashed,
}

impl Page {
    /// Renders a self-contained page, for light and dark.
    pub fn html(&self) -> String {
        let mut body = paragraphs(&self.summary);
        if !self.facts.is_empty() {
            body += "<div class=\"scroll\"><table class=\"facts\">\n";
            for (name, value) in &self.facts {
                let (name, value) = (html(name), html(value));
                let _ = writeln!(body, "<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>");
            }
            body += "</table></div>\n";
        }
        for section in &self.sections {
            body += &self.section(section);
        }
        whole_page(&plain(&self.title), STYLE, &body)
    }

    /// Renders Markdown; `images` is the folder of the figures, relative to the page.
    pub fn markdown(&self, images: &str) -> String {
        markdown::page(self, images)
    }

    /// The names of all figures and their standalone SVG, for light and dark pages.
    pub fn figures(&self) -> Vec<(String, String)> {
        let figures = self.sections.iter().flat_map(|section| &section.figures);
        figures.map(|figure| (figure.stem(), figure.picture(&self.colours(figure)))).collect()
    }

    fn section(&self, section: &Section) -> String {
        let mut text = String::from("<section>\n");
        if !section.heading.is_empty() {
            let _ = writeln!(text, "<h2>{}</h2>", html(&section.heading));
        }
        text += &paragraphs(&section.text);
        section.tables.iter().for_each(|table| text += &table.html());
        section.figures.iter().for_each(|figure| text += &figure.html(&self.colours(figure)));
        if !section.code.is_empty() {
            let _ = writeln!(text, "<pre>{}</pre>", escape(&section.code.join("\n")));
        }
        if !section.list.is_empty() {
            text += "<ul>\n";
            section.list.iter().for_each(|item| text += &format!("<li>{}</li>\n", html(item)));
            text += "</ul>\n";
        }
        text + "</section>\n"
    }

    /// The order of colours: the same on the whole page, unless it has more series than there are colours.
    fn colours<'a>(&'a self, figure: &'a Figure) -> Names<'a> {
        let mut names = Names::new();
        let figures = self.sections.iter().flat_map(|section| &section.figures);
        figures.for_each(|figure| add_names(&mut names, &figure.charts));
        if names.len() > CLASSES.len() {
            names.clear();
            add_names(&mut names, &figure.charts);
        }
        names
    }
}

impl Table {
    /// The number of columns.
    fn width(&self) -> usize {
        self.rows.iter().map(Vec::len).max().unwrap_or(0).max(self.columns.len())
    }

    fn html(&self) -> String {
        let columns = self.width();
        if columns == 0 {
            return String::new();
        }
        let mut text = String::new();
        if !self.caption.is_empty() {
            let _ = writeln!(text, "<p class=\"caption\">{}</p>", html(&self.caption));
        }
        let label = escape(&plain(&self.caption));
        // It can be scrolled with the keyboard.
        let _ = write!(
            text,
            "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"{label}\">\
             <table class=\"numbers evidence\">\n<thead><tr>"
        );
        for i in 0..columns {
            let name = self.columns.get(i).map_or_else(String::new, |name| html(name));
            let _ = write!(text, "<th scope=\"col\">{name}</th>");
        }
        text += "</tr></thead>\n<tbody>\n";
        for row in &self.rows {
            text += "<tr>";
            (0..columns).for_each(|i| text += &row.get(i).cloned().unwrap_or_default().html(i == 0));
            text += "</tr>\n";
        }
        text + "</tbody></table></div>\n"
    }
}

impl Cell {
    /// A cell with nothing but a text.
    pub fn of(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    fn html(&self, heading: bool) -> String {
        let (tag, scope) = if heading { ("th", " scope=\"row\"") } else { ("td", "") };
        let title = match self.title.as_str() {
            "" => String::new(),
            title => format!(" title=\"{}\"", escape(&plain(title))),
        };
        let text = html(&self.text);
        let text = if self.strong { format!("<b>{text}</b>") } else { text };
        format!("<{tag}{scope}{title}>{text}</{tag}>")
    }
}

impl Figure {
    /// The name as the stem of a file, without characters that need quoting.
    fn stem(&self) -> String {
        let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
        self.name.chars().map(safe).collect()
    }

    fn html(&self, colours: &[&str]) -> String {
        let mut text = format!("<figure id=\"{}\">\n", self.stem());
        if !self.title.is_empty() {
            let _ = writeln!(text, "<h3>{}</h3>", html(&self.title));
        }
        if !self.line.is_empty() {
            let _ = writeln!(text, "<p class=\"soft\">{}</p>", html(&self.line));
        }
        text += "<div class=\"charts\">\n";
        let drawn = self.drawn(colours);
        let charts = self.plots(&drawn);
        let charts: Vec<_> = charts.iter().filter(|chart| !chart.is_empty()).collect();
        let space = charts.iter().map(|chart| chart.space()).fold(Space::default(), Space::with);
        charts.iter().for_each(|chart| text += &chart.to_svg_below(space));
        text + "</div>\n</figure>\n"
    }

    fn picture(&self, colours: &[&str]) -> String {
        picture(&plain(&self.title), &plain(&self.line), &self.plots(&self.drawn(colours)))
    }

    fn drawn(&self, colours: &[&str]) -> Vec<Drawn> {
        self.charts.iter().map(|plot| Drawn::new(plot, colours)).collect()
    }

    fn plots<'a>(&'a self, drawn: &'a [Drawn]) -> Vec<Chart<'a>> {
        drawn.iter().zip(&self.charts).map(|(drawn, plot)| drawn.chart(plot)).collect()
    }
}

fn paragraphs(texts: &[String]) -> String {
    texts.iter().map(|text| format!("<p>{}</p>\n", html(text))).collect()
}

const STYLE: &str = include_str!("evidence.css");

//! The Markdown of a page.

use super::inline::plain;
use super::{Cell, Figure, Page, Section, Table};

/// The longest line of a paragraph.
const LINE: usize = 120;

/// The page; pictures are in the folder `images`.
pub(super) fn page(page: &Page, images: &str) -> String {
    let mut blocks = vec![format!("# {}", one_line(&page.title))];
    blocks.extend(page.summary.iter().map(|text| filled(text, "")));
    if !page.facts.is_empty() {
        let facts = page.facts.iter().map(|(name, value)| row([name.as_str(), value.as_str()].map(cell)));
        blocks.push(["| | |\n|:---|:---|".into()].into_iter().chain(facts).collect::<Vec<_>>().join("\n"));
    }
    for part in &page.sections {
        section(part, images, &mut blocks);
    }
    blocks.retain(|block| !block.is_empty());
    let lines = blocks.join("\n\n");
    // Commands may end with spaces.
    let lines: Vec<&str> = lines.lines().map(str::trim_end).collect();
    lines.join("\n").trim_end().to_string() + "\n"
}

fn section(section: &Section, images: &str, blocks: &mut Vec<String>) {
    if !section.heading.trim().is_empty() {
        blocks.push(format!("## {}", one_line(&section.heading)));
    }
    blocks.extend(section.text.iter().map(|text| filled(text, "")));
    for part in &section.tables {
        blocks.extend([filled(&part.caption, ""), table(part)]);
    }
    blocks.extend(section.figures.iter().map(|part| figure(part, images)));
    if !section.code.is_empty() {
        let code = section.code.join("\n");
        // A fence is longer than any run of backticks within.
        let longest = code.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat(3.max(longest + 1));
        blocks.push(format!("{fence}sh\n{code}\n{fence}"));
    }
    let items = section.list.iter().map(|item| format!("- {}", filled(item, "  ")));
    blocks.push(items.collect::<Vec<_>>().join("\n"));
}

fn table(table: &Table) -> String {
    let columns = table.width();
    if columns == 0 {
        return String::new();
    }
    let names = (0..columns).map(|i| cell(table.columns.get(i).map_or("", String::as_str)));
    let mut lines = vec![row(names), format!("|:---|{}", "---:|".repeat(columns - 1))];
    for cells in &table.rows {
        lines.push(row((0..columns).map(|i| cells.get(i).map_or_else(String::new, strong))));
    }
    lines.join("\n")
}

fn strong(one: &Cell) -> String {
    let text = cell(&one.text);
    if one.strong && !text.is_empty() && !text.contains("**") { format!("**{text}**") } else { text }
}

fn row(cells: impl IntoIterator<Item = String>) -> String {
    let cells = cells.into_iter().map(|cell| if cell.is_empty() { " ".into() } else { format!(" {cell} ") });
    format!("|{}|", cells.collect::<Vec<_>>().join("|"))
}

/// A text as a cell: in one line, its bars escaped.
fn cell(text: &str) -> String {
    one_line(text).replace('|', "\\|")
}

fn figure(figure: &Figure, images: &str) -> String {
    let [title, line] = [&figure.title, &figure.line].map(|text| one_line(&plain(text)));
    let both = match (title.as_str(), line.as_str()) {
        ("", text) | (text, "") => text.to_string(),
        _ => format!("{}. {line}", title.trim_end_matches('.')),
    };
    let text: String =
        both.chars().flat_map(|c| r"\[]`*_<".contains(c).then_some('\\').into_iter().chain([c])).collect();
    let folder = images.trim_end_matches('/');
    let folder = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    format!("![{text}]({folder}{}.svg)", figure.stem())
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A paragraph in lines of about 120 characters, all but the first behind `indent`. No line begins with what Markdown
/// would take for the beginning of a list, a heading or a quotation.
fn filled(text: &str, indent: &str) -> String {
    let mut filled = String::new();
    let mut length = indent.len();
    for word in text.split_whitespace() {
        let wide = word.chars().count();
        if filled.is_empty() {
        } else if length + 1 + wide > LINE && !begins_block(word) {
            filled += "\n";
            filled += indent;
            length = indent.len();
        } else {
            filled.push(' ');
            length += 1;
        }
        filled += word;
        length += wide;
    }
    filled
}

/// Whether a line that begins with this word is not part of a paragraph.
fn begins_block(word: &str) -> bool {
    let digits = word.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered = digits.len() < word.len() && (digits == "." || digits == ")");
    let rule = |c| !word.is_empty() && word.chars().all(|letter| letter == c);
    let marks = ['-', '+', '*', '=', '#', '_'];
    numbered
        || word.starts_with(['>', '|', '<'])
        || word.starts_with("```")
        || word.starts_with("~~~")
        || marks.into_iter().any(rule)
}

//! Text with inline code, bold and links, as in Markdown.

use super::super::escape;

/// A part of a text.
#[derive(Debug, PartialEq)]
enum Span<'a> {
    Text(&'a str),
    Code(&'a str),
    Bold(&'a str),
    Link(&'a str, &'a str),
}

/// The parts of a text. A mark without its counterpart is text.
fn spans(text: &str) -> Vec<Span<'_>> {
    let (mut spans, mut from, mut at) = (Vec::new(), 0, 0);
    while let Some(next) = text[at..].find(['`', '*', '[']) {
        at += next;
        let Some((span, length)) = span(&text[at..]) else {
            // The marks are single bytes; a run of backticks is not a shorter run.
            let run = text[at..].bytes().take_while(|&byte| byte == b'`').count();
            at += run.max(1);
            continue;
        };
        if from < at {
            spans.push(Span::Text(&text[from..at]));
        }
        spans.push(span);
        at += length;
        from = at;
    }
    if from < text.len() {
        spans.push(Span::Text(&text[from..]));
    }
    spans
}

/// The code, bold or link that a text begins with, and its length.
fn span(text: &str) -> Option<(Span<'_>, usize)> {
    if text.starts_with('`') {
        let marks = text.len() - text.trim_start_matches('`').len();
        let (mark, rest) = text.split_at(marks);
        let end = rest.find(mark)?;
        let code = &rest[..end];
        // One space next to the marks lets code begin or end with a backtick.
        let inner = code.strip_prefix(' ').and_then(|code| code.strip_suffix(' '));
        return Some((Span::Code(inner.filter(|_| marks > 1).unwrap_or(code)), end + 2 * marks));
    }
    if let Some(rest) = text.strip_prefix("**") {
        let end = rest.find("**").filter(|&end| end > 0)?;
        let outside = |c: char| c.is_whitespace() || c == '*';
        if rest.starts_with(outside) || rest[..end].ends_with(outside) {
            return None;
        }
        return Some((Span::Bold(&rest[..end]), end + 4));
    }
    let rest = text.strip_prefix('[')?;
    let (name, link) = rest.split_once("](")?;
    let (url, _) = link.split_once(')')?;
    let valid = !name.contains('[') && !url.is_empty() && !url.contains(char::is_whitespace);
    valid.then_some((Span::Link(name, url), name.len() + url.len() + 4))
}

/// The text as HTML. A link that is not to a page or an address is shown as text.
pub(super) fn html(text: &str) -> String {
    let one = |span| match span {
        Span::Text(text) => escape(text),
        Span::Code(code) => format!("<code>{}</code>", escape(code)),
        Span::Bold(text) => format!("<b>{}</b>", html(text)),
        Span::Link(name, url) if is_safe(url) => format!("<a href=\"{}\">{}</a>", escape(url), html(name)),
        Span::Link(name, _) => html(name),
    };
    spans(text).into_iter().map(one).collect()
}

/// The text without its marks.
pub(super) fn plain(text: &str) -> String {
    let one = |span| match span {
        Span::Text(text) | Span::Code(text) => text.into(),
        Span::Bold(text) | Span::Link(text, _) => plain(text),
    };
    spans(text).into_iter().map(one).collect()
}

/// Whether an address is relative, of the web or of mail.
fn is_safe(url: &str) -> bool {
    let before = url.split(['/', '?', '#']).next().unwrap_or_default();
    let scheme = before.split_once(':').map(|(scheme, _)| scheme.to_ascii_lowercase());
    scheme.is_none_or(|scheme| ["http", "https", "mailto"].contains(&scheme.as_str()))
}

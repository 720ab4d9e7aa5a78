//! Text over several lines, for pictures.

/// Approximate width of a 12-pixel character.
pub(super) const CHARACTER: f64 = 6.8;

/// The approximate width of a 12-pixel text.
pub(super) fn width(text: &str) -> f64 {
    CHARACTER * text.chars().count() as f64
}

/// 1234567 as 1,234,567.
pub(super) fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    groups.collect::<Vec<_>>().join(",")
}

/// Breaks a text into lines of at most `most` characters, between words if it can. A text without words has no lines.
pub fn wrapped(text: &str, most: usize) -> Vec<String> {
    let most = most.max(1);
    let mut lines: Vec<String> = Vec::new();
    let mut room = 0;
    for word in text.split_whitespace() {
        let letters: Vec<char> = word.chars().collect();
        for (i, part) in letters.chunks(most).enumerate() {
            match lines.last_mut() {
                Some(line) if i == 0 && part.len() < room => {
                    line.push(' ');
                    line.extend(part);
                    room -= part.len() + 1;
                }
                _ => {
                    lines.push(part.iter().collect());
                    room = most - part.len();
                }
            }
        }
    }
    lines
}

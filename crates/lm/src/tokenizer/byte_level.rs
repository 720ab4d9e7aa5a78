//! The words of GPT-2's byte-level tokenizers, and two applications: a faster way to the same ids, and positions where
//! a long text can be split.

use std::collections::HashMap;
use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;
use tokenizers::Model;
use tokenizers::models::ModelWrapper;

/// GPT-2's words, except for its next-to-last rule, `\s+(?!\S)`, which [`words`] adds: a run of white space
/// leaves its last character to the next word.
static WORD: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+").ok());

/// Word patterns in which line ends occur only at the end of a word: those of Llama 3 and of Qwen 2.
pub const LINE_END_LAST: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// The words of a text, whose boundaries no token crosses. Concatenated they are the text.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = first_word(rest)?;
        let (word, after) = rest.split_at(end);
        rest = after;
        Some(word)
    })
}

/// The end of the first word of a text; `None` if the text is empty.
fn first_word(text: &str) -> Option<usize> {
    if text.is_empty() {
        return None;
    }
    let end =
        ascii_word(text.as_bytes()).or_else(|| Some(WORD.as_ref()?.find(text)?.end())).unwrap_or(text.len());
    // Only a run of white space ends in white space.
    match text.get(..end)?.char_indices().next_back() {
        Some((last, c)) if c.is_whitespace() && last > 0 && end < text.len() => Some(last),
        _ => Some(end),
    }
}

/// A much faster version of [`WORD`] for the most common case: a word and a following character in ASCII.
fn ascii_word(text: &[u8]) -> Option<usize> {
    #[derive(PartialEq)]
    enum Class {
        Letter,
        Digit,
        Space,
        Other,
    }
    let class = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' => Class::Letter,
        b'0'..=b'9' => Class::Digit,
        b'\t'..=b'\r' | b' ' => Class::Space,
        _ => Class::Other,
    };
    match text {
        [b'\'', b's' | b't' | b'm' | b'd', ..] => return Some(2),
        [b'\'', b'r', b'e', ..] | [b'\'', b'v', b'e', ..] | [b'\'', b'l', b'l', ..] => return Some(3),
        _ => {}
    }
    let start = match text {
        [b' ', next, ..] if class(*next) != Class::Space => 1,
        _ => 0,
    };
    let of = class(*text.get(start)?);
    let end = text.iter().skip(start).position(|&byte| !byte.is_ascii() || class(byte) != of);
    match end.map(|length| start + length) {
        Some(end) => text[end].is_ascii().then_some(end),
        None => Some(text.len()),
    }
}

/// The printable character that vocabularies use for a byte: the byte itself if printable, otherwise one above U+0100.
fn character(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|&before| !printable(before)).count();
    char::from_u32(0x100 + place as u32).unwrap_or(char::REPLACEMENT_CHARACTER)
}

static CHARACTERS: LazyLock<[char; 256]> =
    LazyLock::new(|| std::array::from_fn(|byte| character(byte as u8)));

/// Bytes in the spelling of vocabularies.
pub fn spell(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| CHARACTERS[usize::from(byte)]).collect()
}

/// A cache of the ids of words.
#[derive(Default)]
pub struct Cache(HashMap<Box<str>, Box<[u32]>>);

impl Cache {
    /// Maximum number of cached words, and their maximum length in bytes.
    const WORDS: usize = 1 << 16;
    const LENGTH: usize = 64;
}

/// A tokenizer with GPT-2's words and no normalisation, so that its model can encode word by word.
pub struct ByteLevel {
    /// Finds the tokens that the file adds to its model; `None` if it adds none.
    added: Option<Regex>,
}

impl ByteLevel {
    /// Creates it for files of this kind; `None` for others.
    pub fn of(json: &Value, tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        if Cut::of(json) != Some(Cut::BeforeLineEnd) || !matches!(tokenizer.get_model(), ModelWrapper::BPE(_))
        {
            return None;
        }
        let added: Vec<String> = tokenizer
            .get_added_tokens_decoder()
            .values()
            .map(|token| regex::escape(&token.content))
            .collect();
        if added.is_empty() {
            return Some(Self { added: None });
        }
        Some(Self { added: Some(Regex::new(&added.join("|")).ok()?) })
    }

    /// Whether a text contains an added token; such a text is encoded by the library.
    pub fn has_added_token(&self, text: &str) -> bool {
        self.added.as_ref().is_some_and(|added| added.is_match(text))
    }

    /// Appends the ids of a text.
    pub fn encode(
        &self,
        model: &ModelWrapper,
        text: &str,
        cache: &mut Cache,
        ids: &mut Vec<u32>,
    ) -> tokenizers::Result<()> {
        for word in words(text) {
            if let Some(known) = cache.0.get(word) {
                ids.extend_from_slice(known);
                continue;
            }
            let start = ids.len();
            ids.extend(model.tokenize(&spell(word.as_bytes()))?.iter().map(|token| token.id));
            if word.len() <= Cache::LENGTH && cache.0.len() < Cache::WORDS {
                cache.0.insert(word.into(), ids[start..].into());
            }
        }
        Ok(())
    }
}

/// Where a text can be split such that its parts have the ids of the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Between any two characters.
    Anywhere,
    /// Between a character that is not white space and a line end: GPT-2's words never contain both in this order.
    BeforeLineEnd,
    /// Between a line end and a character that is not white space: see [`LINE_END_LAST`].
    AfterLineEnd,
    /// Before white space: the words in between are encoded separately, and white space is not encoded.
    AtSpace,
}

impl Cut {
    /// The splits that a `tokenizer.json` allows, as far as known.
    pub fn of(json: &Value) -> Option<Self> {
        let no_normalizer = json.get("normalizer").is_none_or(Value::is_null);
        // A token that includes the white space around it, or line ends, could cross the split.
        let is = |value: &Value, key: &str| value.get(key).and_then(Value::as_bool) == Some(true);
        let content =
            |token: &Value| token.get("content").and_then(Value::as_str).unwrap_or("\n").to_string();
        let crossing =
            |token: &Value| content(token).contains('\n') || is(token, "lstrip") || is(token, "rstrip");
        let added = json.get("added_tokens").and_then(Value::as_array);
        if !no_normalizer || added.is_some_and(|added| added.iter().any(crossing)) {
            return None;
        }
        let pre_tokenizer = json.get("pre_tokenizer")?;
        let kind = |value: &Value, name: &str| value.get("type").and_then(Value::as_str) == Some(name);
        let plain = |value: &Value| {
            kind(value, "ByteLevel") && value.get("add_prefix_space").and_then(Value::as_bool) == Some(false)
        };
        if plain(pre_tokenizer) && pre_tokenizer.get("use_regex").is_none_or(|regex| regex == true) {
            return Some(Self::BeforeLineEnd);
        }
        if kind(pre_tokenizer, "WhitespaceSplit") {
            let spaced = |token: &Value| content(token).contains(char::is_whitespace);
            return (!added.is_some_and(|added| added.iter().any(spaced))).then_some(Self::AtSpace);
        }
        let steps = pre_tokenizer.get("pretokenizers").and_then(Value::as_array)?;
        let [split, byte_level] = steps.as_slice() else { return None };
        let pattern = split.get("pattern")?.get("Regex")?.as_str()?;
        let isolated =
            split.get("behavior").and_then(Value::as_str) == Some("Isolated") && !is(split, "invert");
        let known = kind(pre_tokenizer, "Sequence") && kind(split, "Split") && isolated && plain(byte_level);
        let known = known && byte_level.get("use_regex").and_then(Value::as_bool) == Some(false);
        (known && LINE_END_LAST.contains(&pattern)).then_some(Self::AfterLineEnd)
    }

    /// Splits a text at the first allowed position after every `size` bytes.
    pub fn parts(self, text: &str, size: usize) -> Vec<&str> {
        let mut parts = Vec::new();
        let mut rest = text;
        while rest.len() > size
            && let Some(place) = self.place(rest, size.max(1))
        {
            let (part, after) = rest.split_at(place);
            parts.push(part);
            rest = after;
        }
        if !rest.is_empty() {
            parts.push(rest);
        }
        parts
    }

    /// The last position where the text can be split, searched for after the first `from` bytes; `None` if there is
    /// none.
    pub fn last_place(self, text: &str, from: usize) -> Option<usize> {
        let no_space = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace());
        let bytes = text.as_bytes();
        let mut line_ends = (from..bytes.len()).rev().filter(|&place| bytes[place] == b'\n');
        match self {
            Self::Anywhere => Some(text.len()).filter(|&end| end > from),
            Self::AtSpace => {
                let from = (0..=from).rev().find(|&place| text.is_char_boundary(place))?;
                text[from..].rfind(char::is_whitespace).map(|place| from + place).filter(|&place| place > 0)
            }
            Self::BeforeLineEnd => line_ends.find(|&place| no_space(text[..place].chars().next_back())),
            Self::AfterLineEnd => {
                line_ends.map(|place| place + 1).find(|&place| no_space(text[place..].chars().next()))
            }
        }
    }

    /// The first position at or after `from` bytes where the text can be split.
    fn place(self, text: &str, from: usize) -> Option<usize> {
        let from = (from..text.len()).find(|&place| text.is_char_boundary(place))?;
        let before = |place: usize| text[..place].chars().next_back();
        let after = |place: usize| text[place..].chars().next();
        let no_space = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace());
        let mut line_ends = text[from..].match_indices('\n').map(|(place, _)| from + place);
        match self {
            Self::Anywhere => Some(from),
            Self::AtSpace => text[from..].find(char::is_whitespace).map(|place| from + place),
            Self::BeforeLineEnd => line_ends.find(|&place| no_space(before(place))),
            Self::AfterLineEnd => line_ends.map(|place| place + 1).find(|&place| no_space(after(place))),
        }
    }
}

//! The tokenizer among the metadata of a GGUF file, as the `tokenizer.json` that it was made from.
//!
//! Of byte-level BPE (`gpt2`), the file names how words are separated, in `tokenizer.ggml.pre`; the patterns are those of
//! the models' own `tokenizer.json`. Of SentencePiece (`llama`), it has a score for each token and no merges: two tokens
//! merge if both together are a token, those with the highest score first.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::ChatTemplate;
use super::metadata::Metadata;
use crate::error::{Error, Result};
use crate::tokenizer::{LINE_END_LAST, Tokenizer};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
const FEWER_SPACES: &str = "tokenizer.ggml.remove_extra_whitespaces";
const TEMPLATE: &str = "tokenizer.chat_template";
const BEGIN: &str = "tokenizer.ggml.bos_token_id";

/// The keys of tokens that end a text.
const ENDS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Control tokens that end a turn, which a file need not name.
const TURN_ENDS: [&str; 6] =
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>"];

/// Types of tokens with a meaning here.
const NORMAL: u64 = 1;
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
/// Ids without a token, which have a name only because each must have one.
const UNUSED: u64 = 5;

/// The words of Qwen3.5: like those of Qwen 2, with marks among the letters.
const WITH_MARKS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How words are separated.
struct Words {
    /// A pattern of words; `None` for those of GPT-2.
    pattern: Option<&'static str>,
    /// Whether digits are words of their own before that.
    digits: bool,
    /// Whether characters are composed first (NFC).
    composed: bool,
    /// Whether a word that is a token is not looked up among the merges.
    ignore_merges: bool,
}

impl Words {
    fn named(pre: &str) -> Option<Self> {
        let [llama, qwen] = LINE_END_LAST;
        let plain = Self { pattern: None, digits: false, composed: false, ignore_merges: false };
        Some(match pre {
            "gpt-2" => plain,
            "smollm" => Self { digits: true, ..plain },
            "llama-bpe" | "llama3" | "llama-v3" => {
                Self { pattern: Some(llama), ignore_merges: true, ..plain }
            }
            "qwen2" => Self { pattern: Some(qwen), composed: true, ..plain },
            "deepseek-r1-qwen" => Self { pattern: Some(qwen), ..plain },
            "qwen35" => Self { pattern: Some(WITH_MARKS), composed: true, ..plain },
            _ => return None,
        })
    }

    fn pre_tokenizer(&self) -> Value {
        let byte_level = |regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex });
        let first = match self.pattern {
            Some(pattern) => json!({
                "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false
            }),
            None if self.digits => json!({ "type": "Digits", "individual_digits": true }),
            None => return byte_level(true),
        };
        json!({ "type": "Sequence", "pretokenizers": [first, byte_level(self.pattern.is_none())] })
    }
}

/// The tokenizer of a file.
pub(super) fn tokenizer(metadata: &Metadata) -> Result<Tokenizer> {
    let tokens = metadata.required(TOKENS, metadata.texts(TOKENS)?)?;
    let types = types(metadata, tokens.len())?;
    let (mut vocabulary, mut added) = (Map::new(), Vec::new());
    for (id, (token, kind)) in tokens.iter().zip(&types).enumerate() {
        if *kind == UNUSED || token.is_empty() {
            continue;
        }
        vocabulary.insert((*token).into(), id.into());
        if [CONTROL, USER_DEFINED].contains(kind) {
            added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": *kind == CONTROL
            }));
        }
    }
    let model = metadata.required(MODEL, metadata.text(MODEL)?)?;
    let mut value = match model {
        "gpt2" => byte_level(metadata)?,
        "llama" => pieces(metadata, &tokens, &types)?,
        other => {
            let message = format!(
                "is \"{other}\", which is not supported; \"gpt2\" (byte-level BPE) and \"llama\" (SentencePiece) can be \
                 read: name the model's `tokenizer.json` (`--tokenizer FILE`)"
            );
            return Err(metadata.error(MODEL, message));
        }
    };
    value["added_tokens"] = added.into();
    value["model"]["vocab"] = vocabulary.into();
    let path = metadata.file.path();
    let name = path.file_name().map_or("tokenizer".into(), |name| name.to_string_lossy().into_owned());
    let tokenizer = Tokenizer::from_json(value.to_string().into_bytes(), &name).map_err(|message| {
        let message = format!("has a tokenizer that is not valid (`{TOKENS}`, `{MERGES}`): {message}");
        Error::damaged(path, message)
    })?;
    Ok(tokenizer.with_ends(ends(metadata, &tokens, &types)?))
}

/// Byte-level BPE, without its tokens.
fn byte_level(metadata: &Metadata) -> Result<Value> {
    let pre = metadata.required(PRE, metadata.text(PRE)?)?;
    let Some(words) = Words::named(pre) else {
        let message = format!(
            "is \"{pre}\", which is not supported; \"gpt-2\", \"smollm\", \"llama-bpe\", \"qwen2\", \
             \"deepseek-r1-qwen\" and \"qwen35\" can be read: name the model's `tokenizer.json` (`--tokenizer FILE`)"
        );
        return Err(metadata.error(PRE, message));
    };
    let merges = metadata.required(MERGES, metadata.texts(MERGES)?)?;
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "normalizer": words.composed.then(|| json!({ "type": "NFC" })),
        "pre_tokenizer": words.pre_tokenizer(),
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": words.ignore_merges, "merges": merges,
        },
    }))
}

/// SentencePiece, without its tokens. Spaces are spelled ▁, and one is put before a text.
fn pieces(metadata: &Metadata, tokens: &[&str], types: &[u64]) -> Result<Value> {
    let scores = metadata.required(SCORES, metadata.numbers(SCORES)?)?;
    if scores.len() != tokens.len() {
        let message = format!("has {} entries for {} tokens (`{TOKENS}`)", scores.len(), tokens.len());
        return Err(metadata.error(SCORES, message));
    }
    if metadata.flag(FEWER_SPACES)? == Some(true) {
        return Err(metadata.error(FEWER_SPACES, "is true, which is not supported"));
    }
    let prefix = metadata.flag(SPACE_PREFIX)?.unwrap_or(true);
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let back = json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " });
    let mut normalizers = vec![spaces];
    let mut decoders = vec![back, json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    if prefix {
        normalizers.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let unknown = tokens.iter().zip(types).find(|(_, kind)| **kind == UNKNOWN).map(|(token, _)| *token);
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "pre_tokenizer": null, "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "merges": merges_of(tokens, types, &scores),
        },
    }))
}

/// The merges that give tokens with scores, the highest score first.
fn merges_of<'a>(tokens: &[&'a str], types: &[u64], scores: &[f32]) -> Vec<[&'a str; 2]> {
    /// Longer pieces are no words, and have too many parts.
    const LONGEST: usize = 512;
    let normal = || (0..tokens.len()).filter(|&id| types[id] == NORMAL && tokens[id].len() <= LONGEST);
    let ids: HashMap<&str, usize> = normal().map(|id| (tokens[id], id)).collect();
    let mut merges = Vec::new();
    for id in normal() {
        for (place, _) in tokens[id].char_indices().skip(1) {
            let (a, b) = tokens[id].split_at(place);
            if let (Some(&first), Some(&second)) = (ids.get(a), ids.get(b)) {
                merges.push((id, first, second, [a, b]));
            }
        }
    }
    merges.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then((a.1, a.2).cmp(&(b.1, b.2))));
    merges.into_iter().map(|(.., pair)| pair).collect()
}

/// The type of each token.
fn types(metadata: &Metadata, count: usize) -> Result<Vec<u64>> {
    let types = metadata.required(TYPES, metadata.wholes(TYPES)?)?;
    if types.len() != count {
        let message =
            format!("has {} entries for {count} tokens (`{TOKENS}`); the file is damaged", types.len());
        return Err(metadata.error(TYPES, message));
    }
    Ok(types)
}

/// The ids that end a text or a turn.
fn ends(metadata: &Metadata, tokens: &[&str], types: &[u64]) -> Result<Vec<u32>> {
    let mut ends = Vec::new();
    for key in ENDS {
        ends.extend(id(metadata, key, tokens.len())?);
    }
    let named = tokens.iter().zip(types).enumerate();
    ends.extend(
        named
            .filter(|(_, (token, kind))| **kind == CONTROL && TURN_ENDS.contains(token))
            .filter_map(|(id, _)| u32::try_from(id).ok()),
    );
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

/// An id among the metadata.
fn id(metadata: &Metadata, key: &str, count: usize) -> Result<Option<u32>> {
    let Some(found) = metadata.whole(key)? else { return Ok(None) };
    match u32::try_from(found) {
        Ok(id) if (id as usize) < count => Ok(Some(id)),
        _ => {
            Err(metadata.error(key, format!("is {found}, but there are {count} tokens; the file is damaged")))
        }
    }
}

/// The chat template of a file.
pub(super) fn chat_template(metadata: &Metadata) -> Result<Option<ChatTemplate>> {
    let Some(text) = metadata.text(TEMPLATE)? else { return Ok(None) };
    let tokens = metadata.texts(TOKENS)?.unwrap_or_default();
    let spelled = |key: &str| -> Result<String> {
        Ok(id(metadata, key, tokens.len())?.map_or(String::new(), |id| tokens[id as usize].into()))
    };
    Ok(Some(ChatTemplate { text: text.into(), bos: spelled(BEGIN)?, eos: spelled(ENDS[0])? }))
}

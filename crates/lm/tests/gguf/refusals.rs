//! Files that are damaged, cut, or hold something else: an error that names the file and what is wrong, never a panic.

use std::fs;

use march_lm::checkpoint::Checkpoint;

use super::{FILES, file, fixture, read};
use crate::common::damage::damaged;

/// A value of a key.
enum Entry<'a> {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(&'a str),
}

fn key(bytes: &mut Vec<u8>, name: &str, kind: u32) {
    bytes.extend((name.len() as u64).to_le_bytes());
    bytes.extend(name.as_bytes());
    bytes.extend(kind.to_le_bytes());
}

/// Where the keys begin: after the magic, the version and two counts.
const KEYS: usize = 24;

/// A file with more keys.
fn with(file: &[u8], entries: &[(&str, Entry<'_>)]) -> Vec<u8> {
    let mut more = Vec::new();
    for (name, entry) in entries {
        match entry {
            Entry::U32(number) => {
                key(&mut more, name, 4);
                more.extend(number.to_le_bytes());
            }
            Entry::F32(number) => {
                key(&mut more, name, 6);
                more.extend(number.to_le_bytes());
            }
            Entry::Bool(flag) => {
                key(&mut more, name, 7);
                more.push(u8::from(*flag));
            }
            Entry::Text(text) => {
                key(&mut more, name, 8);
                more.extend((text.len() as u64).to_le_bytes());
                more.extend(text.as_bytes());
            }
        }
    }
    // What follows stays aligned.
    let name = "general.filler";
    key(&mut more, name, 8);
    let length = (more.len() + 8).next_multiple_of(32) - more.len() - 8;
    more.extend((length as u64).to_le_bytes());
    more.resize(more.len() + length, b'x');
    let mut bytes = file.to_vec();
    bytes[16] += entries.len() as u8 + 1;
    bytes.splice(KEYS..KEYS, more);
    bytes
}

/// The place after a text in a file, which must be there.
fn after(bytes: &[u8], text: &str) -> usize {
    let place = bytes.windows(text.len()).position(|window| window == text.as_bytes());
    place.unwrap_or_else(|| panic!("{text} is not in the file")) + text.len()
}

/// A file with other bytes at a place.
fn changed(bytes: &[u8], place: usize, new: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[place..place + new.len()].copy_from_slice(new);
    bytes
}

#[track_caller]
fn refused(bytes: &[u8], parts: &[&str]) {
    let (_folder, path) = file(bytes);
    let message = read(&path).expect_err("it should be refused").to_string();
    assert!(message.contains("model.gguf"), "{message}");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn bytes_of(name: &str) -> Vec<u8> {
    fs::read(fixture(name)).unwrap()
}

#[test]
fn headers_are_not_believed() {
    let sound = bytes_of("qwen3.gguf");
    let (_folder, path) = file(&sound);
    read(&path).unwrap();
    let huge = u64::MAX.to_le_bytes();
    let large = (1u64 << 40).to_le_bytes();
    refused(b"", &["cut short"]);
    refused(b"GGUF", &["cut short", "version"]);
    refused(&changed(&sound, 0, b"GGML"), &["does not begin with `GGUF`"]);
    refused(&changed(&sound, 4, &[1]), &["version 1", "convert the model again"]);
    refused(&changed(&sound, 4, &[9]), &["version 9"]);
    refused(&changed(&sound, 4, &[0, 0, 0, 3]), &["big-endian", "gguf-convert-endian"]);
    for count in [&huge, &large] {
        refused(&changed(&sound, 8, count), &["tensors", "cut short or damaged"]);
        refused(&changed(&sound, 16, count), &["keys", "cut short or damaged"]);
        // The length of the first key, and of a list.
        refused(&changed(&sound, KEYS, count), &["the name of a key"]);
        refused(
            &changed(&sound, after(&sound, "tokenizer.ggml.tokens") + 8, count),
            &["`tokenizer.ggml.tokens`"],
        );
        // The length of a text.
        refused(
            &changed(&sound, after(&sound, "tokenizer.chat_template") + 4, count),
            &["`tokenizer.chat_template`"],
        );
    }
    refused(
        &changed(&sound, after(&sound, "qwen3.block_count"), &[77]),
        &["`qwen3.block_count`", "value type 77"],
    );
    refused(&changed(&sound, after(&sound, "ggml.token_type") + 4, &[9]), &["lists in the list"]);
    refused(&changed(&sound, KEYS + 8, &[0xFF]), &["not UTF-8"]);
    // A tensor: the number of dimensions, the dimensions, the type, the offset.
    let tensor = after(&sound, "token_embd.weight");
    refused(&changed(&sound, tensor, &[0]), &["`token_embd.weight` has 0 dimensions"]);
    refused(&changed(&sound, tensor, &[5]), &["`token_embd.weight` has 5 dimensions"]);
    refused(&changed(&sound, tensor + 4, &huge), &["`token_embd.weight`", "shape"]);
    refused(&changed(&sound, tensor + 4, &[0; 8]), &["`token_embd.weight`", "shape"]);
    refused(&changed(&sound, tensor + 12, &large), &["`token_embd.weight`", "cut short or damaged"]);
    refused(&changed(&sound, tensor + 20, &[99]), &["`token_embd.weight`", "unknown type 99", "Q4_K_M"]);
    refused(&changed(&sound, tensor + 20, &[10]), &["`token_embd.weight`", "type Q2_K", "Q4_K_M"]);
    // No row of 16 numbers is in blocks of 32.
    refused(&changed(&sound, tensor + 20, &[8]), &["`token_embd.weight`", "Q8_0", "[64, 16]"]);
    let next = after(&sound, "output_norm.weight") + 4 + 8 + 4;
    refused(&changed(&sound, next, &[0; 8]), &["`output_norm.weight`", "inside tensor `token_embd.weight`"]);
    refused(&changed(&sound, next, &huge), &["`output_norm.weight`", "offset"]);
    // A name that another tensor has.
    let name = after(&sound, "blk.0.attn_q_norm.weight");
    refused(&changed(&sound, name - 24, b"blk.0.attn_k_norm.weight"), &["`blk.0.attn_k_norm.weight`"]);
    refused(&[&sound[..], &[0; 40]].concat(), &["longer than its header says"]);
    for alignment in [0, 3, 1 << 30] {
        refused(&with(&sound, &[("general.alignment", Entry::U32(alignment))]), &["`general.alignment`"]);
    }
    let twice = with(&sound, &[("qwen3.block_count", Entry::U32(1))]);
    refused(&twice, &["`qwen3.block_count` twice"]);
}

/// A file that ends at any place is refused.
#[test]
fn cut_files() {
    let sound = bytes_of("qwen3.gguf");
    let (folder, path) = file(&sound);
    for end in (0..sound.len()).step_by(7).chain(sound.len() - 40..sound.len()) {
        fs::write(&path, &sound[..end]).unwrap();
        let message = Checkpoint::open(&path).expect_err("it is cut").to_string();
        assert!(message.contains("cut short"), "{end}: {message}");
    }
    drop(folder);
}

#[test]
fn other_models_are_refused_by_name() {
    let (llama, qwen3, qwen35) = (bytes_of("types.gguf"), bytes_of("qwen3.gguf"), bytes_of("qwen35.gguf"));
    let name = after(&qwen3, "general.architecture") + 4 + 8;
    refused(
        &changed(&qwen3, name, b"gemma"),
        &["`general.architecture` is \"gemma\"", "\"llama\", \"qwen3\""],
    );
    for (entries, parts) in [
        (vec![("split.count", Entry::U32(3))], vec!["`split.count` is 3", "--merge"]),
        (vec![("general.type", Entry::Text("adapter"))], vec!["`general.type` is \"adapter\""]),
        (vec![("general.quantization_version", Entry::U32(1))], vec!["`general.quantization_version` is 1"]),
        (vec![("llama.expert_count", Entry::U32(8))], vec!["`llama.expert_count` is 8", "experts"]),
        (vec![("llama.attention.causal", Entry::Bool(false))], vec!["`llama.attention.causal` is false"]),
        (vec![("llama.logit_scale", Entry::F32(0.5))], vec!["`llama.logit_scale` is not known"]),
        (
            vec![("llama.rope.scaling.type", Entry::Text("yarn"))],
            vec!["`llama.rope.scaling.type` is \"yarn\""],
        ),
    ] {
        refused(&with(&llama, &entries), &parts);
    }
    for (entries, factor) in [
        (
            vec![
                ("llama.rope.scaling.type", Entry::Text("linear")),
                ("llama.rope.scaling.factor", Entry::F32(4.0)),
            ],
            4.0,
        ),
        (vec![("llama.rope.scale_linear", Entry::F32(2.0))], 2.0),
    ] {
        let (_folder, path) = file(&with(&llama, &entries));
        let config = Checkpoint::open(&path).unwrap().config().to_json();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["rotary_scaling"]["factor"], factor, "{config}");
    }
    // Keys that do not fit each other, or the tensors.
    let number =
        |bytes: &[u8], key: &str, number: u32| changed(bytes, after(bytes, key) + 4, &number.to_le_bytes());
    refused(&number(&llama, "llama.rope.dimension_count", 8), &["`llama.rope.dimension_count` is 8"]);
    refused(&number(&llama, "llama.attention.value_length", 8), &["`llama.attention.value_length` is 8"]);
    refused(&number(&llama, "llama.embedding_length", 0), &["`llama.embedding_length` is 0"]);
    refused(
        &number(&llama, "llama.embedding_length", 512),
        &["tensor `token_embd.weight` has shape [64, 256]"],
    );
    refused(&number(&llama, "llama.block_count", 2), &["tensors are missing", "`blk.1."]);
    for bytes in [&llama, &qwen35] {
        let architecture = if bytes == &llama { "llama" } else { "qwen35" };
        for key in ["block_count", "attention.head_count", "attention.key_length", "context_length"] {
            let key = format!("{architecture}.{key}");
            let (_folder, path) = file(&number(bytes, &key, u32::MAX));
            assert_eq!(read(&path).is_ok(), key.ends_with("context_length"), "{key}");
        }
    }
    for key in
        ["ssm.group_count", "ssm.time_step_rank", "ssm.inner_size", "ssm.state_size", "ssm.conv_kernel"]
    {
        let (_folder, path) = file(&number(&qwen35, &format!("qwen35.{key}"), u32::MAX));
        assert!(read(&path).is_err(), "{key}");
    }
    refused(&number(&llama, "llama.attention.head_count", 0), &["`llama.attention.head_count`"]);
    refused(&number(&qwen35, "qwen35.ssm.time_step_rank", 0), &["`qwen35.ssm.inner_size`", "time_step_rank"]);
    refused(&number(&qwen35, "qwen35.ssm.group_count", 3), &["`qwen35.ssm.group_count` is 3"]);
    refused(&number(&qwen35, "qwen35.nextn_predict_layers", 3), &["`qwen35.nextn_predict_layers`"]);
    // Without the layer that looks further ahead, its tensors belong to nothing.
    refused(&number(&qwen35, "qwen35.nextn_predict_layers", 0), &["missing", "`blk.2."]);
    // The numbers are those of the model, and finite.
    let a = after(&qwen35, "qwen35.rope.freq_base") + 4;
    refused(
        &changed(&qwen35, a, &f32::NAN.to_le_bytes()),
        &["`qwen35.rope.freq_base` is not a finite number"],
    );
}

#[test]
fn tokenizers_that_are_not_known() {
    let llama = bytes_of("types.gguf");
    let pre = after(&llama, "tokenizer.ggml.pre") + 4 + 8;
    refused(
        &changed(&llama, pre, b"llama-xyz"),
        &["`tokenizer.ggml.pre` is \"llama-xyz\"", "--tokenizer FILE"],
    );
    let model = after(&llama, "tokenizer.ggml.model") + 4 + 8;
    refused(&changed(&llama, model, b"bert"), &["`tokenizer.ggml.model` is \"bert\"", "--tokenizer FILE"]);
    let eos = after(&llama, "tokenizer.ggml.eos_token_id") + 4;
    refused(&changed(&llama, eos, &[200, 1]), &["`tokenizer.ggml.eos_token_id` is 456"]);
    // A merge of tokens that are not there.
    let merge = after(&llama, "tokenizer.ggml.merges") + 4 + 4 + 8 + 8;
    refused(&changed(&llama, merge, b"Q Q"), &["`tokenizer.ggml.merges`"]);
    let types = after(&llama, "tokenizer.ggml.token_type") + 8;
    let fewer = changed(&llama, types, &[63]);
    refused(&fewer, &["model.gguf"]);
}

/// Random damage gives an error or a model, and never a panic.
#[test]
fn damaged_at_random() {
    for (seed, name) in FILES.iter().enumerate() {
        let (mut read_whole, mut refused) = (0, 0);
        let sound = bytes_of(name);
        // Most of a file is numbers: the header alone is damaged more often.
        let header = after(&sound, "blk.0.ffn_down.weight");
        for (part, times) in [(sound.len(), 60), (header, 240)] {
            damaged(&sound[..part], 31 + seed as u64, times, |bytes| {
                let (_folder, path) = file(&[bytes, &sound[part..]].concat());
                match read(&path) {
                    Ok(()) => read_whole += 1,
                    Err(error) => {
                        refused += 1;
                        assert!(error.to_string().contains("model.gguf"), "{error}");
                    }
                }
            });
        }
        assert!(refused > 100, "{name}: {read_whole} read, {refused} refused");
    }
}

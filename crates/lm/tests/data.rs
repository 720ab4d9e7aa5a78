//! From files of text to batches of tokens.

mod byte_level;
mod config;
mod loader;
mod needles;
mod order;
mod pieces;
mod prepare;
mod recall;
mod resume;
mod shards;
mod text;
mod tokenizer;

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use march_lm::Result;
use march_lm::data::{Meta, Options, PrepareOutcome, Status, prepare as run_prepare, train_tokenizer};
use march_lm::tokenizer::Tokenizer;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use crate::common::damage::damaged;

/// A folder that goes away, and a file in it.
fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    (folder, path)
}

fn write(path: &Path, bytes: impl AsRef<[u8]>) -> PathBuf {
    std::fs::write(path, bytes).unwrap();
    path.into()
}

/// Documents as JSON lines, with another key before the text and one behind it.
fn json_lines(documents: &[&str]) -> String {
    documents
        .iter()
        .enumerate()
        .map(|(id, text)| serde_json::json!({"id": id, "text": text, "more": {"text": 1}}).to_string() + "\n")
        .collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstandard(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 3).unwrap()
}

/// A Parquet file of rows, `group` of them in each group; a row without a text is null.
fn parquet_file(path: &Path, rows: &[Option<&[u8]>], group: usize, compression: Compression) -> PathBuf {
    let schema = "message table { REQUIRED INT32 id; OPTIONAL BYTE_ARRAY text (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, properties).unwrap();
    for rows in rows.chunks(group) {
        let mut group = writer.next_row_group().unwrap();
        let ids: Vec<i32> = (0..rows.len() as i32).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<parquet::data_type::Int32Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        let values: Vec<ByteArray> =
            rows.iter().flatten().map(|bytes| ByteArray::from(bytes.to_vec())).collect();
        let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
    path.into()
}

/// A tokenizer of 600 ids learnt from the built-in text.
fn learnt() -> &'static Tokenizer {
    static LEARNT: LazyLock<Tokenizer> = LazyLock::new(|| {
        let (_keep, folder) = folder();
        let file = write(&folder.join("text.txt"), march_lm::data::builtin());
        train_tokenizer(&[file], "text", 600, false, &mut |_, _, _| {}).unwrap()
    });
    &LEARNT
}

fn keep_going(_: &Status) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn prepare_all(tokenizer: &Tokenizer, files: &[PathBuf], output: &Path, options: &Options) -> Result<Meta> {
    match run_prepare(tokenizer, files, output, options, &mut keep_going)? {
        PrepareOutcome::Finished(meta, _) => Ok(meta),
        PrepareOutcome::Stopped(status) => panic!("stopped at {status:?}"),
    }
}

/// Every file of a folder by its name.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_string(), std::fs::read(&path).unwrap()))
        .collect()
}

/// All tokens of a folder.
fn tokens(folder: &Path) -> Vec<u32> {
    let shards = march_lm::data::Shards::open(folder).unwrap();
    let mut tokens = Vec::new();
    shards.read(0..shards.tokens(), &mut tokens).unwrap();
    tokens
}

/// What an error says, which must name all of these.
fn message<T: std::fmt::Debug>(result: Result<T>, names: &[&str]) -> String {
    let message = result.unwrap_err().to_string();
    for name in names {
        assert!(message.contains(name), "`{name}` is not in: {message}");
    }
    message
}

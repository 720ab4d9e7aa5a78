//! The files of data sets: where they are found, and their documents.

use std::fs;
use std::path::{Path, PathBuf};

use march_lab::eval::suite::source::{DataSet, documents, fits};
use serde_json::Value;

use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;

const ARC: DataSet = DataSet { hub: "allenai/ai2_arc", config: "ARC-Easy", split: "test", files: &[] };
const PIQA: DataSet =
    DataSet { hub: "baber/piqa", config: "", split: "validation", files: &["other/piqa_*"] };

fn write(root: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes).unwrap();
    path
}

/// The documents, or what is wrong.
fn read(file: &Path) -> Vec<std::result::Result<Value, String>> {
    documents(&[file.into()]).map(|(_, document)| document.map_err(|error| error.to_string())).collect()
}

#[test]
fn patterns_fit_names() {
    for (pattern, name, expected) in [
        ("a*c", "abc", true),
        ("a*c", "ac", true),
        ("a*c", "acd", false),
        ("test-*-of-*.jsonl", "test-00000-of-00002.jsonl", true),
        ("test-*-of-*.jsonl", "test-00000.jsonl", false),
        ("*", "x", true),
        ("*a*a", "a", false),
        ("a", "ab", false),
    ] {
        assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
    }
}

#[test]
fn every_layout_of_the_hub_is_found() {
    let layouts: [(DataSet, &[&str]); 17] = [
        (ARC, &["allenai/ai2_arc/ARC-Easy/test.jsonl"]),
        (ARC, &["allenai/ai2_arc/ARC-Easy/test-00000-of-00001.parquet"]),
        (
            ARC,
            &["ai2_arc/ARC-Easy/test-00000-of-00002.parquet", "ai2_arc/ARC-Easy/test-00001-of-00002.parquet"],
        ),
        (ARC, &["ai2_arc/data/ARC-Easy.jsonl.gz"]),
        (ARC, &["ai2_arc/ARC-Easy/ARC-Easy-test.json"]),
        (ARC, &["datasets--allenai--ai2_arc/snapshots/12ab/ARC-Easy/test-00000-of-00001.parquet"]),
        (PIQA, &["baber/piqa/piqa_validation.parquet"]),
        (PIQA, &["baber/piqa/data/validation-00000-of-00001.parquet"]),
        (PIQA, &["baber/piqa/validation.jsonl.zst"]),
        (PIQA, &["piqa/validation.jsonl"]),
        (PIQA, &["piqa/plain_text/validation.jsonl"]),
        (PIQA, &["piqa/default/validation/0000.parquet"]),
        (PIQA, &["piqa/default/validation/0000.parquet", "piqa/default/validation/0001.parquet"]),
        (PIQA, &["piqa/validation/part.json"]),
        (PIQA, &["piqa/piqa/validation-00000-of-00001.parquet"]),
        (PIQA, &["other/piqa_x.jsonl"]),
        (PIQA, &["other/piqa_a.jsonl", "other/piqa_b.jsonl"]),
    ];
    for (set, files) in layouts {
        let root = tempfile::tempdir().unwrap();
        let expected: Vec<PathBuf> = files.iter().map(|file| write(root.path(), file, "")).collect();
        for other in ["allenai/ai2_arc/test.jsonl", "baber/piqa/test.jsonl", "other/piqa_x.txt", "README.md"]
        {
            write(root.path(), other, "");
        }
        assert_eq!(set.find(root.path()).unwrap(), expected);
    }
    // Of the same documents in two formats only one counts.
    let root = tempfile::tempdir().unwrap();
    let lines = write(root.path(), "piqa/validation.jsonl", "");
    write(root.path(), "piqa/validation.parquet", "");
    assert_eq!(PIQA.find(root.path()).unwrap(), [lines]);
}

#[test]
fn what_is_missing_is_named_with_its_address() {
    let root = tempfile::tempdir().unwrap();
    let message = ARC.find(root.path()).unwrap_err().to_string();
    let first = root.path().join("allenai/ai2_arc/ARC-Easy/test.jsonl");
    for part in [first.to_str().unwrap(), "(ARC-Easy)", "https://huggingface.co/datasets/allenai/ai2_arc"] {
        assert!(message.contains(part), "{message}");
    }
    write(root.path(), "allenai/ai2_arc/ARC-Easy/test-00000-of-00002.parquet", "");
    let message = ARC.find(root.path()).unwrap_err().to_string();
    assert!(message.contains("one of 2 shards, but 1 are there"), "{message}");
    let message = ARC.find(&root.path().join("none")).unwrap_err().to_string();
    assert!(message.contains("is not a folder"), "{message}");
}

#[test]
fn lines_are_read_with_marks_blanks_and_errors() {
    let root = tempfile::tempdir().unwrap();
    let text = "\u{feff}{\"a\": 1}\r\n\r\n  \n{\"a\": \n{\"a\": \"naïve\"}";
    let file = write(root.path(), "x.jsonl", text);
    let places: Vec<u64> = documents(&[file.clone(), file.clone()]).map(|(place, _)| place.line).collect();
    assert_eq!(places, [1, 4, 5, 1, 4, 5]);
    let documents = read(&file);
    assert_eq!(documents[0], Ok(json!({"a": 1})));
    assert!(documents[1].as_ref().unwrap_err().contains("x.jsonl: line 4: is not JSON"), "{documents:?}");
    assert_eq!(documents[2], Ok(json!({"a": "naïve"})));
    let packed = write(root.path(), "x.jsonl.zst", zstd::encode_all(text.as_bytes(), 3).unwrap());
    assert_eq!(read(&packed).len(), 3);
    let whole = fs::read(&packed).unwrap();
    let cut = write(root.path(), "y.jsonl.zst", &whole[..whole.len() - 5]);
    assert!(read(&cut).pop().unwrap().unwrap_err().contains("could not read further"));
    assert!(read(&root.path().join("none.jsonl"))[0].is_err());
}

#[test]
fn labels_may_stand_in_a_file_of_their_own() {
    let root = tempfile::tempdir().unwrap();
    let file = write(root.path(), "valid.jsonl", "{\"a\": 1}\n\n{\"label\": 7}\n{\"a\": 3}\n{}\n");
    write(root.path(), "valid-labels.lst", "0\n1\n2\n");
    let documents = read(&file);
    assert_eq!(documents[0], Ok(json!({"a": 1, "label": "0"})));
    assert_eq!(documents[1], Ok(json!({"label": 7})));
    assert_eq!(documents[2], Ok(json!({"a": 3, "label": "2"})));
    assert!(documents[3].as_ref().unwrap_err().contains("line 5: has no label"));
}

#[test]
fn json_files_have_several_forms() {
    let root = tempfile::tempdir().unwrap();
    let two = vec![Ok(json!({"a": 1})), Ok(json!({"a": 2}))];
    for text in [
        r#"[{"a": 1}, {"a": 2}]"#,
        r#"{"version": 1, "data": [{"a": 1}, {"a": 2}]}"#,
        r#"{"0": {"a": 1}, "1": {"a": 2}}"#,
        "{\"a\": 1}\n{\"a\": 2}\n",
    ] {
        assert_eq!(read(&write(root.path(), "x.json", text)), two, "{text}");
    }
    assert_eq!(read(&write(root.path(), "x.json", r#"{"a": 1}"#)), two[..1]);
    let squad = r#"{"data": [{"title": "t", "paragraphs": [
        {"context": "c", "qas": [{"id": "1", "question": "q", "answers": [{"text": "x"}]}, {"question": "r"}]},
        {"context": "d"}]}, {"title": "u"}]}"#;
    let documents = read(&write(root.path(), "squad.json", squad));
    let first = json!({"id": "1", "question": "q", "answers": [{"text": "x"}], "context": "c"});
    assert_eq!(documents[0], Ok(first));
    assert_eq!(documents[1], Ok(json!({"question": "r", "context": "c"})));
    assert!(documents[2].as_ref().unwrap_err().contains("element 3: a paragraph has no `context`"));
    assert!(documents[3].as_ref().unwrap_err().contains("`paragraphs`"));
    for (text, expected) in
        [("3", "is a number"), ("[{\n\"a\" 1}]", "line 2: is not JSON"), ("", "is not JSON")]
    {
        let documents = read(&write(root.path(), "x.json", text));
        assert!(documents[0].as_ref().unwrap_err().contains(expected), "{documents:?}");
    }
}

#[test]
fn nested_columns_of_a_table_become_objects_and_lists() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("x.parquet");
    let schema = "message table {
        REQUIRED BYTE_ARRAY question (UTF8);
        OPTIONAL GROUP choices {
            OPTIONAL GROUP text (LIST) { REPEATED GROUP list { OPTIONAL BYTE_ARRAY element (UTF8); } }
            OPTIONAL INT64 count;
        }
        OPTIONAL DOUBLE score;
        OPTIONAL BYTE_ARRAY raw;
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let output = fs::File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(output, schema, Arc::default()).unwrap();
    let bytes = |texts: &[&str]| -> Vec<ByteArray> { texts.iter().map(|&text| text.into()).collect() };
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&bytes(&["p", "q", "中"]), None, None).unwrap();
    column.close().unwrap();
    // Two texts, an empty list, no choices at all.
    let mut column = group.next_column().unwrap().unwrap();
    let (defined, repeated) = ([4, 3, 2, 0], [0, 1, 0, 0]);
    column.typed::<ByteArrayType>().write_batch(&bytes(&["a"]), Some(&defined), Some(&repeated)).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&[5, -1], Some(&[2, 2, 0]), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<DoubleType>().write_batch(&[0.5, f64::NAN], Some(&[1, 1, 0]), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let raw = [ByteArray::from("text"), ByteArray::from(vec![0xFF, 1])];
    column.typed::<ByteArrayType>().write_batch(&raw, Some(&[1, 1, 0]), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    let expected = [
        json!({"question": "p", "choices": {"text": ["a", null], "count": 5}, "score": 0.5, "raw": "text"}),
        json!({"question": "q", "choices": {"text": [], "count": -1}, "score": null, "raw": [255, 1]}),
        json!({"question": "中", "choices": null, "score": null, "raw": null}),
    ];
    assert_eq!(read(&path), expected.map(Ok));
    let place = documents(std::slice::from_ref(&path)).nth(1).unwrap().0;
    assert_eq!((place.line_text(), &place.file), ("row 2".into(), &path));
    let bytes = fs::read(&path).unwrap();
    let cut = write(root.path(), "cut.parquet", &bytes[..bytes.len() / 2]);
    assert!(read(&cut)[0].as_ref().unwrap_err().contains("cut.parquet: is not a Parquet file"));
}

//! Reading documents.

use std::path::Path;

use march_lm::data::text::{self, Format, Record};
use parquet::basic::{Compression, GzipLevel, ZstdLevel};

use super::{damaged, folder, gzip, json_lines, message, parquet_file, write, zstandard};

const DOCUMENTS: [&str; 5] = ["First.\nOf two lines.", "", "naïve 中 🦀 \"quoted\" \\ \u{0}", "x", "last\n"];

/// All records of a file from a place on: documents, or what is wrong.
fn read_from(path: &Path, place: u64) -> march_lm::Result<Vec<std::result::Result<String, String>>> {
    let mut documents = text::open(path, "text")?;
    documents.skip_to(place)?;
    let mut records = Vec::new();
    while let Some(record) = documents.read()? {
        records.push(match record {
            Record::Document(text) => Ok(text),
            Record::Broken(error) => Err(error.to_string()),
        });
    }
    Ok(records)
}

fn rows() -> Vec<Option<&'static [u8]>> {
    DOCUMENTS.iter().map(|text| Some(text.as_bytes())).collect()
}

#[test]
fn every_format_gives_the_documents() {
    let (_keep, folder) = folder();
    let lines = json_lines(&DOCUMENTS);
    let (half, rest) = lines.as_bytes().split_at(lines.len() / 2);
    let mut files = vec![
        write(&folder.join("a.jsonl"), &lines),
        write(&folder.join("no-line-end.JSONL"), lines.trim_end()),
        write(&folder.join("spaces.jsonl"), format!("\u{feff}{}\r\n  \n", lines.replace('\n', "\r\n"))),
        write(&folder.join("a.jsonl.gz"), gzip(lines.as_bytes())),
        write(&folder.join("two.jsonl.gz"), [gzip(half), gzip(rest)].concat()),
        write(&folder.join("a.jsonl.zst"), zstandard(lines.as_bytes())),
        write(&folder.join("two.jsonl.zst"), [zstandard(half), zstandard(rest)].concat()),
    ];
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(GzipLevel::default()),
        Compression::ZSTD(ZstdLevel::default()),
    ];
    for (number, codec) in codecs.into_iter().enumerate() {
        files.push(parquet_file(&folder.join(format!("{number}.parquet")), &rows(), 2, codec));
    }
    for file in files {
        let records = read_from(&file, 0).unwrap();
        let expected: Vec<_> = DOCUMENTS.iter().map(|text| Ok(text.to_string())).collect();
        assert_eq!(records, expected, "{}", file.display());
        let mut documents = text::open(&file, "text").unwrap();
        for place in 0..=DOCUMENTS.len() {
            assert_eq!(read_from(&file, documents.place()).unwrap(), expected[place..], "{}", file.display());
            documents.read().unwrap();
        }
        assert!(documents.bytes() > 0);
    }
    let file = write(&folder.join("one.txt"), DOCUMENTS[0]);
    assert_eq!(read_from(&file, 0).unwrap(), [Ok(DOCUMENTS[0].to_string())]);
    assert_eq!(read_from(&file, 1).unwrap(), []);
}

#[test]
fn rows_are_found_in_any_group() {
    let (_keep, folder) = folder();
    let texts: Vec<String> = (0..1000).map(|i| format!("row {i}")).collect();
    let rows: Vec<Option<&[u8]>> = texts.iter().map(|text| Some(text.as_bytes())).collect();
    for group in [1000, 300, 7] {
        let file = parquet_file(&folder.join("t.parquet"), &rows, group, Compression::SNAPPY);
        for place in [0, 1, 6, 7, 8, 255, 256, 257, 300, 301, 599, 600, 700, 999, 1000] {
            let records = read_from(&file, place).unwrap();
            assert_eq!(records.len() as u64, 1000 - place);
            assert!(records.iter().zip(&texts[place as usize..]).all(|(a, b)| a.as_ref() == Ok(b)));
        }
        message(read_from(&file, 1001), &["1000 rows", "1001", "changed"]);
    }
}

#[test]
fn broken_records_say_where_and_why() {
    let (_keep, folder) = folder();
    let lines: [(&[u8], &[&str]); 9] = [
        (b"{\"text\": \"good\"}", &[]),
        (b"{\"text\": \"cut", &["not a JSON object", "column 13"]),
        (b"{\"other\": 1, \"b\": 2}", &["has no `text`", "`other`, `b`", "--text-column"]),
        (b"{\"text\": 5}", &["`text` is a number, not a text"]),
        (b"{\"text\": null}", &["`text` is null"]),
        (b"[\"text\"]", &["not a JSON object", "expected an object"]),
        (b"{\"text\": \"\xFF\"}", &["not UTF-8"]),
        (b"{\"text\": \"a\"} x", &["not a JSON object", "trailing"]),
        (b"{\"text\": \"\\ud800\"}", &["not a JSON object", "escape"]),
    ];
    let text: Vec<u8> = lines.iter().flat_map(|(line, _)| [line, &b"\n\n"[..]].concat()).collect();
    let file = write(&folder.join("lines.jsonl"), text);
    let records = read_from(&file, 0).unwrap();
    assert_eq!(records.len(), lines.len());
    for (i, ((_, names), record)) in lines.iter().zip(&records).enumerate() {
        match record {
            Ok(text) => assert_eq!((i, text.as_str()), (0, "good")),
            Err(message) => {
                let place = format!("lines.jsonl: line {}:", 2 * i + 1);
                assert!(message.contains(&place), "{message}");
                assert!(names.iter().all(|name| message.contains(name)), "{message}");
            }
        }
    }
    let rows: [Option<&[u8]>; 4] = [Some(b"good"), None, Some(b"\xC3\x28"), Some(b"too")];
    let file = parquet_file(&folder.join("rows.parquet"), &rows, 3, Compression::SNAPPY);
    let records = read_from(&file, 0).unwrap();
    assert_eq!((&records[0], &records[3]), (&Ok("good".into()), &Ok("too".into())));
    assert!(records[1].as_ref().unwrap_err().contains("rows.parquet: row 2: `text` is null"));
    assert!(records[2].as_ref().unwrap_err().contains("row 3: `text` is not UTF-8"));
    let file = write(&folder.join("latin.txt"), b"one\ntwo\nna\xEFve");
    let records = read_from(&file, 0).unwrap();
    assert!(records[0].as_ref().unwrap_err().contains("latin.txt: line 3: is not UTF-8"));
}

#[test]
fn files_that_cannot_be_read_say_so() {
    let (_keep, folder) = folder();
    message(Format::of(Path::new("a.csv")), &["a.csv", ".txt", ".jsonl", ".parquet"]);
    assert_eq!(Format::of(Path::new("a.b.TXT")).unwrap(), Format::Text);
    message(read_from(&folder.join("missing.jsonl"), 0), &["missing.jsonl", "does not exist"]);
    message(read_from(&folder, 0), &["is a folder", "*.jsonl"]);
    let lines = json_lines(&[&"long enough ".repeat(1000), "x", "y"]);
    for (name, bytes) in
        [("cut.jsonl.gz", gzip(lines.as_bytes())), ("cut.jsonl.zst", zstandard(lines.as_bytes()))]
    {
        let file = write(&folder.join(name), &bytes[..bytes.len() - 20]);
        message(read_from(&file, 0), &[name, "line ", "could not read further"]);
        let file = write(&folder.join(name), "not compressed");
        message(read_from(&file, 0), &[name]);
    }
    let file = write(&folder.join("few.jsonl"), "{\"text\": \"a\"}\n");
    message(read_from(&file, 5), &["few.jsonl", "1 lines", "changed"]);
    let file = parquet_file(&folder.join("t.parquet"), &rows(), 2, Compression::SNAPPY);
    message(text::open(&file, "body").map(|_| ()), &["no column `body`", "`id`, `text`", "--text-column"]);
    message(text::open(&file, "id").map(|_| ()), &["column `id` holds INT32"]);
    let bytes = std::fs::read(&file).unwrap();
    let file = write(&file, &bytes[..bytes.len() - 9]);
    message(read_from(&file, 0), &["t.parquet", "is not a Parquet file"]);
}

#[test]
fn damaged_files_never_panic() {
    let (_keep, folder) = folder();
    let lines = json_lines(&DOCUMENTS);
    let table =
        parquet_file(&folder.join("good.parquet"), &rows(), 2, Compression::ZSTD(ZstdLevel::default()));
    let plain = parquet_file(&folder.join("plain.parquet"), &rows(), 2, Compression::UNCOMPRESSED);
    for (name, bytes, times) in [
        ("d.jsonl", lines.clone().into_bytes(), 3000),
        ("d.jsonl.gz", gzip(lines.as_bytes()), 2000),
        ("d.jsonl.zst", zstandard(lines.as_bytes()), 2000),
        ("d.parquet", std::fs::read(table).unwrap(), 4000),
        ("d.parquet", std::fs::read(plain).unwrap(), 4000),
        ("d.txt", DOCUMENTS[2].as_bytes().to_vec(), 200),
    ] {
        damaged(&bytes, 11, times, |bytes| {
            let file = write(&folder.join(name), bytes);
            let _ = read_from(&file, 0);
            let _ = read_from(&file, 3);
        });
    }
}

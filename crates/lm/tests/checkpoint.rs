//! Checkpoint folders: what is written is read back, and what is damaged is refused with a reason.

mod fingerprint;
mod packed;

use std::borrow::Cow;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use half::{bf16, f16};
use march_lm::checkpoint::{Checkpoint, SHARD_BYTES, save};
use march_lm::disk::Mapped;
use march_lm::model::ModelConfig;
use march_lm::model::{Init, ParameterSpec};
use march_lm::{Error, Result};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

const CONFIG: &str = r#"{
    "model_type": "transformer", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2,
    "intermediate_size": 48, "norm_eps": 1e-6, "tie_word_embeddings": false, "initializer_range": 0.02,
    "rope_theta": 10000.0
}"#;

fn config() -> ModelConfig {
    ModelConfig::from_json(CONFIG, "test").unwrap()
}

fn spec(name: &str, shape: &[usize]) -> ParameterSpec {
    ParameterSpec { name: name.into(), shape: shape.into(), init: Init::Normal }
}

/// A folder with a configuration and these files.
fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("config.json"), CONFIG).unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

/// A safetensors file as the safetensors crate writes it.
fn file(tensors: &[(&str, Dtype, &[usize], &[u8])]) -> Vec<u8> {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

/// A safetensors file with any header.
fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Opens, checks and reads everything, as a loader does.
fn load(folder: &Path, parameters: &[ParameterSpec]) -> Result<Vec<Vec<f32>>> {
    let checkpoint = Checkpoint::open(folder)?;
    checkpoint.check(parameters)?;
    let take = |parameter| {
        let numbers = checkpoint.tensor(parameter)?.into_owned();
        checkpoint.release(parameter);
        Ok(numbers)
    };
    parameters.iter().map(take).collect()
}

/// The message of a refusal, which must be about a file and have these parts.
#[track_caller]
fn refused(folder: &Path, parameters: &[ParameterSpec], parts: &[&str]) {
    let error = load(folder, parameters).expect_err("it should be refused");
    let message = error.to_string();
    assert!(
        matches!(error, Error::File { .. } | Error::Damaged { .. }),
        "not an error about a file: {message}"
    );
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// As [`refused`], for a `model.safetensors` with one tensor `a` of shape [2].
#[track_caller]
fn refused_file(bytes: &[u8], parts: &[&str]) {
    let folder = folder(&[("model.safetensors", bytes)]);
    refused(folder.path(), &[spec("a", &[2])], parts);
    refused(folder.path(), &[spec("a", &[2])], &["model.safetensors"]);
}

/// Names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Parameters of several shapes, and numbers for them, with every special kind among them.
fn example() -> (Vec<ParameterSpec>, Vec<Vec<f32>>) {
    let parameters = vec![
        spec("model.embeddings.weight", &[7, 3]),
        spec("model.scalar", &[]),
        spec("model.conv", &[5, 1, 4]),
        spec("model.nothing", &[0, 4]),
        spec("a name with \"quotes\" and \u{e9}", &[3]),
        spec("lm_head.weight", &[64, 33]),
    ];
    let special =
        [f32::NAN, -0.0, f32::INFINITY, f32::MIN_POSITIVE / 8.0, f32::MAX, f32::from_bits(0xffc0_1234)];
    let numbers = parameters
        .iter()
        .map(|parameter| {
            (0..parameter.count()).map(|i| if i < 6 { special[i] } else { i as f32 * 0.37 }).collect()
        })
        .collect();
    (parameters, numbers)
}

#[test]
fn f32_comes_back_bit_for_bit() {
    let temporary = TempDir::new().unwrap();
    let path = temporary.path().join("runs/new/step-1");
    let (parameters, numbers) = example();
    save(&path, &config(), &parameters, SHARD_BYTES, |i| Ok(numbers[i].clone())).unwrap();
    assert_eq!(names(path.parent().unwrap()), ["step-1"]);
    assert_eq!(names(&path), ["checksums.json", "config.json", "model.safetensors"]);
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.config(), &config());
    checkpoint.check(&parameters).unwrap();
    for (parameter, numbers) in parameters.iter().zip(&numbers) {
        let read = checkpoint.tensor(parameter).unwrap();
        assert!(matches!(read, Cow::Borrowed(_)), "{} was copied", parameter.name);
        assert_eq!(bits(&read), bits(numbers), "{}", parameter.name);
        checkpoint.release(parameter);
        assert_eq!(bits(&read), bits(numbers), "{} after its release", parameter.name);
    }
}

#[test]
fn the_safetensors_crate_reads_what_is_written() {
    let temporary = TempDir::new().unwrap();
    let path = temporary.path().join("model");
    let (parameters, numbers) = example();
    save(&path, &config(), &parameters, SHARD_BYTES, |i| Ok(numbers[i].clone())).unwrap();
    let file = fs::read(path.join("model.safetensors")).unwrap();
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&file).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    let read = safetensors::SafeTensors::deserialize(&file).unwrap();
    assert_eq!(read.len(), parameters.len());
    for (parameter, numbers) in parameters.iter().zip(&numbers) {
        let view = read.tensor(&parameter.name).unwrap();
        assert_eq!((view.dtype(), view.shape()), (Dtype::F32, parameter.shape.as_slice()));
        assert_eq!(view.data(), bytes(numbers));
    }
}

#[test]
fn bf16_and_f16_are_widened() {
    let every: Vec<u16> = (0..=u16::MAX).collect();
    let data: Vec<u8> = every.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    // An odd count, so that the last block is not full.
    let shape = [data.len() / 2 - 5];
    let data = &data[..2 * shape[0]];
    let file = file(&[("b", Dtype::BF16, &shape, data), ("h", Dtype::F16, &shape, data)]);
    let folder = folder(&[("model.safetensors", &file)]);
    let read = load(folder.path(), &[spec("b", &shape), spec("h", &shape)]).unwrap();
    for (i, &bits) in every[..shape[0]].iter().enumerate() {
        for (found, expected) in
            [(read[0][i], bf16::from_bits(bits).to_f32()), (read[1][i], f16::from_bits(bits).to_f32())]
        {
            let equal = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
            assert!(equal, "{bits:#06x}: {found} instead of {expected}");
        }
    }
}

#[test]
fn shards_are_cut_before_the_limit() {
    let temporary = TempDir::new().unwrap();
    let path = temporary.path().join("sharded");
    let parameters = vec![
        spec("a", &[4]),
        spec("b", &[4]),
        spec("c", &[2]),
        spec("large", &[3, 5]),
        spec("d", &[1]),
        spec("e", &[7]),
    ];
    let numbers: Vec<Vec<f32>> =
        parameters.iter().enumerate().map(|(i, p)| vec![i as f32 + 0.5; p.count()]).collect();
    let mut asked = Vec::new();
    save(&path, &config(), &parameters, 32, |i| {
        asked.push(i);
        Ok(numbers[i].clone())
    })
    .unwrap();
    assert_eq!(asked, [0, 1, 2, 3, 4, 5]);
    let shard = |n| format!("model-{n:05}-of-00004.safetensors");
    let [list, config_file, index] =
        ["checksums.json", "config.json", "model.safetensors.index.json"].map(String::from);
    assert_eq!(names(&path), [list, config_file, shard(1), shard(2), shard(3), shard(4), index]);
    let index: Value =
        serde_json::from_str(&fs::read_to_string(path.join("model.safetensors.index.json")).unwrap())
            .unwrap();
    // a + b are 32 bytes, large is 60 alone, d + e are 32.
    let weight_map = json!({
        "a": shard(1), "b": shard(1), "c": shard(2), "large": shard(3), "d": shard(4), "e": shard(4),
    });
    assert_eq!(index, json!({ "metadata": { "total_size": 132 }, "weight_map": weight_map }));
    assert_eq!(load(&path, &parameters).unwrap(), numbers);
}

#[test]
fn unaligned_numbers_are_read() {
    let numbers = [1.5f32, -2.25];
    let mut copied = 0;
    for padding in 0..8 {
        let header =
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#.to_string() + &" ".repeat(padding);
        let folder = folder(&[("model.safetensors", &raw_file(&header, &bytes(&numbers)))]);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let read = checkpoint.tensor(&spec("a", &[2])).unwrap();
        assert_eq!(*read, numbers);
        copied += matches!(read, Cow::Owned(_)) as usize;
    }
    assert_eq!(copied, 6);
}

#[test]
fn tensors_that_nobody_asked_for_are_refused() {
    let eight = [0; 8];
    let file = file(&[
        ("z", Dtype::I64, &[1], &eight),
        ("a", Dtype::F32, &[2], &eight),
        ("b", Dtype::F32, &[2], &eight),
    ]);
    let folder = folder(&[("model.safetensors", &file), ("tokenizer.json", b"{}"), (".x.partial-1", b"")]);
    refused(
        folder.path(),
        &[spec("a", &[2])],
        &["model.safetensors", "2 tensors", "`b`, `z`;", "config.json"],
    );
    refused(folder.path(), &[], &["3 tensors", "`a`, `b`, `z`;"]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    checkpoint.release(&spec("not there", &[]));
}

#[test]
fn folders_that_are_no_checkpoints_are_refused() {
    let temporary = TempDir::new().unwrap();
    let path = temporary.path();
    refused(&path.join("nowhere"), &[], &["nowhere", "does not exist"]);
    fs::write(path.join("file"), "").unwrap();
    refused(&path.join("file"), &[], &["file", "is not a folder"]);
    refused(path, &[], &["config.json", "is missing"]);
    refused(folder(&[]).path(), &[], &["model.safetensors", "model.safetensors.index.json", "neither"]);
    fs::write(path.join("config.json"), "{").unwrap();
    let error = Checkpoint::open(path).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
}

#[test]
fn damaged_files_are_refused() {
    let entry = |name: &str, dtype: &str, shape: &str, offsets: &str| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let header = |entries: &[String]| format!("{{{}}}", entries.join(","));
    let one = |dtype: &str, shape: &str, offsets: &str| header(&[entry("a", dtype, shape, offsets)]);
    let good = one("F32", "[2]", "[0,8]");
    assert!(
        load(folder(&[("model.safetensors", &raw_file(&good, &[0; 8]))]).path(), &[spec("a", &[2])]).is_ok()
    );

    refused_file(b"", &["cut short", "0 bytes in all"]);
    refused_file(b"1234567", &["cut short", "7 bytes in all"]);
    refused_file(&[9, 0, 0, 0, 0, 0, 0, 0, b'{', b'}'], &["cut short", "header of 9 bytes", "only 2"]);
    refused_file(&[255; 20], &["header of 18446744073709551615 bytes"]);
    refused_file(&raw_file(&good, &[0; 7]), &["cut short", "8 bytes", "has 7"]);
    refused_file(&raw_file(&good, &[0; 9]), &["longer", "71 bytes", "instead of 70"]);
    refused_file(&raw_file("{\"a\":", &[]), &["not JSON"]);
    refused_file(&raw_file("\u{0}\u{1}", &[]), &["not JSON"]);
    refused_file(&raw_file("[1, 2]", &[]), &["not JSON"]);
    refused_file(&raw_file(r#"{"a":{"dtype":"F32"}}"#, &[]), &["tensor `a`", "shape"]);
    refused_file(&raw_file(&one("F32", "[-2]", "[0,8]"), &[0; 8]), &["tensor `a`"]);
    refused_file(&raw_file(&one("F32", "[2]", "[0,8,9]"), &[0; 8]), &["tensor `a`"]);

    // Sizes that do not match, numbers that run backwards or beyond what can be counted.
    refused_file(
        &raw_file(&one("F32", "[2]", "[0,12]"), &[0; 12]),
        &["`a`", "F32", "[2]", "8 bytes", "0 to 12"],
    );
    refused_file(&raw_file(&one("F32", "[2]", "[8,0]"), &[0; 8]), &["`a`", "8 to 0"]);
    let most = u64::MAX.to_string();
    refused_file(
        &raw_file(&one("F32", &format!("[{most},{most}]"), "[0,8]"), &[0; 8]),
        &["`a`", "no such number"],
    );
    let far = format!("[{},{most}]", u64::MAX - 8);
    refused_file(&raw_file(&one("F32", "[2]", &far), &[0; 8]), &["`a`", "begins at offset"]);
    // Tensors end to end up to the largest number, far beyond the file.
    let eighth = 1u64 << 60;
    let many: Vec<_> = (0..15)
        .map(|i| {
            entry(
                &format!("t{i}"),
                "U8",
                &format!("[{eighth}]"),
                &format!("[{},{}]", i * eighth, (i + 1) * eighth),
            )
        })
        .chain([entry("a", "U8", &format!("[{}]", eighth - 1), &format!("[{},{most}]", 15 * eighth))])
        .collect();
    refused_file(&raw_file(&header(&many), &[0; 8]), &["cut short", &most]);

    let two = |first: &str, second: &str| {
        header(&[entry("a", "F32", "[2]", first), entry("b", "F32", "[2]", second)])
    };
    refused_file(
        &raw_file(&two("[0,8]", "[4,12]"), &[0; 12]),
        &["`b`", "offset 4", "`a` ends at 8", "overlap"],
    );
    refused_file(&raw_file(&two("[0,8]", "[0,8]"), &[0; 8]), &["overlap"]);
    refused_file(&raw_file(&two("[0,8]", "[12,20]"), &[0; 20]), &["`b`", "offset 12", "belong to no tensor"]);
    refused_file(&raw_file(&two("[4,12]", "[12,20]"), &[0; 20]), &["`a`", "offset 4", "belong to no tensor"]);
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let one = |dtype, shape: &[usize]| file(&[("a", dtype, shape, &[0; 8])]);
    refused_file(&one(Dtype::I64, &[1]), &["`a`", "[1]", "[2]"]);
    refused_file(&one(Dtype::I32, &[2]), &["`a`", "I32", "F32, BF16 and F16"]);
    refused_file(&one(Dtype::F32, &[1, 2]), &["`a`", "has shape [1, 2]", "requires [2]"]);
    let unknown = r#"{"a":{"dtype":"Q4_K","shape":[2],"data_offsets":[0,8]}}"#;
    refused_file(&raw_file(unknown, &[0; 8]), &["`a`", "Q4_K", "F32, BF16 and F16"]);

    let folder = folder(&[("model.safetensors", &one(Dtype::F32, &[2]))]);
    let ask = |names: &[&str]| names.iter().map(|name| spec(name, &[2])).collect::<Vec<_>>();
    refused(folder.path(), &ask(&["a", "b"]), &["model.safetensors", "tensor `b` is missing"]);
    refused(folder.path(), &ask(&["a", "b", "c"]), &["2 of 3 tensors are missing: `b`, `c`;"]);
    refused(folder.path(), &ask(&["a", "b", "c", "d", "e", "f"]), &["5 of 6", "`b`, `c`, `d` and 2 others"]);
    let error = Checkpoint::open(folder.path()).unwrap().tensor(&spec("b", &[2])).unwrap_err().to_string();
    assert!(error.contains("tensor `b` is missing"), "{error}");
}

#[test]
fn wrong_indices_are_refused() {
    let eight = [0; 8];
    let a = file(&[("a", Dtype::F32, &[2], &eight)]);
    let b = file(&[("b", Dtype::F32, &[2], &eight)]);
    let both = file(&[("a", Dtype::F32, &[2], &eight), ("b", Dtype::F32, &[2], &eight)]);
    let asked = [spec("a", &[2]), spec("b", &[2])];
    let index = |second: &str| json!({ "weight_map": { "a": "1.safetensors", "b": second } }).to_string();
    let check = |first: &[u8], second: &[u8], index: &str, parts: &[&str]| {
        let files: [(&str, &[u8]); 3] = [
            ("1.safetensors", first),
            ("2.safetensors", second),
            ("model.safetensors.index.json", index.as_bytes()),
        ];
        refused(folder(&files).path(), &asked, parts);
    };
    let good = folder(&[
        ("1.safetensors", a.as_slice()),
        ("2.safetensors", b.as_slice()),
        ("model.safetensors.index.json", index("2.safetensors").as_bytes()),
    ]);
    assert!(load(good.path(), &asked).is_ok());

    check(&a, &b, &index("3.safetensors"), &["index.json", "`3.safetensors`", "`b`", "is missing"]);
    for outside in ["../2.safetensors", "/2.safetensors", "", ".", ".."] {
        check(&a, &b, &index(outside), &["index.json", "`b`", "not a file name in the folder"]);
    }
    check(&a, &b, &index("1.safetensors"), &["index.json", "`b`", "`1.safetensors`", "does not have it"]);
    check(&both, &b, &index("2.safetensors"), &["2.safetensors", "`b`", "1.safetensors", "as well"]);
    check(&a, &a, &index("2.safetensors"), &["2.safetensors", "`a`", "1.safetensors", "as well"]);
    check(&a, &b[..20], &index("2.safetensors"), &["2.safetensors", "cut short"]);
    check(&a, &b, "{", &["index.json", "not an index"]);
    check(&a, &b, "{}", &["index.json", "weight_map"]);
    check(&a, &b, r#"{"weight_map":{"a":"1.safetensors"}}"#, &["index.json", "tensor `b` is missing"]);
    check(&a, &b, r#"{"weight_map":{}}"#, &["index.json", "2 of 2 tensors are missing"]);
}

#[test]
fn a_folder_with_something_in_it_is_not_touched() {
    let temporary = TempDir::new().unwrap();
    let (parameters, numbers) = example();
    let try_save = |path: &Path| save(path, &config(), &parameters, SHARD_BYTES, |i| Ok(numbers[i].clone()));
    let full = temporary.path().join("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("notes.txt"), "mine").unwrap();
    let plain = temporary.path().join("plain");
    fs::write(&plain, "mine").unwrap();
    for path in [&full, &plain] {
        let message = try_save(path).unwrap_err().to_string();
        assert!(message.contains("already exists; choose another folder or delete it"), "{message}");
        assert!(message.contains(path.to_str().unwrap()), "{message}");
    }
    assert_eq!(names(&full), ["notes.txt"]);
    assert_eq!(fs::read_to_string(full.join("notes.txt")).unwrap(), "mine");
    assert_eq!(fs::read_to_string(&plain).unwrap(), "mine");
    assert_eq!(names(temporary.path()), ["full", "plain"]);
    for path in ["/", ".."] {
        assert!(try_save(Path::new(path)).is_err());
    }

    let empty = temporary.path().join("empty");
    fs::create_dir(&empty).unwrap();
    try_save(&empty).unwrap();
    assert_eq!(load(&empty, &parameters).unwrap().len(), parameters.len());
    assert!(try_save(&empty).is_err());
    assert_eq!(names(temporary.path()), ["empty", "full", "plain"]);
}

#[test]
fn what_fails_leaves_nothing_behind() {
    let temporary = TempDir::new().unwrap();
    let path = temporary.path().join("step-7");
    let parameters = [spec("a", &[2]), spec("b", &[2]), spec("c", &[2])];
    let fail = |parameters: &[ParameterSpec], last: fn() -> Result<Vec<f32>>| {
        let result = save(&path, &config(), parameters, 8, |i| if i < 2 { Ok(vec![0.0; 2]) } else { last() });
        let message = result.unwrap_err().to_string();
        assert_eq!(names(temporary.path()), [""; 0], "after: {message}");
        message
    };
    assert_eq!(fail(&parameters, || Err(Error::Request("out of numbers".into()))), "out of numbers");
    let short = fail(&parameters, || Ok(vec![0.0; 3]));
    assert!(
        short.contains("`c`") && short.contains("2 numbers") && short.contains("3 were given"),
        "{short}"
    );
    let twice = fail(&[spec("a", &[2]), spec("a", &[2])], || Ok(vec![]));
    assert!(twice.contains("`a` would be written twice"), "{twice}");
    let large = fail(&[spec("a", &[usize::MAX, 2])], || Ok(vec![]));
    assert!(large.contains("too large"), "{large}");

    let panicked =
        catch_unwind(AssertUnwindSafe(|| save(&path, &config(), &parameters, 8, |_| panic!("on purpose"))));
    assert!(panicked.is_err());
    assert_eq!(names(temporary.path()), [""; 0]);

    // What an earlier process left under the same name is replaced.
    let leftover = temporary.path().join(format!(".step-7.partial-{}", std::process::id()));
    fs::create_dir(&leftover).unwrap();
    fs::write(leftover.join("model.safetensors"), "half").unwrap();
    save(&path, &config(), &parameters, SHARD_BYTES, |_| Ok(vec![1.0; 2])).unwrap();
    assert_eq!(names(temporary.path()), ["step-7"]);
    assert_eq!(names(&path), ["checksums.json", "config.json", "model.safetensors"]);
}

#[test]
fn every_cut_of_a_file_is_refused() {
    let temporary = TempDir::new().unwrap();
    let path = temporary.path().join("model");
    let (parameters, numbers) = example();
    let (parameters, numbers) = (&parameters[..5], &numbers[..5]);
    save(&path, &config(), parameters, SHARD_BYTES, |i| Ok(numbers[i].clone())).unwrap();
    let model = path.join("model.safetensors");
    let whole = fs::read(&model).unwrap();
    for cut in 0..whole.len() {
        fs::write(&model, &whole[..cut]).unwrap();
        refused(&path, parameters, &["model.safetensors"]);
    }
    fs::write(&model, &whole).unwrap();
    load(&path, parameters).unwrap();
}

#[test]
fn no_flipped_bit_of_a_header_panics() {
    let data = [0; 16];
    let good = file(&[("a", Dtype::F32, &[2], &data[..8]), ("bb", Dtype::BF16, &[2, 2], &data[..8])]);
    let parameters = [spec("a", &[2]), spec("bb", &[2, 2])];
    let folder = folder(&[("model.safetensors", &good)]);
    let model = folder.path().join("model.safetensors");
    let header_end = good.len() - data.len();
    let mut refusals = 0;
    for bit in 0..header_end * 8 {
        let mut flipped = good.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        fs::write(&model, &flipped).unwrap();
        match load(folder.path(), &parameters) {
            Ok(numbers) => assert_eq!([numbers[0].len(), numbers[1].len()], [2, 4]),
            Err(error) => {
                refusals += 1;
                assert!(matches!(error, Error::File { .. } | Error::Damaged { .. }), "{error}");
            }
        }
    }
    // What may pass is a flip in the padding (space to tab and the like).
    assert!(refusals > header_end * 8 * 9 / 10, "{refusals} of {}", header_end * 8);
}

#[test]
fn a_mapped_file_reads_as_it_is() {
    let temporary = TempDir::new().unwrap();
    let path = temporary.path().join("file");
    assert!(Mapped::open(&path).is_err());
    assert!(Mapped::open(temporary.path()).is_err());
    fs::write(&path, b"").unwrap();
    let empty = Mapped::open(&path).unwrap();
    assert_eq!(empty.bytes(), b"");
    empty.release(0..100);
    let data: Vec<u8> = (0..40_000u32).map(|i| (i * 7 % 251) as u8).collect();
    fs::write(&path, &data).unwrap();
    let mapped = Mapped::open(&path).unwrap();
    let inverted = std::ops::Range { start: 9000, end: 10 };
    for range in
        [0..40_000, 1..39_999, 4096..8192, 100..200, 39_000..1_000_000, usize::MAX - 1..usize::MAX, inverted]
    {
        mapped.release(range);
        assert_eq!(mapped.bytes(), data);
    }
    assert_eq!(mapped.f32s(4..12).unwrap().len(), 2);
    assert_eq!(mapped.f32s(4..12).unwrap()[0].to_bits(), u32::from_le_bytes(data[4..8].try_into().unwrap()));
    assert!(mapped.f32s(5..13).is_none());
    assert!(mapped.f32s(4..11).is_none());
    assert!(mapped.f32s(39_996..40_004).is_none());
}

#[cfg(target_os = "linux")]
#[test]
fn released_pages_leave_the_memory() {
    /// Bytes of the files below a folder that the process holds in memory.
    fn held(folder: &Path) -> usize {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let below = format!(" {}/", folder.display());
        // A mapping's first line has its addresses, FROM-TO, and its file; `Rss:` follows.
        let (mut inside, mut kilobytes) = (false, 0);
        for line in maps.lines() {
            if let Some(number) = line.strip_prefix("Rss:") {
                let number = number.split_whitespace().next().unwrap();
                kilobytes += if inside { number.parse::<usize>().unwrap() } else { 0 };
            } else if line.contains('-') {
                inside = line.contains(&below);
            }
        }
        kilobytes * 1024
    }
    const COUNT: usize = 8 << 20;
    let temporary = TempDir::new().unwrap();
    let path = temporary.path().join("model");
    let parameter = spec("a", &[COUNT]);
    save(&path, &config(), std::slice::from_ref(&parameter), SHARD_BYTES, |_| Ok(vec![1.0; COUNT])).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let sum: f32 = checkpoint.tensor(&parameter).unwrap().iter().sum();
    assert_eq!(sum, COUNT as f32);
    let before = held(&path);
    checkpoint.release(&parameter);
    let after = held(&path);
    assert!(after + COUNT * 3 < before, "{before} bytes before, {after} after");
    assert_eq!(checkpoint.tensor(&parameter).unwrap()[COUNT - 1], 1.0);
}

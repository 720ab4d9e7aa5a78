//! Generation from the command line: prompts, seeds, chats, and which anchors a text reads.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use safetensors::SafeTensors;
use serde_json::Value;

use crate::common::writing::{start, trained, with_input};
use crate::common::{ok, refused, text};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

#[test]
fn prompts_from_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let prompt = "Alice was beginning to get very tired of sitting by her sister.\n";
    let file = folder.path().join("prompt.txt");
    fs::write(&file, prompt).unwrap();
    let run = |flags: &[&str], input: &str| {
        let mut arguments = vec!["generate", "--model", text(&model), "--max-tokens", "60"];
        arguments.extend(["--temperature", "1.2", "--top-p", "1", "--top-k", "40"]);
        arguments.extend(["--repetition-penalty", "1.1"]);
        arguments.extend(flags);
        with_input(&arguments, input)
    };
    let (written, said) = run(&["--prompt", prompt], "");
    assert!(written.chars().count() > 10, "{written:?}");
    assert!(said.contains("read     64 tokens") && said.contains("tokens/s"), "{said}");
    assert!(said.contains("written  60 tokens") && said.contains("--max-tokens"), "{said}");
    assert!(said.contains("memory   124 tokens, 5 of 5 anchors, "), "{said}");
    assert_eq!(run(&["--prompt-file", text(&file)], "").0, written);
    assert_eq!(run(&[], prompt).0, written);
    assert_ne!(run(&["--seed", "1"], prompt).0, written);
    // Another policy for the same checkpoint.
    let (_, said) = run(&["--interval", "16", "--retention", "fenwick"], prompt);
    assert!(said.contains("3 of 7 anchors"), "{said}");
    // A stop string, and nothing after it.
    let at = written.char_indices().nth(8).unwrap().0;
    let stop: String = written[at..].chars().take(3).collect();
    let (short, said) = run(&["--stop", &stop.replace('\\', "\\\\")], prompt);
    assert_eq!(short, written[..written.find(&stop).unwrap()]);
    assert!(said.contains("stop string"), "{said}");
    // An empty prompt starts a new text.
    let (_, said) = run(&["--prompt", ""], "");
    assert!(said.contains("read     1 tokens"), "{said}");

    let refuse = |flags: &[&str]| refused(&[&["generate", "--model", text(&model)], flags].concat());
    assert!(refuse(&["--prompt", "a", "--top-p", "0"]).contains("top-p is 0"));
    assert!(refuse(&["--prompt", "a", "--temperature", "-1"]).contains("temperature is -1"));
    for flag in ["--seed", "--max-tokens", "--top-k", "--penalty-window"] {
        let errors = refuse(&["--prompt", "a", flag, "-1"]);
        assert!(errors.contains("'-1'") && errors.contains("a whole number from 0 to "), "{errors}");
    }
    assert!(refuse(&["--prompt", "a", "--top-p", "half"]).contains("it must be a number"));
    assert!(refuse(&["--prompt", "a", "--prompt-file", "b"]).contains("cannot be used"));
    assert!(refuse(&["--prompt-file", "nowhere.txt"]).contains("nowhere.txt: could not read"));
    fs::write(&file, [&prompt.as_bytes()[..7], &[0xFF]].concat()).unwrap();
    let errors = refuse(&["--prompt-file", text(&file)]);
    assert!(errors.contains("prompt.txt: the text is not UTF-8: byte 7 "), "{errors}");
    assert!(refuse(&["--prompt-file", text(folder.path())]).contains("is a folder"));
    let golden = golden("march");
    let errors = refused(&["generate", "--model", text(&golden), "--prompt", "a"]);
    assert!(errors.contains("no `tokenizer.json`") && errors.contains("vocabulary of 61"), "{errors}");
    let errors = refused(&["generate", "--model", text(&golden), "--prompt", "a", "--tokenizer", "bytes"]);
    assert!(errors.contains("belongs to another model"), "{errors}");
}

#[test]
#[cfg(unix)]
fn an_interrupt_keeps_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let mut child =
        start(&["generate", "--model", text(&model), "--prompt", "A", "--max-tokens", "100000000"]);
    let mut first = [0; 64];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(130), "{said}");
    assert!(said.contains("; stopped") && said.contains("memory "), "{said}");
}

#[test]
fn a_chat_is_one_text() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let common = ["--model", text(&model), "--temperature", "0", "--max-tokens", "30"];
    let generate = |prompt: &str, stop: &[&str]| {
        let mut arguments = vec!["generate", "--prompt", prompt];
        arguments.extend(common);
        arguments.extend(stop);
        with_input(&arguments, "").0
    };
    let chat = |input: &str, flags: &[&str]| {
        let mut arguments = vec!["chat", "--user-prefix", r"\nQ: ", "--assistant-prefix", r"\nA:"];
        arguments.extend(common);
        arguments.extend(flags);
        with_input(&arguments, input)
    };
    let first = generate("\nQ: Who are you?\nA:", &[]);
    assert!(first.is_ascii() && first.len() == 30, "{first:?}");
    let second = generate(&format!("\nQ: Who are you?\nA:{first}\nQ: And she?\nA:"), &[]);
    let (said, aside) = chat("Who are you?\n/memory\nAnd she?\n/memory\n/quit\nnever\n", &[]);
    assert_eq!(said, format!("{first}\n{second}\n"));
    assert!(aside.contains("49 tokens, 2 of 2 anchors, ") && aside.contains("94 tokens, 3 of 3"), "{aside}");

    // An answer that ends at a stop string: the next turn continues after the text that was shown.
    let stop = &first[12..15];
    let flags = ["--stop", stop];
    let short = generate("\nQ: Who are you?\nA:", &flags);
    assert_eq!(short, first[..first.find(stop).unwrap()]);
    let second = generate(&format!("\nQ: Who are you?\nA:{short}\nQ: And she?\nA:"), &flags);
    assert_eq!(chat("Who are you?\nAnd she?\n", &flags).0, format!("{short}\n{second}\n"));

    // Turns that were undone or forgotten have no effect.
    let (said, aside) = chat("Else\n/undo\nWho are you?\n/reset\nWho are you?\n/undo\n/undo\n/what\n", &[]);
    let other = generate("\nQ: Else\nA:", &[]);
    assert_eq!(said, format!("{other}\n{first}\n{first}\n"));
    assert!(aside.contains("0 tokens, 0 of 0 anchors") && aside.contains("no turn to undo"), "{aside}");
    assert!(aside.contains("unknown command /what"), "{aside}");
    assert!(chat("/help\n/save\n", &[]).1.contains("/save FILE"));
}

/// Bytes of base64.
fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits: Vec<u32> = text.chars().filter_map(|c| DIGITS.find(c)).map(|d| d as u32).collect();
    let bytes = digits.chunks(4).flat_map(|group| {
        let bits = (0..4).fold(0, |bits, i| bits << 6 | group.get(i).copied().unwrap_or(0));
        bits.to_be_bytes()[1..group.len()].to_vec()
    });
    bytes.collect()
}

fn shares(text: &Value) -> Vec<f64> {
    let bytes = base64(text.as_str().unwrap());
    bytes.chunks(2).map(|two| f64::from(u16::from_le_bytes([two[0], two[1]])) / 65535.0).collect()
}

/// The weights that `march logits --trace` writes, by layer: [tokens, heads, anchors].
fn traced(model: &Path, folder: &Path, ids: &[u8], flags: &[&str]) -> BTreeMap<usize, Vec<f32>> {
    let (tokens, output) = (folder.join("tokens.json"), folder.join("trace.safetensors"));
    fs::write(&tokens, serde_json::to_string(ids).unwrap()).unwrap();
    let mut arguments = vec!["logits", "--model", text(model), "--tokens", text(&tokens)];
    arguments.extend(["--output", text(&output), "--trace"]);
    arguments.extend(flags);
    ok(&arguments);
    let bytes = fs::read(&output).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .filter_map(|(name, view)| Some((name.strip_prefix("routing_weights.")?.parse().ok()?, view)))
        .map(|(layer, view)| {
            let numbers = view.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            (layer, numbers.collect())
        })
        .collect()
}

#[test]
fn a_page_of_routing() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let (file, page) = (folder.path().join("text.txt"), folder.path().join("page.html"));
    let content = "“Curiouser and curiouser!” cried Alice </script> ".repeat(5);
    fs::write(&file, &content).unwrap();
    for (flags, interval) in [
        (&[][..], 24),
        (&["--routing-top-k", "2", "--interval", "7"], 7),
        (&["--interval", "16", "--retention", "fenwick"], 16),
    ] {
        let mut arguments = vec!["inspect", "routing", "--model", text(&model), "--text", text(&file)];
        arguments.extend(["--html", text(&page), "--heads"]);
        arguments.extend(flags);
        let said = ok(&arguments);
        let tokens = content.len();
        assert!(said.contains(&format!("{tokens} tokens, {} anchors", (tokens - 1) / interval)), "{said}");
        assert!(said.contains("  head 1") && said.contains("urious"), "{said}");
        let html = fs::read_to_string(&page).unwrap();
        let data = html.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
        let data: Value = serde_json::from_str(data).unwrap();
        let pieces: Vec<&str> =
            data["pieces"].as_array().unwrap().iter().map(|p| p.as_str().unwrap()).collect();
        assert_eq!((pieces.len(), pieces.concat()), (tokens, content.clone()));
        let boundaries: Vec<u64> =
            data["boundaries"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap()).collect();
        assert!(boundaries.iter().zip(1..).all(|(&b, m)| b == m * interval as u64), "{boundaries:?}");
        let want = traced(&model, folder.path(), content.as_bytes(), flags);
        let (layers, heads) = (data["weights"].as_array().unwrap(), data["heads"].as_u64().unwrap() as usize);
        assert_eq!((layers.len(), heads), (2, 2));
        for (layer, weights) in layers.iter().enumerate() {
            let (weights, nulls) = (shares(weights), shares(&data["nulls"][layer]));
            let (mut at, all) = (0, tokens / interval);
            for head in 0..heads {
                for token in 0..tokens {
                    let before = token / interval;
                    let row = &weights[at..at + before];
                    at += before;
                    let sum = row.iter().sum::<f64>() + nulls[head * tokens + token];
                    let rounding = (before + 1) as f64 / 65535.0;
                    assert!(
                        (sum - 1.0).abs() <= rounding,
                        "layer {layer}, head {head}, token {token}: {sum}"
                    );
                    for (m, got) in row.iter().enumerate() {
                        let want = f64::from(want[&layer][(token * heads + head) * all + m]);
                        assert!((got - want).abs() < 2e-5, "token {token}, anchor {m}: {got}, {want}");
                    }
                }
            }
            assert_eq!((at, nulls.len()), (weights.len(), heads * tokens));
        }
    }
    // A text that is too short for an anchor, and a model without anchors.
    fs::write(&file, "short").unwrap();
    let said =
        ok(&["inspect", "routing", "--model", text(&model), "--text", text(&file), "--html", text(&page)]);
    assert!(
        said.contains("too short") && fs::read_to_string(&page).unwrap().contains(r#""s","h","o""#),
        "{said}"
    );
    let gdn = folder.path().join("gdn");
    ok(&["init", "--config", "tiny/gdn", "--output", text(&gdn)]);
    let errors = refused(&["inspect", "routing", "--model", text(&gdn), "--text", text(&file)]);
    assert!(errors.contains("does not route"), "{errors}");
}

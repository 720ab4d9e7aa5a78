use march_lm::Config;
use march_lm::config::nearest;

#[test]
fn nearest_three_presets() {
    for (name, presets) in [
        ("tiny/marhc", "tiny/march demo/march tiny/gdn"),
        ("march", "paper/march demo/march tiny/march"),
        ("configs/tiny/gdm.toml", "tiny/gdn"),
        ("tiny/log_linear", "tiny/log-linear"),
    ] {
        let error = Config::load(name).unwrap_err().to_string();
        let lines: Vec<&str> = error.lines().collect();
        assert!(lines.len() == 5 && lines[0].ends_with("the nearest presets are"), "{error}");
        let found: Vec<&str> = lines[1..4].iter().map(|line| line.trim()).collect();
        assert!(found.join(" ").starts_with(presets), "{error}");
    }
}

#[test]
fn nearest_names() {
    let keys = ["num_heads", "num_v_heads", "head_dim", "anchor_interval", "routing_top_k"];
    for (name, expected) in [
        ("num_head", Some("num_heads")),
        ("Num-Heads", Some("num_heads")),
        ("heads", Some("num_heads")),
        ("num_v_head", Some("num_v_heads")),
        ("anchor_intervall", Some("anchor_interval")),
        ("interval", Some("anchor_interval")),
        ("top_k", Some("routing_top_k")),
        ("learning_rate", None),
        ("num_haeds", Some("num_heads")),
        ("mun_haeds", Some("num_heads")),
        ("mum_haedzx", None),
        ("x", None),
        ("", None),
    ] {
        assert_eq!(nearest(name, keys), expected, "{name}");
    }
}

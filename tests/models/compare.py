"""Computes the logits of small random models with the tools that made them and with march, and compares.

    python compare.py --march target/release/march [--long] [--only WORDS] [--keep DIR]

Each model is saved by its own tool; both sides read that folder. march must compute the same from a whole text, and
reading one token at a time (`march logits --decode`); or refuse the model with an error that names the key.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from pathlib import Path

import fla_on_cpu
import torch
import transformers
import variants
from safetensors.torch import load_file, save_file

EXACT = 5e-5  # largest difference, as a part of the largest logit
ROUNDED = 2e-2  # the same, if march computes with weights in bf16
COUNTS = 100 * EXACT  # a change of a tensor must change the logits more than this
SEEDS = 5  # in the long form


def save(variant, model, folder):
    """Saves a model as its tool does, then makes the changes by hand that the variant asks for."""
    exact = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith(variant.apart)}
    model.to(variant.dtype).save_pretrained(folder, max_shard_size=variant.shard)
    if variant.edit:
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) | variant.edit
        config = {key: value for key, value in config.items() if value is not None}
        file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    more = {name: torch.randn(shape, dtype=variant.dtype) for name, shape in variant.extra.items()}
    if variant.apart:
        more |= exact
    if more:
        file = folder / "model.safetensors"
        save_file(load_file(file) | more, file, metadata={"format": "pt"})


def expected(variant, folder, tokens):
    """The model and its logits, from the folder, in f32."""
    kind = variants.CLASSES[type(variant.config)]
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    return model, forward(model, tokens)


def forward(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def march_logits(options, folder, tokens, *flags):
    """The logits of march, or its error."""
    asked, output = folder / "tokens.json", folder.parent / "logits.safetensors"
    asked.write_text(json.dumps(tokens), encoding="utf-8")
    output.unlink(missing_ok=True)
    command = [options.march, "logits", "--model", folder, "--tokens", asked, "--output", output]
    command += ["--threads", options.threads, *flags]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        return None, done.stderr.strip()
    return load_file(output)["logits"], None


def difference(logits, reference):
    """The largest difference, as a part of the largest logit."""
    if logits.shape != reference.shape or not logits.isfinite().all():
        return float("inf")
    return ((logits - reference).abs().max() / reference.abs().max()).item()


def silent(variant, model, tokens, reference):
    """Tensors that hardly change the logits: a mistake there would not be seen. Parts that read no text are left out."""
    found = []
    for name, parameter in model.named_parameters():
        if ".visual." in name or any(part in name for part in variant.idle):
            continue
        before = parameter.data.clone()
        parameter.data += torch.randn_like(before) * before.std().nan_to_num(1.0).clamp_min(0.3)
        if difference(forward(model, tokens), reference) < COUNTS:
            found.append(name)
        parameter.data = before
    return found


def check(options, variant, seed, folder):
    """Compares one model. Returns what to report, and what is wrong with it (empty if nothing is)."""
    torch.manual_seed(zlib.crc32(variant.name.encode()) + seed)
    # Not the ids of images, the last four of a model that sees.
    tokens = torch.randint(0, 97, (torch.randint(70, 151, ()).item(),)).tolist()
    save(variant, variants.build(variant), folder)
    if variant.refused:
        logits, error = march_logits(options, folder, tokens)
        missing = [word for word in variant.refused if logits is None and word not in error]
        if logits is not None:
            return "", "march loads it; it must refuse it"
        if missing:
            return "", f"the error does not say {', '.join(missing)}: {error}"
        return f"refused, naming {', '.join(variant.refused)}", ""
    model, reference = expected(variant, folder, tokens)
    runs = {"whole": ([], EXACT), "decode": (["--decode"], EXACT)}
    if variant.dtype != torch.float32:
        runs = {"f32": (["--weights", "f32"], EXACT), **runs}
    if variant.dtype == torch.bfloat16:
        rounded = ["--weights", "bf16"]
        runs |= {"bf16": (rounded, ROUNDED), "bf16 decode": ([*rounded, "--decode"], ROUNDED)}
    said, wrong = [], []
    for name, (flags, allowed) in runs.items():
        logits, error = march_logits(options, folder, tokens, *flags)
        if logits is None:
            wrong.append(f"march {' '.join(flags)} fails: {error}")
            break
        found = difference(logits, reference)
        said.append(f"{name} {found:.1e}")
        if not found <= allowed:
            wrong.append(f"{name} differs by {found:.1e}")
    if options.long and seed == 0 and not wrong:
        quiet = silent(variant, model, tokens, reference)
        if quiet:
            wrong.append(f"hardly count here: {', '.join(quiet)}")
    return "  ".join(said), "; ".join(wrong)


def other_values(value):
    """Other values for a key of config.json, of its own kind and not; the first removes the key."""
    values = [..., None]
    if isinstance(value, bool):
        values += [not value, 1]
    elif isinstance(value, (int, float)):
        values += [value * 2, value // 2 if isinstance(value, int) else value / 2, type(value)(1), 0, "2"]
    elif isinstance(value, str):
        values += ["other"]
    elif isinstance(value, list):
        values += [value[1:], value + value[-1:], value[::-1]]
    elif value is None:
        values += [2, True, [1], {"a": 1}]
    return [other for other in values if other is ... or other != value or type(other) is not type(value)]


def changes(config):
    """Copies of a configuration with one key changed: where, what to, and the copy."""
    for path in [(), ("text_config",), ("rope_parameters",), ("text_config", "rope_parameters"), ("attn",)]:
        place = config
        for key in path:
            place = place.get(key) if isinstance(place, dict) else None
        for key, value in place.items() if isinstance(place, dict) else ():
            if key in ("model_type", "vision_config") or isinstance(value, dict):
                continue
            for other in other_values(value):
                changed = json.loads(json.dumps(config))
                inner = changed
                for step in path:
                    inner = inner[step]
                if other is ...:
                    del inner[key]
                else:
                    inner[key] = other
                yield key, "without it" if other is ... else json.dumps(other), changed


def loaded(kind, folder):
    """The model of a folder; None if its tool does not load it, or makes up or leaves out tensors."""
    try:
        model, found = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        return None if any(found.get(part) for part in ("missing_keys", "unexpected_keys", "mismatched_keys")) else model.eval()
    except Exception:
        return None


def check_changed(options, variant, seed, folder):
    """Changes each key of config.json. What march does not refuse, it must compute as the tool does that owns the model."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, 97, (60,)).tolist()
    save(variant, variants.build(variant), folder)
    kind, file = variants.CLASSES[type(variant.config)], folder / "config.json"
    original = json.loads(file.read_text(encoding="utf-8"))
    unchanged = forward(loaded(kind, folder), tokens)
    counts, wrong = {"computed": 0, "refused": 0, "not loaded there": 0}, []
    for key, what, changed in changes(original):
        file.write_text(json.dumps(changed), encoding="utf-8")
        logits, error = march_logits(options, folder, tokens)
        if logits is None:
            counts["refused"] += 1
            if key not in error and "tensor" not in error:
                wrong.append(f"{key} {what}: the error does not name it: {error}")
            continue
        model = loaded(kind, folder)
        try:
            reference = None if model is None else forward(model, tokens)
        except Exception:
            reference = None
        counts["computed" if reference is not None else "not loaded there"] += 1
        # What the tool rejects, such as a wrong number of an unused key, must make no difference here.
        found = difference(logits, unchanged if reference is None else reference)
        if not found <= EXACT:
            there = "the unchanged model" if reference is None else "there"
            wrong.append(f"{key} {what}: differs by {found:.1e} from {there}")
    return ", ".join(f"{count} {name}" for name, count in counts.items()), "\n       ".join(wrong)


class Server:
    """A running `march serve`, as a context."""

    def __init__(self, options, folder):
        command = [options.march, "serve", "--json", "--model", folder, "--tokenizer", "bytes", "--name", "served"]
        command += ["--addr", "127.0.0.1:0", "--threads", options.threads]
        # What it logs is little, and only read if it does not start.
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([str(part) for part in command], stdout=pipe, stderr=pipe, text=True)

    def __enter__(self):
        ready = self.process.stdout.readline()
        if not ready:
            raise RuntimeError(f"march serve did not start: {self.process.stderr.read().strip()}")
        self.url = json.loads(ready)["url"]
        return self

    def __exit__(self, *error):
        self.process.terminate()
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    def continue_(self, ids):
        """The most probable continuation with its log-probabilities, and how many tokens were not read again."""
        body = {"model": "served", "prompt": ids, "max_tokens": 20, "temperature": 0, "logprobs": 5}
        head = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer = json.load(answer)
        choice = answer["choices"][0]
        kept = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return (choice["text"], choice["logprobs"], choice["finish_reason"]), kept


def check_served(options, variant, seed, folder):
    """Asks one server for texts that begin alike, and a new server for each: the answers must be equal."""
    torch.manual_seed(seed)
    save(variant, variants.build(variant), folder)
    first, more = torch.randint(0, 256, (2, 130)).tolist()
    prompts = {
        "first": first,
        "the same": first,
        "longer": first + more[:50],
        "longer still": first + more[:50] + more[:1],
        "edited at its end": first[:-3] + more[:7],
        "departing in the middle": first[:60] + more,
        "ending earlier": first[:75],
        "another": more,
        "the first again": first + more[:20],
    }
    wrong, kept = [], {}
    with Server(options, folder) as warm:
        for name, ids in prompts.items():
            answer, kept[name] = warm.continue_(ids)
            with Server(options, folder) as cold:
                if cold.continue_(ids) != (answer, 0):
                    wrong.append(f"{name}: not the answer of a new server ({kept[name]} tokens kept)")
    if not kept["the same"] or not kept["longer"]:
        wrong.append(f"the running server keeps nothing: {kept}")
    return "kept " + ", ".join(f"{count} of {len(prompts[name])}" for name, count in kept.items()), "; ".join(wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--march", type=Path, required=True, help="the program")
    parser.add_argument("--long", action="store_true", help=f"{SEEDS} seeds, and whether each tensor counts")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--seed", type=int, help="one seed only")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the models, to look at them")
    parser.add_argument("--threads", type=int, default=1, help="threads of march")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    fla_on_cpu.replace()

    wide = {"linear_num_value_heads": 4, "vocab_size": 257}
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    served = [variants.Variant("served qwen3_5", variants.qwen3_5(**wide))]
    if options.long:
        served.append(variants.Variant("served qwen3 window 16", variants.qwen3(vocab_size=257, **window)))
        attn = {"layers": [1, 3], "num_heads": 4, "window_size": 16}
        served.append(variants.Variant("served fla hybrid window 16", variants.hybrid(attn, vocab_size=257)))
    checks = [(variant, check) for variant in variants.variants()] + [(variant, check_served) for variant in served]
    if options.long:
        checks += [(variant, check_changed) for variant in variants.changed()]
    checks = [(variant, function) for variant, function in checks if options.only in variant.name]
    seeds = range(SEEDS if options.long else 1) if options.seed is None else [options.seed]
    passed, failed = 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        for seed in seeds:
            for variant, function in checks:
                if function is check_changed and seed != seeds[0]:
                    continue  # it takes as long as everything else
                name = variant.name if len(seeds) == 1 else f"{variant.name} (seed {seed})"
                folder = Path(options.keep or temporary, name.replace(" ", "-").replace(",", ""), "model")
                try:
                    said, wrong = function(options, variant, seed, folder)
                except Exception as error:  # one model must not keep the others from being compared
                    said, wrong = "", f"{type(error).__name__}: {error}"
                passed, failed = passed + (not wrong), failed + bool(wrong)
                print(f"{'FAIL' if wrong else 'ok  '} {name:50} {said}", flush=True)
                if wrong:
                    print(f"       {wrong}", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()

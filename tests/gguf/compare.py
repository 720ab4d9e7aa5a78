"""Compares march with llama.cpp (package xllamacpp) on a GGUF file: ids of texts, and logits.

    python compare.py --march target/release/march FILE [--tokens 200] [--random] [--limit 0.2]

llama.cpp gives log-probabilities of the 2,000 most probable ids, so the logits are compared after log-softmax among
these. Its products round activations to int8
where weights are in blocks; with all tensors in f32 (`make.py --plain`) both compute the same.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import xllamacpp
from gguf import GGUFReader
from safetensors.numpy import load_file

TEXT = (
    "The tide came in twice a day, and twice a day the harbour changed its mind. In the morning the boats lay on their "
    "sides in the mud like tired animals; by noon they floated, and the men who owned them walked down from the town "
    "with bread and rope. Nobody wrote down when it had begun. In 1874 a clerk counted 312 boats, 41 of them with two "
    "masts. It's said that he'd never learned to swim, and that he counted them from the church tower, twice, because "
    "the first number seemed too large to be true. \"What is the largest number?\" asked his daughter. He thought about "
    "it for a while: the sea, the stars, the grains of sand between them. Then he said that he did not know, but that "
    "it was certainly more than 312, and that she should go to sleep."
)


SPECIAL = "<|im_start|>user\nNaïve café, हिन्दी, 漢字 — ½ 🙂🙂?<|im_end|>\n\n  <think> x\r\n\t1234567  ok"


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["tokens"]


def start(path):
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = str(path), 1024, 1
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.cpuparams.n_threads, options.warmup, options.verbosity = 2, False, 0
    return xllamacpp.Server(options)


def theirs(server, ids, vocabulary, letter):
    """Log-probabilities after each prefix of the ids, [tokens, vocabulary]; NaN for ids that are not told."""
    rows = np.full((len(ids), vocabulary), np.nan)
    for end in range(1, len(ids) + 1):
        # Nothing is told where a text would end, or in the middle of a character: a letter must be drawn. What is told
        # are the probabilities before that.
        request = {"prompt": ids[:end], "n_predict": 1, "n_probs": min(vocabulary, 2000), "temperature": 0}
        answer = server.handle_completions(request | {"cache_prompt": True, "logit_bias": [[letter, 1000.0]]})
        for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            rows[end - 1, token["id"]] = token["logprob"] if token["logprob"] > -50 else np.nan
    return rows


def ours(march, path, ids):
    with tempfile.TemporaryDirectory() as folder:
        tokens, output = Path(folder) / "ids.json", Path(folder) / "logits.safetensors"
        tokens.write_text(json.dumps(ids))
        command = [march, "logits", "--model", path, "--tokens", tokens, "--output", output, "--threads", "2"]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        return load_file(output)["logits"].astype(np.float64)


def normalised(rows, known):
    """Log-probabilities among the known ids."""
    rows = np.where(known, rows, -np.inf)
    rows = rows - rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def compare_ids(march, path, server, text):
    """The ids of a text by llama.cpp and march."""
    a = post(f"{server.listening_address}/tokenize", {"content": text, "add_special": False, "parse_special": True})
    command = [str(march), "serve", "--model", str(path), "--addr", "127.0.0.1:0", "--json", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        url = json.loads(process.stdout.readline())["url"]
        b = post(f"{url}/tokenize", {"prompt": text, "add_special_tokens": False})
        process.terminate()
    return a, b


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--march", type=Path, default=Path("target/release/march"))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--limit", type=float, default=0.2, help="largest mean difference of the logarithms")
    parser.add_argument("--random", action="store_true", help="compare random ids instead of those of a text")
    arguments = parser.parse_args()
    fields = GGUFReader(arguments.file).fields
    names = fields["tokenizer.ggml.tokens"].contents()
    vocabulary, letter = len(names), names.index("a")
    server = start(arguments.file)
    ids, same = np.random.default_rng(1).integers(0, vocabulary, 40).tolist(), True
    if not arguments.random:
        for text in (SPECIAL, TEXT):
            a, b = compare_ids(arguments.march, arguments.file, server, text)
            same &= a == b
            print(f"{arguments.file.name}: {len(a)} ids of a text, {'the same' if a == b else f'others: {a} {b}'}")
            ids = a[: arguments.tokens]
    a, b = theirs(server, ids, vocabulary, letter), ours(arguments.march, arguments.file, ids)[:, :vocabulary]
    known = np.isfinite(a)
    a, b = normalised(a, known), normalised(b, known)
    difference = np.abs(a[known] - b[known])
    near = difference[b[known] > np.log(1e-3)]
    best = (a.argmax(-1) == b.argmax(-1)).mean()
    told = known[np.arange(len(ids) - 1), ids[1:]]
    rows, targets = np.arange(len(ids) - 1)[told], np.array(ids[1:])[told]
    print(f"{arguments.file.name}: {len(ids)} tokens × {vocabulary} ids")
    print(f"  difference of log-probabilities: mean {difference.mean():.2e}, largest {difference.max():.2e}")
    print(f"  of those above 0.001: mean {near.mean():.2e}, largest {near.max():.2e}")
    print(f"  same most probable token: {100 * best:.1f} %")
    print(f"  loss: llama.cpp {-a[rows, targets].mean():.5f}, march {-b[rows, targets].mean():.5f}")
    return 0 if same and difference.mean() <= arguments.limit else 1


if __name__ == "__main__":
    sys.exit(main())

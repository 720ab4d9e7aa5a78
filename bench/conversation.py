"""What `march serve` reads again of a conversation: beside a server that keeps nothing, with the same answers, bit for bit.

    python bench/conversation.py [--march target/release/march] [--model DIR] [--tokens 8000] [--json FILE]
    python bench/conversation.py --quick

Asks a model with random weights of the shape of Qwen3.5-0.8B, in bf16, about a conversation of `--tokens` tokens, three
quarters of which are its first message. Then come the next turn, the same turn again, its last message edited, another
question to the first message, a text that departs after three eighths of the tokens without any mark there, and the next
turn of the same conversation in a server that was started again with the same `--sessions`. `--model` takes another
checkpoint with a tokenizer of words, such as this script makes; `--preset` another shape.

A case that reads more than what is new, a departure that reads more than 512 known tokens, an answer whose tokens or
log-probabilities differ from those of a cold server, and a cache that exceeds its bytes are errors. Needs only Python's
own library. Other programs on the machine disturb the seconds. `--quick` takes a small model and seconds: that shows that
it works, and its seconds mean nothing.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "clients"))
import serving

TEMPLATE = """{%- for message in messages -%}
<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor -%}
{%- if add_generation_prompt %}<|im_start|> assistant {% endif -%}
"""

ROLES = ["user", "assistant", "system"]
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def word(number):
    return f"w{number}"


def checkpoint(march, folder, preset):
    """A checkpoint with random weights, and a word for every id, so that answers are read as they were written."""
    output = Path(folder, "model")
    command = [march, "init", "--config", preset, "--weights", "bf16", "--output", output]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    count = json.loads((output / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    words = SPECIAL + ROLES
    words += [word(number) for number in range(len(words), count)]
    added = [
        {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for number, content in enumerate(SPECIAL)
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {name: i for i, name in enumerate(words)}, "unk_token": word(9)},
    }  # fmt: skip
    (output / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (output / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (output / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}), encoding="utf-8")
    return output


class Client:
    """A server's client, which notes the most bytes that its cache had."""

    def __init__(self, server):
        self.server, self.cached = server, 0

    def request(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.server.url + path, data, headers, method=method)
        with urllib.request.urlopen(request) as answer:
            return answer.read().decode()

    def ask(self, messages, **more):
        """An answer: the prompt's tokens, those that were known, the seconds, and the answer itself."""
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 5, **more}
        start = time.perf_counter()
        answer = json.loads(self.request("POST", "/v1/chat/completions", body))
        seconds, usage = time.perf_counter() - start, answer["usage"]
        for line in self.request("GET", "/metrics").splitlines():
            if line.startswith("march_cache_bytes "):
                self.cached = max(self.cached, int(line.split()[1]))
        choice = answer["choices"][0]
        return {
            "prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"],
            "seconds": seconds, "answer": [choice["message"]["content"], choice["logprobs"]],
        }  # fmt: skip


def cases(tokens, chance):
    """Messages of a conversation of about so many tokens, and those of what is asked after it."""

    def said(count, role="user"):
        return {"role": role, "content": " ".join(word(chance.randrange(16, 256)) for _ in range(count))}

    document, few = said(tokens * 3 // 4 - 4), max(16, tokens // 160)
    base = [document, said(few, "assistant"), said(tokens // 8), said(few, "assistant"), said(tokens // 8 - 3 * few)]
    departure = document["content"].split()[: tokens * 3 // 8] + said(few)["content"].split()
    return base, {
        "next": said(few), "edit": said(few), "other": [document, said(few, "assistant"), said(few)],
        "departure": [{"role": "user", "content": " ".join(departure)}],
    }  # fmt: skip


def run(march, model, options, work):
    base, parts = cases(options.tokens, random.Random(1))
    flags = ["--request-seconds", 3600]
    bounded = [*flags, "--cache-bytes", options.cache_bytes, "--sessions", Path(work, "sessions")]
    with serving.server(march, model, *bounded, threads=options.threads) as server:
        client = Client(server)
        first = client.ask(base)
        answered = [*base, {"role": "assistant", "content": first["answer"][0]}]
        turn = [*answered, parts["next"]]
        prompts = {"next turn": turn, "the same again": turn, "last message edited": [*answered, parts["edit"]]}
        prompts |= {"other question to the first message": parts["other"], "departure": parts["departure"]}
        got = {"whole conversation": first} | {name: client.ask(messages) for name, messages in prompts.items()}
        client.request("PUT", "/v1/sessions/kept")
        client.ask(base, session="kept")
    with serving.server(march, model, *bounded, threads=options.threads) as server:
        again = Client(server)
        got["next turn after a restart"] = again.ask([parts["next"]], session="kept")
    most = max(client.cached, again.cached)
    prompts["next turn after a restart"] = turn
    cold = {}
    with serving.server(march, model, *flags, "--cache-bytes", 0, threads=options.threads) as server:
        client = Client(server)
        for name, messages in prompts.items():
            # The same prompt gets the same answer.
            before = next((other for other in cold if prompts[other] == messages), None)
            cold[name] = cold[before] if before else client.ask(messages)
    return got, cold, most


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--march", default=str(ROOT / "target/release/march"))
    parser.add_argument("--model", help="a checkpoint with a tokenizer of words, instead of random weights")
    parser.add_argument("--preset", default="qwen3_5/0_8b", help="the shape of the random weights")
    parser.add_argument("--tokens", type=int, default=8000, help="of the conversation")
    parser.add_argument("--cache-bytes", type=int, default=1 << 30, help="of the server")
    parser.add_argument("--threads", type=int, default=0, help="of the server; 0 for all cores")
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="a small model and a short conversation")
    options = parser.parse_args()
    if options.quick:
        options.preset, options.tokens = "tiny/hybrid", 1600
    with tempfile.TemporaryDirectory() as work:
        model = options.model or checkpoint(options.march, work, options.preset)
        got, cold, most = run(options.march, model, options, work)
    few = max(16, options.tokens // 160)
    wrong, rows = [], []
    print("| | prompt tokens | known | read | seconds | cold seconds | bit-equal |\n|---|---|---|---|---|---|---|")
    for name, one in got.items():
        read, other = one["prompt"] - one["cached"], cold.get(name)
        equal = other is None or one["answer"] == other["answer"]
        # A message's marks, the end of the answer before it and what asks for the next answer are some tokens more.
        allowed = few + 16 + (few if name.startswith("other") else 0) + (512 if name == "departure" else 0)
        if other and read > allowed:
            wrong.append(f"{name}: {read} tokens were read, but at most {allowed} are new")
        if not equal:
            wrong.append(f"{name}: another answer than that of a cold server")
        slow = f"{other['seconds']:.1f}" if other else ""
        same = ("yes" if equal else "no") if other else ""
        print(f"| {name} | {one['prompt']:,} | {one['cached']:,} | {read:,} | {one['seconds']:.1f} | {slow} | {same} |")
        rows.append({"case": name, "read": read, "equal": equal, **one, "cold": other and other["seconds"]})
        del rows[-1]["answer"]
    print(f"\nThe cache had at most {most:,} bytes; it was given {options.cache_bytes:,}.")
    if most > options.cache_bytes:
        wrong.append(f"the cache had {most} bytes")
    if options.json:
        Path(options.json).write_text(json.dumps({"cases": rows, "cache_bytes": most}, indent=1), encoding="utf-8")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()

"""Speed of `march serve`, as ratios: many clients, prompts that were read before, and long prompts beside answers.

    python bench/serve.py [--march target/release/march] [--model DIR] [--json FILE]
    python bench/serve.py --llama MODEL.gguf --llama-python PYTHON_WITH_LLAMA_CPP
    python bench/serve.py --peer NAME=http://127.0.0.1:8000
    python bench/serve.py --quick

Measures, with random weights and greedy answers that end only at `max_tokens`:

- tokens per second of 8 clients together, compared with one client;
- the time to the first token of a long prompt that was read before, compared with a new one;
- the time between the tokens of 7 answers while an eighth client's long prompt is read, compared with no such prompt.
  The prompt is given up after `--window` seconds; the table says how much of it was read by then.

`--peer` measures another server with OpenAI's interface in the same way; `--llama` starts llama-cpp-python's server
with a GGUF file (bench/peers/llama_gguf.py writes a random one). That server answers one request at a time, so it has
no third number. Needs only Python's own library. Other programs on the machine disturb the numbers. `--quick` measures
all of it once with short texts, in seconds: that shows that it works, and its numbers mean nothing.
"""

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "clients"))
import serving

WORDS = "the of and a to in he that it was on his with as had for at be not she her but they said which from".split()


def text(tokens, seed):
    """Random words of this many bytes, which are this many tokens for a model of bytes."""
    chance, words, length = random.Random(seed), [], 0
    while length <= tokens:
        words.append(chance.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:tokens]


class Request:
    """A streamed completion. Remembers when each part came."""

    def __init__(self, server, prompt, max_tokens):
        self.body = {"model": server.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        self.server, self.times, self.tail, self.error = server, [], b"", None
        self.sent = time.perf_counter()
        body = json.dumps(self.body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {server.host}\r\ncontent-type: application/json\r\n"
        head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        self.socket = socket.create_connection((server.host, server.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(head.encode() + body)

    def read(self):
        """Reads until the end, or until the socket is closed by `close`."""
        first = True
        while True:
            try:
                data = self.socket.recv(1 << 16)
            except OSError:
                return self
            now = time.perf_counter()
            if not data:
                return self
            if first and not data.startswith(b"HTTP/1.1 200"):
                self.error = data
            first = False
            data = self.tail + data
            # An event may be divided; the last bytes count with the next ones.
            count = data.count(b"data: {")
            self.tail = data[-6:] if data[-7:] != b"data: {" else b""
            self.times += [now] * count

    def start(self):
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()
        return self

    def close(self):
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.socket.close()

    def first(self):
        """Seconds to the first token."""
        self.read()
        self.socket.close()
        if self.error or not self.times:
            sys.exit(f"{self.server.label} did not answer: {self.error!r}")
        return self.times[0] - self.sent


class Target:
    """A server to measure."""

    def __init__(self, label, url, name):
        self.label, self.url, self.name = label, url, name
        self.host, port = url.removeprefix("http://").rstrip("/").split(":")
        self.port = int(port)

    def complete(self, prompt, max_tokens):
        """The usage of an answer that is not streamed."""
        body = {"model": self.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["usage"]


def together(server, clients, tokens, repeats):
    """Tokens per second of some clients at once: the median of some repetitions."""
    rates = []
    for repeat in range(repeats + 1):
        usages = [None] * clients
        prompts = [text(32, f"{clients} {repeat} {client}") for client in range(clients)]

        def ask(client):
            usages[client] = server.complete(prompts[client], tokens)

        threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        written = sum(usage["completion_tokens"] for usage in usages)
        if written != clients * tokens:
            print(f"{server.label}: {written} tokens instead of {clients * tokens}", file=sys.stderr)
        rates.append(written / seconds)
    # The first is a warm-up.
    return statistics.median(rates[1:])


def first_tokens(server, tokens, repeats, most):
    """Seconds to the first token of a new prompt, of the same again, and of the same with something new at its end.

    Nothing is repeated after `most` seconds.
    """
    cold, same, longer, cached = [], [], [], []
    start = time.perf_counter()
    for repeat in range(repeats):
        if repeat > 0 and time.perf_counter() - start > most:
            break
        prompt = text(tokens, f"first {repeat} {time.time_ns()}")
        cold.append(Request(server, prompt, 2).first())
        same.append(Request(server, prompt, 2).first())
        longer.append(Request(server, prompt + " and then she", 2).first())
        usage = server.complete(prompt + " and then she said", 1)
        cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
    return [statistics.median(times) for times in (cold, same, longer)], cached[-1]


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def gaps(requests, start, end):
    """Seconds between tokens, of all answers, that ended in a stretch of time."""
    found = []
    for request in requests:
        found += [new - old for old, new in zip(request.times, request.times[1:]) if start <= new <= end]
    return found


def quiet(requests, seconds, found):
    """Adds the times between tokens while nothing else happens."""
    start = time.perf_counter()
    time.sleep(seconds)
    found += gaps(requests, start, time.perf_counter())


def prompt_tokens(server):
    """Prompt tokens that the server has read so far; `None` if it does not say."""
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(f"{server.url}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("march_prompt_tokens_total "):
                return int(line.split()[1])
    return None


def read_beside(server, prompt, window):
    """Has a prompt read for some seconds, or until its first token. Returns when, and the part that was read."""
    before = prompt_tokens(server)
    request = Request(server, prompt, 1).start()
    while not request.times and request.error is None and time.perf_counter() < request.sent + window:
        time.sleep(0.005)
    end = request.times[0] if request.times else time.perf_counter()
    after = prompt_tokens(server)
    request.close()
    if request.error is not None:
        sys.exit(f"{server.label} refused: {request.error!r}")
    if request.times:
        return request.sent, end, 1.0
    return request.sent, end, None if None in (before, after) else (after - before) / len(prompt)


def between_tokens(server, tokens, seconds, window, repeats):
    """The times between tokens of 7 answers, alone and while a long prompt is read; how long, and how much of it."""
    alone, beside, reading, parts = [], [], [], []
    for repeat in range(repeats):
        requests = [Request(server, text(32, f"between {repeat} {i}"), 60_000).start() for i in range(7)]
        while not all(len(request.times) > 20 for request in requests):
            if any(request.error for request in requests):
                sys.exit(f"{server.label} refused: {requests[0].error!r}")
            time.sleep(0.01)
        # Before and after, because a token takes longer the longer its text is.
        quiet(requests, seconds / 2, alone)
        start, end, part = read_beside(server, text(tokens, f"eighth {repeat} {time.time_ns()}"), window)
        reading.append(end - start)
        parts.append(part)
        beside += gaps(requests, start, end)
        quiet(requests, seconds / 2, alone)
        for request in requests:
            request.close()
        time.sleep(1)
    part = None if None in parts else statistics.median(parts)
    return alone, beside, statistics.median(reading), part


def measure(server, options, streams=True):
    """All numbers of a server."""
    found = {"server": server.label}
    note = lambda what: print(f"{server.label}: {what}", file=sys.stderr, flush=True)
    note("clients")
    one = together(server, 1, options.answer, options.repeats)
    eight = together(server, 8, options.answer, options.repeats)
    found |= {"tokens_per_second_1": one, "tokens_per_second_8": eight, "ratio_8_to_1": eight / one}
    note("first tokens")
    (cold, same, longer), cached = first_tokens(server, options.prompt, options.repeats, options.most)
    found |= {"first_token_cold": cold, "first_token_same": same, "first_token_longer": longer}
    found |= {"cached_tokens": cached, "ratio_cold_to_same": cold / same, "ratio_cold_to_longer": cold / longer}
    if streams:
        note("time between tokens")
        alone, beside, reading, part = between_tokens(
            server, options.prompt, options.quiet, options.window, options.repeats
        )
        found |= {"reading_beside": reading, "read_beside": part}
        for share in 50, 99:
            calm, busy = percentile(alone, share / 100), percentile(beside, share / 100)
            found |= {f"between_p{share}_alone": calm, f"between_p{share}_beside": busy, f"ratio_p{share}": busy / calm}
        found["between_samples"] = [len(alone), len(beside)]
    return found


@contextlib.contextmanager
def llama(options):
    """llama-cpp-python's server with a GGUF file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [options.llama_python, "-m", "llama_cpp.server", "--model", options.llama, "--port", port]
    command += ["--host", "127.0.0.1", "--n_ctx", 2 * options.prompt, "--n_threads", options.threads]
    command += ["--n_threads_batch", options.threads, "--interrupt_requests", "False", "--verbose", "False"]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        target = Target("llama.cpp", f"http://127.0.0.1:{port}", options.llama)
        for _ in range(600):
            if process.poll() is not None:
                sys.exit(f"llama_cpp.server did not start; try it: {' '.join(map(str, command))}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{target.url}/v1/models") as answer:
                target.name = json.load(answer)["data"][0]["id"]
                break
            time.sleep(0.1)
        yield target
    finally:
        process.terminate()
        process.wait()


ROWS = [
    ("tokens/s, 1 client", "tokens_per_second_1", "{:.0f}"),
    ("tokens/s, 8 clients", "tokens_per_second_8", "{:.0f}"),
    ("  ratio", "ratio_8_to_1", "{:.2f}"),
    ("first token, new prompt, ms", "first_token_cold", "ms"),
    ("first token, same prompt, ms", "first_token_same", "ms"),
    ("  ratio", "ratio_cold_to_same", "{:.1f}"),
    ("first token, prompt continued, ms", "first_token_longer", "ms"),
    ("  ratio", "ratio_cold_to_longer", "{:.1f}"),
    ("between tokens of 7, p50, ms", "between_p50_alone", "ms"),
    ("  while a prompt is read, ms", "between_p50_beside", "ms"),
    ("  ratio", "ratio_p50", "{:.2f}"),
    ("between tokens of 7, p99, ms", "between_p99_alone", "ms"),
    ("  while a prompt is read, ms", "between_p99_beside", "ms"),
    ("  ratio", "ratio_p99", "{:.2f}"),
    ("  seconds of that", "reading_beside", "{:.1f}"),
    ("  part of the prompt read in them", "read_beside", "{:.2f}"),
]


def table(results):
    lines = [["", *(result["server"] for result in results)]]
    for name, key, form in ROWS:
        cells = []
        for result in results:
            value = result.get(key)
            if value is None:
                cells.append("–")
            else:
                cells.append(f"{value * 1e3:.2f}" if form == "ms" else form.format(value))
        lines.append([name, *cells])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        first = line[0].ljust(widths[0])
        others = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([first, *others]).rstrip())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--march", default=str(ROOT / "target/release/march"))
    parser.add_argument("--model", help="a checkpoint, instead of random weights of tiny/march and tiny/gdn")
    parser.add_argument("--threads", type=int, default=0, help="of the server; 0 for all cores")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens of long prompts")
    parser.add_argument("--answer", type=int, default=256, help="tokens of answers")
    parser.add_argument("--quiet", type=float, default=5, help="seconds of answers without a long prompt")
    parser.add_argument("--window", type=float, default=15, help="seconds of answers while a long prompt is read")
    parser.add_argument("--most", type=float, default=60, help="seconds of first tokens after which none is repeated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slice", type=int, help="prompt tokens per step beside answers [default: the server's]")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="another running server")
    parser.add_argument("--llama", metavar="GGUF", help="measure llama-cpp-python's server with this file")
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has llama-cpp-python[server]")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--quick", action="store_true", help="short texts, once each")
    options = parser.parse_args()
    if options.quick:
        options.prompt, options.answer, options.quiet, options.window, options.repeats = 512, 8, 0.2, 2, 1
    results = []
    with tempfile.TemporaryDirectory() as work:
        models = {"--model": options.model} if options.model else {}
        for preset in [] if options.model else ["tiny/march", "tiny/gdn"]:
            models[preset] = serving.checkpoint(options.march, work, preset, end_of_text=False)
        flags = ["--request-seconds", 3600]
        if options.slice:
            flags += ["--slice", options.slice]
        for label, model in models.items():
            with serving.server(options.march, model, *flags, threads=options.threads) as running:
                results.append(measure(Target(label, running.url, "tiny"), options))
    for peer in options.peer:
        label, url = peer.split("=", 1)
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            name = json.load(answer)["data"][0]["id"]
        results.append(measure(Target(label, url, name), options))
    if options.llama:
        if options.threads == 0:
            options.threads = os.cpu_count()
        with llama(options) as target:
            results.append(measure(target, options, streams=False))
    table(results)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Sends requests that are made from the server's own OpenAPI description, right and wrong ones, with schemathesis.

    python schema.py --march target/release/march --models DIR [--long] [--file openapi.json]

Every answer must be one that the description has: its status, its type, its headers and its content; never a 5xx. What
the description allows must be accepted, and what it does not allow must be refused. Each part of a stream is checked
as well. The requests are the same in every run.

schemathesis loads this file, too, for the functions below.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import schemathesis

sys.path.insert(0, str(Path(__file__).resolve().parent))
import serving

TEMPLATE = Path(__file__).resolve().parents[2] / "crates/server/src/tests/chat_template.jinja"
CONTEXT = 4096  # tokens; a limit of the server that is tested
VOCABULARY = 257
LARGEST = 2**64 - 1
KEY = "secret"

# Checks of schemathesis that are left out.
EXCLUDED = {
    # There is one key for the whole server.
    "object_level_authorization",
}


def whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def integers(value):
    """Numbers such as 1.0 as 1: JSON Schema calls both whole, the server only the second."""
    if isinstance(value, list):
        return [integers(one) for one in value]
    if isinstance(value, dict):
        return {key: integers(one) for key, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def smaller(value, most):
    """A valid number as one that the tested server has room for; anything else as it is."""
    return value % (most + 1) if whole(value) and most < value <= LARGEST else value


def known_ids(value):
    """Ids that any 32 bits could be, as ids of the tested model."""
    if isinstance(value, list):
        return [known_ids(one) for one in value]
    return value % VOCABULARY if whole(value) and 0 <= value < 2**32 else value


def short(value, characters):
    """Texts that are too long for the tested server, cut."""
    if isinstance(value, str):
        return value[:characters]
    if isinstance(value, list):
        return [short(one, characters) for one in value[:8]]
    if isinstance(value, dict):
        return {key: short(one, characters) for key, one in value.items()}
    return value


@schemathesis.hook
def before_call(context, case, kwargs):
    """Fits requests to limits that depend on the server and that a description cannot have.

    A wrong value stays wrong: only values that are right in the description are changed.
    """
    body = case.body
    if not isinstance(body, dict):
        return
    body = integers(body)
    path = case.operation.path
    if path in ("/v1/completions", "/v1/chat/completions"):
        for key in "max_tokens", "max_completion_tokens":
            if key in body:
                body[key] = smaller(body[key], 6)
        if "n" in body and whole(body["n"]) and 3 < body["n"] <= 16:
            body["n"] = 3
        if isinstance(body.get("model"), str):
            body["model"] = "tiny"
        if isinstance(body.get("stop"), (str, list)):
            body["stop"] = short(body["stop"], 8)
        # Conversations and recall take one text and one choice.
        single = isinstance(body.get("session"), str) or body.get("recall") is True
        if single:
            if whole(body.get("n")) and 1 <= body["n"] <= 16:
                body["n"] = 1
            if body.get("echo") is True:
                body["echo"] = False
            for key in "max_tokens", "max_completion_tokens":
                if whole(body.get(key)) and body[key] == 0:
                    body[key] = 1
            if isinstance(body.get("prompt"), list) and body["prompt"] and isinstance(body["prompt"][0], (str, list)):
                body["prompt"] = body["prompt"][:1]
    if path == "/v1/completions":
        if "prompt" in body:
            body["prompt"] = short(known_ids(body["prompt"]), 40)
        # 0 tokens need `echo`.
        if body.get("max_tokens") == 0 and whole(body["max_tokens"]) and body.get("echo") in (None, False):
            body["max_tokens"] = 1
    if path == "/v1/chat/completions":
        # schemathesis reads only the first events of a stream.
        body.setdefault("max_completion_tokens", 6)
        if isinstance(body.get("messages"), list):
            body["messages"] = short(body["messages"], 16)
        if isinstance(body.get("tools"), list):
            body["tools"] = short(body["tools"], 2)
        # Alternatives need `logprobs`.
        if whole(body.get("top_logprobs")) and body.get("logprobs") in (None, False):
            body["logprobs"] = True
    if path == "/detokenize" and "tokens" in body:
        body["tokens"] = known_ids(body["tokens"])
    # Policies have a grammar of their own.
    if isinstance(body.get("memory"), str):
        body["memory"] = ["", "interval=8", "interval=32 top-k=2", "storage=int8"][len(body["memory"]) % 4]
    case.body = body


@schemathesis.hook
def filter_failure(context, failure, case, response):
    """Accepts that a valid request is refused because of what the conversation is at that moment."""
    if type(failure).__name__ != "RejectedPositiveData" or response.status_code != 400:
        return True
    error = response.json()["error"]
    more_turns = error["param"] == "turns"
    other_kind = error["param"] == "session" and "this session is a " in error["message"]
    return not (more_turns or other_kind)


@schemathesis.check
def stream_ends(ctx, response, case):
    """A stream ends with `[DONE]`, and without an error."""
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    parts, done = serving.parts(response.content.decode().splitlines())
    if parts and "error" in parts[-1]:
        raise AssertionError(f"the stream failed: {parts[-1]}")
    if not done:
        raise AssertionError("the stream has no [DONE]")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--march", required=True)
    parser.add_argument("--models", required=True, help="a folder for checkpoints")
    parser.add_argument("--long", action="store_true", help="more requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--file", help="the description; the server's by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        model = serving.checkpoint(options.march, work)
        # Tools need a template that has a form for them.
        shutil.copy(TEMPLATE, model / "chat_template.jinja")
        key = Path(work, "key")
        key.write_text(KEY, encoding="ascii")
        flags = ["--context", CONTEXT, "--api-key-file", key, "--sessions", Path(work, "sessions")]
        with serving.server(options.march, model, *flags) as server:
            command = [Path(sys.executable).with_name("schemathesis"), "run"]
            command += [Path(options.file).resolve() if options.file else f"{server.url}/openapi.json"]
            command += ["--url", server.url, "--header", f"Authorization: Bearer {KEY}"]
            command += ["--no-color", "--output-sanitize", "false"]
            command += ["--seed", options.seed, "--generation-database", "none"]
            command += ["--max-examples", 300 if options.long else 20, "--request-timeout", 60]
            command += ["--checks", "all", "--exclude-checks", ",".join(sorted(EXCLUDED))]
            command += ["--suppress-health-check", "all", "--continue-on-failure"]
            environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(Path(__file__).resolve())}
            # Elsewhere, so that no configuration file is found.
            done = subprocess.run([str(part) for part in command], env=environment, cwd=work)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()

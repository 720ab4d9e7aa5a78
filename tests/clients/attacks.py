"""Attacks on `march serve` with single requests: from web pages of others, with wrong keys, and values that lie.

    python attacks.py --march target/release/march --models DIR [--long]

Web pages of others must not be able to use the server through a browser, and wrong values must be refused with a
message that names them. `folder.py` has the attacks on its files, `hanging.py` the clients that hang or leave, and
`bodies.py` those that send too much.
"""

import re
import tempfile
from pathlib import Path

import serving
import wire
from wire import ask, refused, serve

TURN = {"prompt": "Alice was", "max_tokens": 4, "temperature": 0}
EVIL = "https://evil.example"


def content_types(check, options):
    """A body that a page of others can send without asking (text/plain, a form) is refused with 415."""
    with serve(options) as server:
        port = server.port
        ask(port, "PUT", "/v1/sessions/tea", {})
        check.status(ask(port, "POST", "/v1/completions", {**TURN, "session": "tea"}), 200, "JSON")
        before = ask(port, "GET", "/v1/sessions/tea").data
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        bodies = {
            "/v1/completions": {**TURN, "session": "tea"},
            "/v1/chat/completions": chat,
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [97]},
        }
        wrong = ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", None, "", "x"]
        wrong += ["multipart/form-data; boundary=x", "text/plain; application/json", "application/jsonx", "text/json,"]
        for path, body in bodies.items():
            for kind in wrong:
                answer = ask(port, "POST", path, body, {"content-type": kind})
                check.status(answer, 415, f"POST {path} with content-type {kind}")
        after = ask(port, "GET", "/v1/sessions/tea").data
        check.expect(before == after, f"the conversation was {before} and is {after}")
        for kind in "application/json", "application/json; charset=utf-8", "Application/JSON;charset=utf-8":
            for path, body in bodies.items():
                answer = ask(port, "POST", path, body, {"content-type": kind})
                check.status(answer, 200, f"POST {path} with content-type {kind}")


REQUESTS = [
    ("GET", "/", None, 200),
    ("GET", "/health", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/openapi.json", None, 200),
    ("PUT", "/v1/sessions/tea", {}, (200, 201)),
    ("GET", "/v1/sessions", None, 200),
    ("POST", "/v1/completions", TURN, 200),
    ("POST", "/v1/completions", {**TURN, "stream": True}, 200),
    ("POST", "/tokenize", {"prompt": "a"}, 200),
    ("DELETE", "/v1/sessions/tea", None, 200),
]


def ask_all(check, port, headers, expected=None, version="HTTP/1.1"):
    """Sends requests of all kinds with the same headers; returns the answers."""
    answers = []
    for method, path, body, fine in REQUESTS:
        answer = ask(port, method, path, body, headers, version)
        check.status(answer, expected or fine, f"{method} {path} with {headers}")
        answers.append(answer)
    return answers


def hosts(check, options):
    """A request for a name that is not the server's is refused, so that a page cannot rebind its own name."""
    with serve(options) as server:
        port = server.port
        evil = ["evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "localhost.evil.example"]
        evil += [f"127.0.0.1:{port}.evil.example", f"127.0.0.1@evil.example:{port}", "my.host", ""]
        for host in evil:
            ask_all(check, port, {"host": host}, (400, 403))
        ask_all(check, port, {"host": None}, (400, 403), "HTTP/1.0")
        ask_all(check, port, {"host": None}, (400, 403))
        for host in f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}":
            ask_all(check, port, {"host": host})
        ask_all(check, port, {}, None, "HTTP/1.0")
    with serve(options, "--host-name", "my.host") as server:
        for host in "my.host", f"my.host:{server.port}", "MY.HOST", f"127.0.0.1:{server.port}":
            ask_all(check, server.port, {"host": host})
        for host in "evil.example", "my.host.evil.example", "not-my.host":
            ask_all(check, server.port, {"host": host}, 403)


def origins(check, options):
    """A page of another origin is refused with 403; the server's own page is served."""
    with serve(options) as server:
        port = server.port
        others = [EVIL, "null", f"http://127.0.0.1:{port + 1}", f"http://evil.example:{port}", "http://localhost:3000"]
        for origin in others:
            for answer in ask_all(check, port, {"origin": origin}, 403):
                allowed = answer.headers.get("access-control-allow-origin")
                check.expect(allowed is None, f"{origin} gets access-control-allow-origin: {allowed}")
            asking = {"origin": origin, "access-control-request-method": "PUT"}
            answer = ask(port, "OPTIONS", "/v1/sessions/tea", None, asking)
            check.status(answer, (403, 405), f"OPTIONS of {origin}")
            allowed = answer.headers.get("access-control-allow-origin")
            check.expect(allowed is None, f"OPTIONS of {origin} gets access-control-allow-origin: {allowed}")
        for host in f"127.0.0.1:{port}", f"localhost:{port}":
            ask_all(check, port, {"origin": f"http://{host}", "host": host})


def cors(check, options):
    """The pages that `--cors` names may use the server, each with its own header, and no others."""
    pages = ["http://localhost:3000", "https://app.example"]
    with serve(options, "--cors", pages[0], "--cors", pages[1]) as server:
        for origin in [*pages, EVIL, "null", "http://app.example", "https://app.example:444"]:
            mine = origin in pages
            answers = ask_all(check, server.port, {"origin": origin}, None if mine else 403)
            if mine:
                # An answer that says what is wrong must be readable, too.
                answers.append(ask(server.port, "GET", "/v1/sessions/none", None, {"origin": origin}))
            asking = {"origin": origin, "access-control-request-method": "PUT"}
            asking["access-control-request-headers"] = "authorization,content-type"
            answer = ask(server.port, "OPTIONS", "/v1/sessions/tea", None, asking)
            check.status(answer, 204 if mine else 403, f"OPTIONS of {origin}")
            if mine:
                for name, parts in ("methods", "GET POST PUT DELETE"), ("headers", "authorization content-type"):
                    given = re.split(r",\s*", answer.headers.get(f"access-control-allow-{name}", ""))
                    given = {one.lower() for one in given}
                    missing = {one.lower() for one in parts.split()} - given
                    check.expect(not missing, f"OPTIONS of {origin}: {name} {given}")
            for answer in [*answers, answer]:
                allowed = answer.headers.get("access-control-allow-origin")
                check.expect(allowed == (origin if mine else None), f"{origin} gets {allowed}")
                if mine:
                    vary = answer.headers.get("vary", "").lower()
                    check.expect("origin" in re.split(r",\s*", vary), f"{origin}: vary is `{vary}`")
        ask_all(check, server.port, {})


def wrong_flags(check, options):
    """Origins that are none, and names that are none, are refused at the start."""
    for origin in "*", "http://x/path", "localhost", "null", "http://user@x", "":
        refused(check, options, ["--cors", origin], ["--cors", origin])
    for name in "my.host/path", "http://my.host":
        refused(check, options, ["--host-name", name], ["--host-name", name])


def keys(check, options):
    """With a key, any name of the host works with it, and nothing without it."""
    with tempfile.TemporaryDirectory() as work:
        key = Path(work, "key")
        key.write_text("secret\n", encoding="ascii")
        with serve(options, "--api-key-file", key) as server:
            for host in "evil.example", f"127.0.0.1:{server.port}", "my.host:443":
                for scheme in "Bearer", "bearer", "BEARER":
                    ask_all(check, server.port, {"host": host, "authorization": f"{scheme} secret"})
            for wrong in None, "Bearer", "Bearer x", "Bearer secret2", "Bearer secre", "secret", "Basic secret":
                for method, path, body, _ in REQUESTS:
                    if path not in ("/", "/health", "/openapi.json"):
                        answer = ask(server.port, method, path, body, {"authorization": wrong})
                        check.status(answer, 401, f"{method} {path} with {wrong}")


def values(check, options):
    """Wrong values are refused with a message about them."""
    with serve(options) as server:
        port = server.port
        for key, value in ("top_p", 2), ("top_p", -1), ("temperature", -1), ("repetition_penalty", -1):
            answer = ask(port, "POST", "/v1/completions", {**TURN, key: value})
            if check.status(answer, 400, f"{key} {value}"):
                param = answer.json()["error"]["param"]
                check.expect(param == key, f"{key} {value}: the error is about {param}: {answer.message()}")
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        for path, body, key in [
            ("/v1/completions", TURN, "max_tokens"),
            ("/v1/completions", TURN, "top_k"),
            ("/v1/chat/completions", chat, "max_tokens"),
            ("/v1/chat/completions", chat, "max_completion_tokens"),
        ]:
            for value in -1, 1e30, 1.5:
                answer = ask(port, "POST", path, {**body, key: value})
                check.status(answer, 400, f"{key} {value}")
                check.expect(str(2**64 - 1) not in answer.message(), f"{key} {value}: {answer}")
        for tokens in [99999], [257], [-1], [2**32], ["a"], [1.5], 1:
            answer = ask(port, "POST", "/detokenize", {"tokens": tokens})
            check.status(answer, 400, f"/detokenize {tokens}")
        twice = "interval=1 interval=2"
        answer = ask(port, "POST", "/v1/completions", {**TURN, "memory": twice})
        check.status(answer, 400, f"memory {twice}")
        check.status(ask(port, "PUT", "/v1/sessions/tea", {"memory": twice}), 400, f"PUT with memory {twice}")
        answer = ask(port, "PUT", "/v1/sessions/tea", {"turns": -1})
        check.expect(str(2**64 - 1) not in answer.message(), f"turns -1: {answer}")


def echo(check, options):
    """`echo` with `logprobs` 5 has five alternatives for each token of the prompt but the first."""
    with serve(options) as server:
        body = {"prompt": "Alice was", "echo": True, "logprobs": 5, "max_tokens": 2, "temperature": 0}
        for stream in False, True:
            answer = ask(server.port, "POST", "/v1/completions", {**body, "stream": stream})
            check.status(answer, 200, "echo")
            parts = serving.parts(answer.data.decode().splitlines())[0] if stream else [answer.json()]
            found = [part["choices"][0].get("logprobs") for part in parts if part["choices"]]
            tops = [top for one in found if one for top in one["top_logprobs"]]
            counts = [len(top or {}) for top in tops]
            wanted = [0] + [5] * (len(counts) - 1)
            check.expect(len(counts) >= len(body["prompt"]), f"stream {stream}: {len(counts)} tokens")
            enough = all(want <= count <= want + (want > 0) for count, want in zip(counts, wanted))
            check.expect(enough, f"stream {stream}: the numbers of alternatives are {counts}")


def used_port(check, options):
    """A used port is named, and no server is said to have stopped that never ran."""
    with serve(options) as server:
        said = refused(check, options, [], [f"127.0.0.1:{server.port}"], addr=f"127.0.0.1:{server.port}")
        check.expect("the server stopped" not in said, said)


if __name__ == "__main__":
    wire.main(content_types, hosts, origins, cors, wrong_flags, keys, values, echo, used_port, long="nothing more")

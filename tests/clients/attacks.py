"""Attacks on `march serve` that need no overload: other people's files, other web pages, and values that lie.

    python attacks.py --march target/release/march --models DIR [--long]

The server must touch only what it made itself in the folder for sessions, and let nobody else read it. Web pages of
others must not be able to use it through a browser. Wrong values must be refused with a message that names them.
`hanging.py` has the clients that hang, leave, or send too much.
"""

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

import serving
import wire
from wire import ask

MARKER = "march-sessions.json"
TURN = {"prompt": "Alice was", "max_tokens": 4, "temperature": 0}
EVIL = "https://evil.example"


def tree(*places):
    """All that is in some folders or files: kinds, modes, contents, and where links lead."""
    found = {}
    for place in places:
        inner = [Path(where, name) for where, folders, files in os.walk(place) for name in [*folders, *files]]
        for path in [place, *inner]:
            if path.is_symlink():
                found[path] = os.readlink(path)
            elif path.exists():
                content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
                found[path] = (path.stat().st_mode, content)
    return found


def changes(before, after):
    """What is different between two trees, in words."""
    missing = [f"{path} is gone" for path in before if path not in after]
    new = [f"{path} is new" for path in after if path not in before]
    other = [f"{path} is changed" for path in before if path in after and before[path] != after[path]]
    return "; ".join(map(str, missing + new + other))


@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory() as work:
        yield Path(work)


def serve(options, *flags, **more):
    return serving.server(options.march, options.model, *flags, threads=1, **more)


def refused(check, options, flags, needed, **more):
    """Notes whether a server refuses to start, with words that the message must have; returns the message."""
    code, said = serving.refused(options.march, options.model, *flags, threads=1, **more)
    what = " ".join(map(str, flags))
    check.expect(code != 0, f"{what}: the server started")
    check.expect("panicked" not in said and code in (0, 1, 2), f"{what}: code {code}: {said}")
    for one in needed:
        check.expect(one in said, f"{what}: the message does not have `{one}`: {said}")
    return said


def new_sessions(options, where, *ids):
    """Makes a folder for sessions with some sessions of one turn."""
    with serve(options, "--sessions", where) as server:
        for id in ids:
            ask(server.port, "PUT", f"/v1/sessions/{id}", {})
            ask(server.port, "POST", "/v1/completions", {**TURN, "session": id})


def foreign_folder(check, options):
    """A folder of others is refused as the folder for sessions, and not changed."""
    with folder() as work:
        runs = work / "runs"
        shutil.copytree(options.model, runs / "first-run")
        (work / "model").mkdir()
        shutil.copytree(options.model, work / "model", dirs_exist_ok=True)
        (work / "single").mkdir()
        (work / "single" / ".profile").write_text("umask 022\n", encoding="ascii")
        new_sessions(options, work / "mixed", "tea")
        # Without its marker, a folder in which there is anything but sessions may be anyone's.
        (work / "mixed" / MARKER).unlink(missing_ok=True)
        (work / "mixed" / "first-run").mkdir()
        (work / "mixed" / "first-run" / "log.jsonl").write_text("{}\n", encoding="ascii")
        for name in "runs", "model", "single", "mixed":
            before = tree(work / name)
            refused(check, options, ["--sessions", work / name], [str(work / name)])
            difference = changes(before, tree(work / name))
            check.expect(not difference, f"{name}: {difference}")
        refused(check, options, ["--sessions", work / "single" / ".profile"], [".profile"])


def strangers(check, options):
    """What others put into the folder for sessions is never changed or deleted."""
    with folder() as work:
        sessions, outside = work / "sessions", work / "outside"
        new_sessions(options, sessions, "tea", "copy")
        check.expect((sessions / MARKER).exists(), f"the folder has no {MARKER}")
        for path in sessions / "myrun", sessions / ".unfinished-x", outside, sessions / ".unfinished-y":
            path.mkdir()
        for path in sessions / "myrun", sessions / ".unfinished-x", outside:
            (path / "model.safetensors").write_bytes(bytes(range(256)))
        (sessions / "notes").write_text("mine\n", encoding="ascii")
        (sessions / "link").symlink_to(outside)
        # A session that someone moved and linked is no longer in our folder.
        shutil.move(sessions / "copy", work / "copy")
        (sessions / "linked").symlink_to(work / "copy")
        mine = ["myrun", "notes", ".unfinished-x", "link", "linked"]
        # The empty `.unfinished-y` may go: it is nobody's work, and a killed server leaves such a folder.
        places = [*(sessions / name for name in mine), outside, work / "copy"]
        before = tree(*places)
        for start in "first", "second":
            with serve(options, "--sessions", sessions) as server:
                for name in mine:
                    said = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "".join(server.said))
                    check.expect(said, f"{start} start: no warning about {name}")
                for id in "myrun", "notes", "link", "linked":
                    path = f"/v1/sessions/{id}"
                    for method, body in ("DELETE", None), ("PUT", {}), ("PUT", {"from": "tea"}), ("PUT", {"turns": 0}):
                        answer = ask(server.port, method, path, body)
                        check.status(answer, (400, 404, 409), f"{method} {id} {body}")
                    check.status(ask(server.port, "GET", path), (400, 404, 409), f"GET {id}")
                    answer = ask(server.port, "POST", "/v1/completions", {**TURN, "session": id})
                    check.status(answer, (400, 404, 409), f"a turn of {id}")
                    fork = ask(server.port, "PUT", "/v1/sessions/fork", {"from": id})
                    check.status(fork, (400, 404, 409), f"a fork of {id}")
                # A new session must not need the place of a stranger's folder, or must be refused.
                for id in "x", "y":
                    answer = ask(server.port, "PUT", f"/v1/sessions/{id}", {})
                    if check.status(answer, (200, 201, 409), f"PUT {id}") and answer.status != 409:
                        answer = ask(server.port, "DELETE", f"/v1/sessions/{id}")
                        check.status(answer, 200, f"DELETE {id}")
                difference = changes(before, tree(*places))
                check.expect(not difference, f"{start} start: {difference}")
                answer = ask(server.port, "POST", "/v1/completions", {**TURN, "session": "tea"})
                check.status(answer, 200, "a turn of our own session")


def stranger_in_session(check, options):
    """A session with someone's file in it is not deleted."""
    with folder() as work:
        new_sessions(options, work / "sessions", "tea")
        mine = work / "sessions" / "tea" / "thesis.txt"
        mine.write_text("the only copy", encoding="ascii")
        before = tree(work / "sessions" / "tea")
        with serve(options, "--sessions", work / "sessions") as server:
            check.status(ask(server.port, "DELETE", "/v1/sessions/tea"), 409, "DELETE")
            difference = changes(before, tree(work / "sessions" / "tea"))
            check.expect(not difference, difference)
            check.status(ask(server.port, "GET", "/v1/sessions/tea"), 200, "GET after the refusal")
            mine.unlink(missing_ok=True)
            check.status(ask(server.port, "DELETE", "/v1/sessions/tea"), 200, "DELETE without the file")
            check.expect(not (work / "sessions" / "tea").exists(), "the session is still there")


def earlier_folder(check, options):
    """A folder of an earlier version, which has no marker, is taken over."""
    with folder() as work:
        new_sessions(options, work / "sessions", "tea", "cake")
        (work / "sessions" / MARKER).unlink(missing_ok=True)
        with serve(options, "--sessions", work / "sessions") as server:
            for id in "tea", "cake":
                check.status(ask(server.port, "GET", f"/v1/sessions/{id}"), 200, f"GET {id}")
        check.expect((work / "sessions" / MARKER).exists(), f"{MARKER} was not made")


def modes(check, options):
    """Only the server's user can read sessions: folders 0700, files 0600, also under umask 000."""
    for umask in "000", "022":
        with folder() as work, serve(options, "--sessions", work / "a" / "b", before=f"umask {umask}") as server:
            for id in "tea", "cake":
                ask(server.port, "PUT", f"/v1/sessions/{id}", {})
                for _ in range(2):
                    ask(server.port, "POST", "/v1/completions", {**TURN, "session": id})
            ask(server.port, "PUT", "/v1/sessions/fork", {"from": "tea"})
            found = {path: what for path, what in tree(work / "a" / "b").items() if not isinstance(what, str)}
            check.expect(len(found) > 9, f"only {len(found)} files and folders")
            for path, (mode, content) in found.items():
                wanted = 0o700 if content is None else 0o600
                name = path.relative_to(work / "a")
                check.expect(mode & 0o7777 == wanted, f"umask {umask}: {name} has mode {mode & 0o7777:04o}")


def life(check, options):
    """Sessions live as before: made, continued, forked, shortened, deleted, and their ids used again."""
    with folder() as work:
        (work / "sessions").mkdir()
        for start in range(2):
            with serve(options, "--sessions", work / "sessions") as server:
                for again in range(2):
                    port = server.port
                    check.status(ask(port, "PUT", "/v1/sessions/tea", {}), 201, "PUT")
                    for turn in 1, 2:
                        answer = ask(port, "POST", "/v1/completions", {**TURN, "session": "tea"})
                        check.status(answer, 200, f"turn {turn}")
                    check.status(ask(port, "PUT", "/v1/sessions/two", {"from": "tea", "turns": 1}), 201, "a fork")
                    check.status(ask(port, "PUT", "/v1/sessions/tea", {"turns": 1}), 200, "fewer turns")
                    turns = {id: ask(port, "GET", f"/v1/sessions/{id}").json()["turns"] for id in ("tea", "two")}
                    check.expect(turns == {"tea": 1, "two": 1}, f"turns: {turns}")
                    for id in "tea", "two":
                        check.status(ask(port, "DELETE", f"/v1/sessions/{id}"), 200, f"DELETE {id}")
                        check.status(ask(port, "GET", f"/v1/sessions/{id}"), 404, f"GET of the deleted {id}")
        left = {path.name for path in (work / "sessions").iterdir()} - {MARKER, ".lock"}
        check.expect(not left, f"left in the folder: {left}")


def race(check, options):
    """PUT, DELETE, forks and turns of the same id at once never answer with 5xx."""
    counts, failures, lock = {}, [], threading.Lock()
    requests = [("PUT", "/v1/sessions/tea", {}), ("DELETE", "/v1/sessions/tea", None)]
    requests += [*requests, ("PUT", "/v1/sessions/tea", {"from": "base"})]
    requests += [("POST", "/v1/completions", {**TURN, "session": "tea"})]
    with folder() as work:
        new_sessions(options, work / "sessions", "base")
        with serve(options, "--sessions", work / "sessions") as server:
            end = time.monotonic() + (20 if options.long else 3)

            def go(method, path, body):
                while time.monotonic() < end:
                    answer = ask(server.port, method, path, body)
                    with lock:
                        counts[answer.status] = counts.get(answer.status, 0) + 1
                        if answer.status == 0 or answer.status >= 500:
                            failures.append(f"{method} {path} {body}: {answer}")

            threads = [threading.Thread(target=go, args=one) for one in requests]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            check.expect(not failures, f"{len(failures)} of {sum(counts.values())} requests, first {failures[:1]}")
            check.status(ask(server.port, "PUT", "/v1/sessions/tea", {}), (200, 201), "PUT after the race")
            check.status(ask(server.port, "DELETE", "/v1/sessions/tea"), 200, "DELETE after the race")
        left = {path.name for path in (work / "sessions").iterdir()} - {MARKER, ".lock", "base"}
        check.expect(not left, f"left in the folder: {left}")
    return ", ".join(f"status {status}: {count}" for status, count in sorted(counts.items()))


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
        evil = ["evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", f"localhost.evil.example"]
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
    for origin in "*", "http://x/path", "localhost", "null", "http://user@x", "ftp://x", "":
        refused(check, options, ["--cors", origin], ["--cors", origin])
    for name in "my.host/path", "http://my.host":
        refused(check, options, ["--host-name", name], ["--host-name", name])


def keys(check, options):
    """With a key, any name of the host works with it, and nothing without it."""
    with folder() as work:
        (work / "key").write_text("secret\n", encoding="ascii")
        with serve(options, "--api-key-file", work / "key") as server:
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--march", required=True)
    parser.add_argument("--models", required=True, help="a folder for checkpoints")
    parser.add_argument("--long", action="store_true", help="a longer race")
    options = parser.parse_args()
    options.model = serving.checkpoint(options.march, options.models)
    checks = wire.Checks(options)
    for check in foreign_folder, strangers, stranger_in_session, earlier_folder, modes, life, race:
        checks.run(check)
    for check in content_types, hosts, origins, cors, wrong_flags, keys, values, echo, used_port:
        checks.run(check)
    checks.end()


if __name__ == "__main__":
    main()

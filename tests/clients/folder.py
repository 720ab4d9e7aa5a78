"""The folder of `march serve --sessions`: the server touches only what it made itself, and lets nobody else read it.

    python folder.py --march target/release/march --models DIR [--long]

Folders of others are refused; what others put into the folder is never changed, deleted or followed.
"""

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
from wire import ask, refused, serve

MARKER = "march-sessions.json"
TURN = {"prompt": "Alice was", "max_tokens": 4, "temperature": 0}


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


class Work(tempfile.TemporaryDirectory):
    """A folder for a block of code."""

    def __enter__(self):
        return Path(super().__enter__())


def new_sessions(options, where, *ids):
    """Makes a folder for sessions with some sessions of one turn."""
    with serve(options, "--sessions", where) as server:
        for id in ids:
            ask(server.port, "PUT", f"/v1/sessions/{id}", {})
            ask(server.port, "POST", "/v1/completions", {**TURN, "session": id})


def foreign_folder(check, options):
    """A folder of others is refused as the folder for sessions, and not changed."""
    with Work() as work:
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
        # A link in place of the server's own file must not lead it to the file of someone else.
        (work / "linked").mkdir()
        (work / "linked" / ".lock").symlink_to(work / "single" / ".profile")
        before = tree(work / "single")
        with contextlib.suppress(serving.NotStarted), serve(options, "--sessions", work / "linked"):
            pass
        difference = changes(before, tree(work / "single"))
        check.expect(not difference, f"through a link `.lock`: {difference}")


def strangers(check, options):
    """What others put into the folder for sessions is never changed or deleted."""
    with Work() as work:
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
    """A session with someone's file in it is not deleted, whenever the file came."""
    with Work() as work:
        tea, cake = work / "sessions" / "tea", work / "sessions" / "cake"
        new_sessions(options, work / "sessions", "tea", "cake")
        (tea / "thesis.txt").write_text("the only copy", encoding="ascii")
        with serve(options, "--sessions", work / "sessions") as server:
            (cake / "photos").mkdir()
            before = tree(tea, cake)
            for id in "tea", "cake":
                check.status(ask(server.port, "DELETE", f"/v1/sessions/{id}"), 409, f"DELETE {id}")
                check.status(ask(server.port, "GET", f"/v1/sessions/{id}"), (200, 409), f"GET {id} after it")
            difference = changes(before, tree(tea, cake))
            check.expect(not difference, difference)
            if (cake / "photos").exists():
                (cake / "photos").rmdir()
            check.status(ask(server.port, "DELETE", "/v1/sessions/cake"), 200, "DELETE when the file is gone")
            check.expect(not cake.exists(), "the session is still there")


def earlier_folder(check, options):
    """A folder of an earlier version, which has no marker, is taken over."""
    with Work() as work:
        new_sessions(options, work / "sessions", "tea", "cake")
        (work / "sessions" / MARKER).unlink(missing_ok=True)
        with serve(options, "--sessions", work / "sessions") as server:
            for id in "tea", "cake":
                check.status(ask(server.port, "GET", f"/v1/sessions/{id}"), 200, f"GET {id}")
        check.expect((work / "sessions" / MARKER).exists(), f"{MARKER} was not made")


def modes(check, options):
    """Only the server's user can read sessions: folders 0700, files 0600, also under umask 000."""
    for umask in "000", "022":
        with Work() as work, serve(options, "--sessions", work / "a" / "b", before=f"umask {umask}") as server:
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
    with Work() as work:
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
    with Work() as work:
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


if __name__ == "__main__":
    wire.main(foreign_folder, strangers, stranger_in_session, earlier_folder, modes, life, race, long="a longer race")

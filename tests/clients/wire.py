"""Requests that are written by hand, and the list of checks: what the tests of attacks share."""

import argparse
import contextlib
import http.client
import json
import selectors
import socket
import sys
import threading
import time
import traceback

import serving

JSON = "application/json"
SMALL = {"prompt": "Alice was", "max_tokens": 2}
SHOWN = 5  # wrong things of one check


class Answer:
    """An answer: its status, its headers and its bytes. Status 0: the connection ended without one."""

    def __init__(self, status, headers, data):
        self.status, self.headers, self.data = status, headers, data

    def json(self):
        return json.loads(self.data)

    def message(self):
        """The message of an error; else the beginning of what came."""
        try:
            return self.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return self.data[:200].decode(errors="replace")

    def __str__(self):
        return f"status {self.status}: {self.message()[:200]}"


def connect(port, timeout=30, buffer=None):
    """A connection; `buffer` is the size of its buffer for what comes."""
    new = socket.socket()
    if buffer:
        new.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    new.settimeout(timeout)
    new.connect(("127.0.0.1", port))
    return new


def request(port, method, path, body=None, headers=None, version="HTTP/1.1"):
    """The bytes of a request. A body that is not bytes becomes JSON; a header of None is left out."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": f"127.0.0.1:{port}", "connection": "close"}
    if body is not None:
        lines |= {"content-type": JSON, "content-length": len(data)}
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"{method} {path} {version}\r\n{head}\r\n".encode() + data


def read(connection, method="GET"):
    """The answer that comes; interim ones (`100 Continue`) are skipped."""
    answer = http.client.HTTPResponse(connection, method=method)
    try:
        answer.begin()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        answer.close()


def ask(port, method, path, body=None, headers=None, version="HTTP/1.1", timeout=30):
    """The answer to a request on a connection of its own."""
    with connect(port, timeout) as connection:
        try:
            # A server may answer before it has read everything.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(request(port, method, path, body, headers, version))
            return read(connection, method)
        except (ConnectionError, http.client.BadStatusLine) as error:
            return Answer(0, {}, f"the connection ended without an answer ({error!r})".encode())


def metrics(port):
    """The counters."""
    lines = ask(port, "GET", "/metrics").data.decode().splitlines()
    return {name: int(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def closed(connections, within):
    """After how many seconds the server closed each connection, for those that it closed within some seconds."""
    start, found = time.monotonic(), []
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while (left := start + within - time.monotonic()) > 0 and selector.get_map():
            for key, _ in selector.select(left):
                try:
                    ended = not key.fileobj.recv(65536)
                except ConnectionError:
                    ended = True
                if ended:
                    selector.unregister(key.fileobj)
                    found.append(time.monotonic() - start)
    return found


def until(condition, within, pause=0.05):
    """Waits until a condition holds, at most some seconds. Returns the seconds, or None."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > within:
            return None
        time.sleep(pause)
    return time.monotonic() - start


def small(check, port, within, what):
    """Notes whether a small request is answered within some seconds."""
    start = time.monotonic()
    try:
        answer = ask(port, "POST", "/v1/completions", SMALL, timeout=within)
        check.status(answer, 200, what)
    except TimeoutError:
        check.expect(False, f"{what}: no answer within {within} s")
    return time.monotonic() - start


def serve(options, *flags, **more):
    """A server for a block of code, with one thread for the model."""
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


class Check:
    """One check: what did not hold, and how much was looked at."""

    def __init__(self):
        self.looked, self.wrong = 0, []

    def expect(self, holds, message):
        """Notes whether something holds."""
        self.looked += 1
        if not holds:
            self.wrong.append(str(message))
        return bool(holds)

    def status(self, answer, expected, what):
        """Notes whether an answer has one of the expected statuses."""
        expected = (expected,) if isinstance(expected, int) else expected
        wanted = " or ".join(map(str, expected))
        return self.expect(answer.status in expected, f"{what}: {answer}, instead of {wanted}")


class Checks:
    """Runs checks, which are functions of a Check and the options, and prints a line for each."""

    def __init__(self, options):
        self.options, self.failed, self.count, self.lock = options, [], 0, threading.Lock()

    def run(self, check):
        """Runs one check. What it returns is printed."""
        one, start, said = Check(), time.monotonic(), None
        try:
            said = check(one, self.options)
        except (RuntimeError, OSError, http.client.HTTPException) as error:
            one.wrong.append(f"{type(error).__name__}: {error}")
        except Exception:
            one.wrong.append(traceback.format_exc())
        name, seconds = check.__doc__.splitlines()[0].rstrip("."), time.monotonic() - start
        with self.lock:
            self.count += 1
            if one.wrong:
                self.failed.append(name)
                print(f"  WRONG ({seconds:.1f} s) {name}{'; ' + said if said else ''}")
                for message in one.wrong[:SHOWN]:
                    print(f"    {' '.join(message.split())[:600]}")
                if len(one.wrong) > SHOWN:
                    print(f"    and {len(one.wrong) - SHOWN} more, of {one.looked}")
            else:
                print(f"  held ({seconds:.1f} s, {one.looked} times) {name}{'; ' + said if said else ''}")
            sys.stdout.flush()

    def together(self, *checks):
        """Runs checks that mostly wait at the same time."""
        threads = [threading.Thread(target=self.run, args=(check,)) for check in checks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main(*groups, long, endless=False):
    """Runs checks, those of a tuple at the same time; `long` says what --long does, `endless` which model is used."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--march", required=True)
    parser.add_argument("--models", required=True, help="a folder for checkpoints")
    parser.add_argument("--long", action="store_true", help=long)
    options = parser.parse_args()
    options.model = serving.checkpoint(options.march, options.models, end_of_text=not endless)
    checks = Checks(options)
    for group in groups:
        checks.together(*group) if isinstance(group, tuple) else checks.run(group)
    if checks.failed:
        raise SystemExit(f"{len(checks.failed)} of {checks.count} checks failed")
    print(f"  all {checks.count} checks held")

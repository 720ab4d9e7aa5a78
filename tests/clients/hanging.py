"""Clients of `march serve` that hang or leave: the server goes on for the others, and ends when it is told to.

    python hanging.py --march target/release/march --models DIR [--long]

Connections that send half a request, or nothing, are closed by the server. A client that only closes its own direction
gets its answer; one that is gone frees its place.
"""

import contextlib
import re
import socket
import struct
import threading
import time

import serving
import wire
from wire import SMALL, ask, connect, request, serve, small, until

ENDLESS = 100_000  # tokens that take minutes


def half(port, timeout=30):
    """A connection with half a header."""
    new = connect(port, timeout)
    new.sendall(request(port, "POST", "/v1/completions", SMALL)[:60])
    return new


def begin(port, body, path="/v1/completions", extra=b"", **more):
    """A connection with a whole request, and perhaps something after it, whose answer is not read."""
    new = connect(port, **more)
    new.sendall(request(port, "POST", path, body) + extra)
    return new


def used(port):
    """A connection that had an answer and is kept open."""
    new = connect(port)
    new.sendall(request(port, "GET", "/health", None, {"connection": "keep-alive"}))
    wire.read(new)
    return new


@contextlib.contextmanager
def kept(connections):
    """Closes connections after a block of code."""
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def end_with_hanging(check, options):
    """SIGTERM with 100 half headers, and silent and idle connections, ends the server within 5 s."""
    server = serving.Server(options.march, options.model, threads=1)
    port = server.port
    opened = [*(half(port) for _ in range(100)), *(connect(port) for _ in range(10)), *(used(port) for _ in range(10))]
    with kept(opened):
        time.sleep(0.5)
        seconds = server.stop(within=20)
    check.expect(seconds < 5, f"the server took {seconds:.1f} s")
    return f"{seconds:.2f} s"


def half_headers(check, options):
    """Half headers, and headers that come byte for byte, are closed after `--header-seconds`."""
    count = 600 if options.long else 100
    flags = ["--header-seconds", 1, "--idle-seconds", 2, "--connections", 2 * count]
    with serve(options, *flags) as server:
        port = server.port
        hanging = [half(port) for _ in range(count)]
        hanging += [connect(port) for _ in range(5)]
        # The second request of a connection may hang as well.
        again = [used(port) for _ in range(5)]
        for connection in again:
            connection.sendall(b"GET /health HT")
        slow = [half(port) for _ in range(5)]
        over = threading.Event()

        def trickle():
            while not over.wait(0.2):
                for connection in slow:
                    with contextlib.suppress(OSError):
                        connection.send(b"a")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with kept(hanging + again + slow) as all:
                seconds = small(check, port, 3, "a normal request meanwhile")
                found = wire.closed(all, 6)
        finally:
            over.set()
            thread.join()
        check.expect(len(found) == len(all), f"{len(all) - len(found)} of {len(all)} are not closed after 6 s")
        small(check, port, 3, "a normal request afterwards")
    return f"{len(all)} closed after {max(found, default=0):.1f} s; a request meanwhile took {seconds:.2f} s"


def idle(check, options):
    """An idle connection is closed after `--idle-seconds`, but not one whose answer takes longer."""
    with serve(options, "--idle-seconds", 1, "--header-seconds", 1) as server, kept([used(server.port)]) as connections:
        waits = begin(server.port, {**SMALL, "max_tokens": 2500})
        found = wire.closed(connections, 5)
        if check.expect(found, "an idle connection is not closed after 5 s"):
            check.expect(found[0] > 0.4, f"an idle connection is closed after {found[0]:.1f} s")
        with waits:
            answer = wire.read(waits)
        if check.status(answer, 200, "an answer of some seconds"):
            tokens = answer.json()["usage"]["completion_tokens"]
            check.expect(tokens == 2500, f"the answer has {tokens} tokens")
    return f"after {found[0]:.1f} s" if found else None


def slow_reader(check, options):
    """A client that reads a large answer slowly, but without a stop, gets all of it."""
    with serve(options, "--idle-seconds", 1) as server:
        body = {"prompt": "a" * (3 << 20)}
        data = b""
        with begin(server.port, body, "/tokenize", buffer=65536) as connection:
            try:
                while part := connection.recv(1 << 20):
                    data += part
                    # About 3 MB per second.
                    time.sleep(len(part) / (3 << 20))
            except OSError as error:
                check.expect(False, f"{error!r} after {len(data)} bytes")
    head, _, answer = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    check.expect(length and len(answer) == int(length[1]), f"{len(answer)} bytes of {head!r}")
    return f"{len(answer) >> 20} MiB"


def few_files(check, options):
    """With room for 64 open files, 200 hanging connections keep a normal client out for 10 s at most."""
    flags = ["--header-seconds", 2]
    with serve(options, *flags, before="ulimit -n 64") as server, kept([]) as hanging:
        # The system's queue for connections that the server has not taken may be full before.
        with contextlib.suppress(TimeoutError):
            while len(hanging) < 200:
                hanging.append(half(server.port, 1))
        start, answer = time.monotonic(), None
        while time.monotonic() < start + 10:
            with contextlib.suppress(OSError):
                answer = ask(server.port, "GET", "/health", timeout=start + 10.1 - time.monotonic())
                if answer.status == 200:
                    break
            time.sleep(0.1)
        seconds = time.monotonic() - start
        check.expect(answer and answer.status == 200, f"not served within 10 s: {answer or 'no answer'}")
    return f"served after {seconds:.1f} s"


def connections(check, options):
    """Beyond `--connections`, a client is refused with 503 or waits, and the log says so."""
    with serve(options, "--connections", 8, "--header-seconds", 3) as server:
        with kept([half(server.port) for _ in range(8)]):
            time.sleep(0.3)
            answer = ask(server.port, "GET", "/health", timeout=8)
            check.status(answer, (200, 503), "the ninth client")
            again = until(lambda: ask(server.port, "GET", "/health", timeout=8).status == 200, 8)
            check.expect(again is not None, "nobody is served after the hanging clients' time")
    said = "".join(server.said)
    check.expect("connections" in said.split("Ctrl-C stops", 1)[1], f"the log does not mention connections: {said}")
    return f"status {answer.status}"


def streamed(answer):
    """The number of parts with text of a streamed answer that ended with [DONE]; None without it."""
    parts, done = serving.parts(answer.data.decode().splitlines())
    return sum(bool(part["choices"]) for part in parts) if done else None


def half_closed(check, options):
    """A client that closes its direction after the request gets its whole answer."""
    # The longest takes some seconds.
    counts = [2, 1500]
    with serve(options) as server, contextlib.ExitStack() as stack:
        waiting = []
        for tokens in counts:
            for stream in False, True:
                body = {**SMALL, "max_tokens": tokens, "stream": stream}
                connection = stack.enter_context(begin(server.port, body, timeout=60))
                connection.shutdown(socket.SHUT_WR)
                waiting.append((connection, tokens, stream))
        old = stack.enter_context(connect(server.port, 60))
        old.sendall(request(server.port, "POST", "/v1/completions", {**SMALL, "max_tokens": 800}, version="HTTP/1.0"))
        old.shutdown(socket.SHUT_WR)
        start = time.monotonic()
        for connection, tokens, stream in waiting:
            what = f"{tokens} tokens, stream {stream}"
            try:
                answer = wire.read(connection)
            except Exception as error:
                check.expect(False, f"{what}: {error!r}")
                continue
            if check.status(answer, 200, what):
                found = streamed(answer) if stream else answer.json()["usage"]["completion_tokens"]
                check.expect(found and (found >= tokens if stream else found == tokens), f"{what}: {found} came")
        seconds = time.monotonic() - start
        # Interim answers such as `100 Continue` are not for clients of HTTP/1.0.
        try:
            first = old.recv(15)
        except OSError as error:
            first = repr(error).encode()
        check.expect(re.match(rb"HTTP/1\.[01] 200", first), f"a client of HTTP/1.0 gets {first}")
    return f"the longest took {seconds:.1f} s"


def leave(connections, abort):
    """Closes connections; `abort` does it with a reset."""
    for connection in connections:
        if abort:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def busy(port):
    counters = wire.metrics(port)
    return counters["march_active_texts"], counters["march_waiting_requests"]


def left(check, options):
    """A client that is gone frees its place, whether its request runs or waits."""
    slowest = 0
    with serve(options, "--batch", 1) as server:
        port, count = server.port, 0
        # With a line or a request after the first one, that the client is gone is not what the server reads next.
        ways = [(False, False, b""), (True, True, b""), (False, False, b"\r\n")]
        if options.long:
            ways += [(False, True, b""), (True, False, b""), (False, True, request(port, "GET", "/health"))]
        for abort, stream, extra in ways:
            what = f"{'a reset' if abort else 'closed'}, first with stream {stream}, then {extra[:10]}"
            body = {**SMALL, "max_tokens": ENDLESS}
            clients = [begin(port, {**body, "stream": stream}, extra=extra)]
            check.expect(until(lambda: busy(port) == (1, 0), 5) is not None, f"{what}: it does not run: {busy(port)}")
            clients += [begin(port, {**body, "stream": number == 1}, extra=extra) for number in range(3)]
            check.expect(until(lambda: busy(port) == (1, 3), 5) is not None, f"{what}: {busy(port)} and not (1, 3)")
            # First those that wait, while another runs.
            leave(clients[1:], abort)
            seconds = until(lambda: busy(port) == (1, 0), 6)
            check.expect(seconds is not None, f"{what}: waiting clients left; (active, waiting) is {busy(port)}")
            slowest = max(slowest, seconds or 6)
            leave(clients[:1], abort)
            seconds = until(lambda: busy(port) == (0, 0), 6)
            check.expect(seconds is not None, f"{what}: all clients left; (active, waiting) is {busy(port)}")
            slowest = max(slowest, seconds or 6)
            count += len(clients)
            cancelled = wire.metrics(port)["march_cancelled_total"]
            check.expect(cancelled == count, f"{what}: cancelled {cancelled} and not {count}")
            if check.wrong:
                # The places are taken, and the rest would only wait.
                server.kill()
                raise RuntimeError("given up")
        small(check, port, 3, "a normal request afterwards")
    return f"the slowest took {slowest:.2f} s"


def queue(check, options):
    """Clients that leave while they wait do not fill the queue."""
    with serve(options, "--batch", 1, "--queue", 4) as server:
        port = server.port
        with begin(port, {**SMALL, "max_tokens": ENDLESS}):
            until(lambda: busy(port) == (1, 0), 5)
            for round in range(3):
                clients = [begin(port, {**SMALL, "max_tokens": ENDLESS}) for _ in range(4)]
                full = until(lambda: busy(port) == (1, 4), 5)
                check.expect(full is not None, f"round {round}: (active, waiting) is {busy(port)} and not (1, 4)")
                check.status(ask(port, "POST", "/v1/completions", SMALL), 429, f"round {round}: a fifth client")
                leave(clients, False)
                time.sleep(1)
                # One more waits for the first; what must not come is a refusal.
                with begin(port, SMALL, timeout=0.5) as late, contextlib.suppress(TimeoutError):
                    refusal = wire.read(late)
                    check.expect(False, f"round {round}: a client a second after the others left: {refusal}")
            cancelled = wire.metrics(port)["march_cancelled_total"]
            check.expect(cancelled >= 12, f"cancelled {cancelled} and not 12 or more")
        until(lambda: busy(port) == (0, 0), 5)
        small(check, port, 3, "a normal request afterwards")


def drain(check, options):
    """SIGTERM ends requests that take longer than `--drain-seconds`, and finishes others."""
    server = serving.Server(options.march, options.model, "--drain-seconds", 2, threads=1)
    body = {**SMALL, "max_tokens": ENDLESS}
    with begin(server.port, body), begin(server.port, {**body, "stream": True}):
        until(lambda: busy(server.port) == (2, 0), 5)
        seconds = server.stop(within=20)
    check.expect(seconds < 5, f"the server took {seconds:.1f} s")
    server = serving.Server(options.march, options.model, threads=1)
    body = {**SMALL, "max_tokens": 800}
    with begin(server.port, body) as waits, begin(server.port, {**body, "stream": True}) as streams:
        until(lambda: busy(server.port) == (2, 0), 5, 0.01)
        more = server.stop(within=20)
        answer = wire.read(waits)
        check.expect(answer.status == 200 and answer.json()["usage"]["completion_tokens"] == 800, answer)
        answer = wire.read(streams)
        check.expect(answer.status == 200 and streamed(answer), answer)
    return f"{seconds:.1f} s with requests of minutes, {more:.1f} s with requests of a second"


def slow(check, options):
    """Bodies of one byte per second, and a stream that is not read, stop nobody, nor the end of the server."""
    server = serving.Server(options.march, options.model, "--drain-seconds", 2, threads=1)
    port, over = server.port, threading.Event()
    # They announce much and send little.
    writers = [connect(port) for _ in range(8)]
    for writer in writers:
        writer.sendall(request(port, "POST", "/v1/completions", b'{"prompt": "', {"content-length": 16 << 20}))

    def trickle():
        while not over.wait(1):
            for writer in writers:
                with contextlib.suppress(OSError):
                    writer.send(b"a")

    thread = threading.Thread(target=trickle)
    thread.start()
    stream = {**SMALL, "max_tokens": ENDLESS, "stream": True}
    with kept(writers), begin(port, stream, buffer=2048):
        try:
            time.sleep(0.3)
            longest = max(small(check, port, 3, "a normal request") for _ in range(10))
            large = {"prompt": "a" * 1_000_000}
            served = until(lambda: ask(port, "POST", "/tokenize", large).status == 200, 3)
            check.expect(served is not None, f"a body of 1 MB: {ask(port, 'POST', '/tokenize', large)}")
            seconds = server.stop(within=20)
        finally:
            over.set()
            thread.join()
            if server.process.poll() is None:
                server.kill()
    check.expect(seconds < 5, f"the server took {seconds:.1f} s to end")
    return f"a normal request took {longest:.2f} s at most, the end {seconds:.1f} s"


if __name__ == "__main__":
    waiting = end_with_hanging, half_headers, idle, slow_reader, few_files, connections
    wire.main(waiting, (drain, slow, queue, left), half_closed, long="more connections and ways to leave", endless=True)

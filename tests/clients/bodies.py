"""Huge bodies: `march serve` refuses them without much memory, and answers others meanwhile.

    python bodies.py --march target/release/march --models DIR [--long]

A body of some megabytes must not become many times its size in memory, whatever its shape.
"""

import contextlib
import json
import re
import threading
import time

import wire
from wire import SMALL, ask, serve, small

MOST = 512 << 20  # bytes of memory that huge bodies may cost
LARGE = 14 << 20  # bytes of a huge body


def filled(start, one, end, size=LARGE):
    """A body that repeats a part."""
    return start + one * ((size - len(start) - len(end)) // len(one)) + end


def shapes(long):
    """Bodies of many megabytes: what they are, and where they are sent."""
    completions, chat = "/v1/completions", "/v1/chat/completions"
    nothing = b'{"role":"user","content":""}'
    all = [
        ("ids", completions, filled(b'{"prompt": [', b"1,", b"1]}")),
        ("stop strings", completions, filled(b'{"prompt": "a", "stop": [', b'"abcdef",', b'"a"]}')),
        ("ids to decode", "/detokenize", filled(b'{"tokens": [', b"97,", b"97]}")),
    ]
    more = [
        ("numbers as memory", completions, filled(b'{"prompt": "a", "memory": [', b"1,", b"1]}")),
        ("nested messages", chat, filled(b'{"messages": [', b"[[[[[[]]]]]],", b"[]]}")),
        ("messages of nothing", chat, filled(b'{"messages": [', b"{},", b"{}]}")),
        ("empty messages", chat, filled(b'{"messages": [', nothing + b",", nothing + b"]}")),
        ("deep lists", completions, filled(b'{"prompt": ', b"[", b"")),
        ("empty prompts", completions, filled(b'{"prompt": [', b'"",', b'""]}')),
        ("a text", completions, filled(b'{"prompt": "', b"a", b'"}')),
        ("a text to encode", "/tokenize", filled(b'{"prompt": "', b"a", b'"}')),
        ("a message", chat, filled(b'{"messages": [{"role": "user", "content": "', b"a", b'"}]}')),
        ("keys", completions, b"{" + b"".join(b'"k%d":1,' % key for key in range(1_200_000)) + b'"prompt":"a"}'),
        ("a policy", "/v1/sessions/tea", filled(b'{"memory": "', b"interval=8 ", b'"}')),
    ]
    return all + more if long else all


def bodies(check, options):
    """Eight bodies of 14 MB at once cost less than 512 MiB, and are refused."""
    said = []
    for name, path, body in shapes(options.long):
        with serve(options) as server:
            small(check, server.port, 5, "a normal request")
            before, statuses = server.resident(), []

            def send():
                method = "PUT" if path.startswith("/v1/sessions") else "POST"
                # Texts to encode and to decode are no requests of the model, and may be answered.
                answer = ask(server.port, method, path, body, timeout=60)
                fine = range(400, 500) if path not in ("/tokenize", "/detokenize") else range(200, 500)
                check.expect(answer.status in fine or answer.status == 503, f"{name}: {answer}")
                statuses.append(answer.status)

            threads = [threading.Thread(target=send) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            grown = server.peak() - before
            check.expect(len(statuses) == 8, f"{name}: only {len(statuses)} answers")
            check.expect(grown < MOST, f"{name}: {grown >> 20} MiB more than before; statuses {sorted(statuses)}")
            small(check, server.port, 5, "a normal request afterwards")
            said.append(f"{name} {grown >> 20} MiB ({', '.join(map(str, sorted(set(statuses))))})")
    return ", ".join(said)


def chunked(check, options):
    """Small bodies that do not say their length are answered, also many at once."""
    with serve(options) as server, contextlib.ExitStack() as stack:
        sent = json.dumps(SMALL).encode()
        clients = [stack.enter_context(wire.connect(server.port)) for _ in range(32)]
        length = {"content-length": None, "transfer-encoding": "chunked"}
        head = wire.request(server.port, "POST", "/v1/completions", b"", length)
        for client in clients:
            client.sendall(head + b"%x\r\n%s\r\n" % (len(sent), sent))
        time.sleep(0.3)
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(b"0\r\n\r\n")
            check.status(wire.read(client), 200, "a body in chunks")


def stops(check, options):
    """1.5 million stop strings are refused with the limits, and do not delay others."""
    body = b'{"prompt": "a", "max_tokens": 200, "stop": [' + b'"abcd",' * 1_499_999 + b'"abcd"]}'
    with serve(options) as server:
        answers, longest, count = [], 0, 0

        def send():
            answers.append(ask(server.port, "POST", "/v1/completions", body, timeout=60))

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or count < 5:
            longest, count = max(longest, small(check, server.port, 30, "a normal request meanwhile")), count + 1
        check.expect(len(answers) == 2, f"only {len(answers)} answers")
        check.expect(longest < 1, f"a normal request took {longest:.2f} s meanwhile")
        for answer in answers:
            if check.status(answer, 400, "1.5 million stop strings"):
                said = answer.message()
                check.expect("stop" in said and re.search(r"\d", said), f"the limits are not in the message: {said}")
        fine = ask(server.port, "POST", "/v1/completions", {**SMALL, "stop": ["a", "b", "c", "d"]})
        check.status(fine, 200, "four stop strings")
    return f"a normal request took {longest:.2f} s at most; {answers[0].message()[:160] if answers else ''}"


if __name__ == "__main__":
    wire.main(bodies, chunked, stops, long="bodies of more shapes", endless=True)

"""Many clients at once, some of them badly behaved: no answer is lost or changed, and the server's memory stays flat.

    python load.py --march target/release/march --models DIR [--clients 16] [--requests 6] [--long]

What each request gets alone, from a server without cache, is asked first. Under load, every finished answer must be
the same. Clients break off, read slowly, send bad and huge bodies, talk in conversations, and repeat what is refused
with 429.
"""

import argparse
import asyncio
import collections
import json
import random
import socket
import sys
import time

import httpx
import serving

CACHE = 16 << 20  # bytes for the states of earlier texts
BODY = 256 << 10  # bytes of the largest body
GROWTH = 0.10  # how much more memory the load may leave than the warm-up
SLACK = 8 << 20  # and this many bytes
STORY = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "


def requests():
    """The requests: paths and bodies."""
    chance = random.Random(0)
    all = []
    for number in range(40):
        start = STORY * chance.choice([0, 1, 1, 4, 15]) + STORY[: chance.randrange(1, len(STORY))]
        body = {
            "model": "tiny",
            "max_tokens": chance.choice([1, 5, 20, 60, 100]),
            "temperature": chance.choice([0, 0.5, 1, 1.5]),
            "seed": number,
            "stream": number % 2 == 0,
        }
        if chance.random() < 0.2:
            body["n"] = 3
        if chance.random() < 0.2:
            body["memory"] = chance.choice(["interval=8 top-k=2", "interval=32 storage=int8"])
        if chance.random() < 0.2:
            body["stop"] = ["the", "\n"]
        if number % 4 < 2:
            path = "/v1/completions"
            body |= {"prompt": start, "logprobs": chance.choice([0, 3])}
            if chance.random() < 0.2:
                body["echo"] = True
        else:
            path = "/v1/chat/completions"
            body |= {"messages": [{"role": "user", "content": start}], "logprobs": True, "top_logprobs": 2}
        all.append((path, body))
    return all


BAD = [b"", b"{", b"[]", b"{}", b"\xff\xfe"]
BAD += [b'{"prompt": 1}', b'{"prompt": "a", "temperature": -1}', b'{"prompt": "a", "x": 1}']


def whole(answer):
    """The choices of an answer, by index: text, log-probabilities and reason."""
    found = {}
    for choice in answer["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        found[choice["index"]] = (text, entries(choice["logprobs"]), choice["finish_reason"])
    return found


def entries(logprobs):
    if not logprobs:
        return []
    if "content" in logprobs:
        return logprobs["content"]
    return list(zip(*(logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))))


def joined(parts):
    """The same from the parts of a stream."""
    found = {}
    for part in parts:
        for choice in part["choices"]:
            text, values, _ = found.get(choice["index"], ("", [], None))
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = (text, values + entries(choice.get("logprobs")), choice["finish_reason"])
    return found


class Failed(Exception):
    """An answer that must not be."""


class Refused(Exception):
    """Status 429."""


async def answer(http, path, body, pause=0.0):
    """The choices of a request's answer; `pause` is a slow reader's, in seconds."""
    if not body["stream"]:
        got = await http.post(path, json=body)
        if got.status_code == 429:
            raise Refused(got.headers["retry-after"])
        if got.status_code != 200:
            raise Failed(f"status {got.status_code}: {got.text}")
        return whole(got.json())
    lines = []
    async with http.stream("POST", path, json=body) as stream:
        if stream.status_code == 429:
            raise Refused(stream.headers["retry-after"])
        if stream.status_code != 200:
            raise Failed(f"status {stream.status_code}: {await stream.aread()}")
        if pause:
            await asyncio.sleep(1)
        async for line in stream.aiter_lines():
            lines.append(line)
            if pause:
                await asyncio.sleep(pause)
    parts, done = serving.parts(lines)
    if parts and "error" in parts[-1]:
        raise Failed(f"a stream with an error: {parts[-1]}")
    if not done:
        raise Failed("a stream without [DONE]")
    return joined(parts)


class Load:
    """The clients."""

    def __init__(self, url, asked, expected):
        self.url, self.asked, self.expected = url, asked, expected
        self.counts = collections.Counter()
        self.failures = []

    async def run(self, clients, each, seed):
        chances = [random.Random(f"{seed} {number}") for number in range(clients)]
        await asyncio.gather(*(self.client(number, each, chance) for number, chance in enumerate(chances)))

    async def client(self, number, each, chance):
        # A small buffer, so that a slow reader is felt by the server.
        small = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
        limits = {"base_url": self.url, "timeout": 300}
        async with httpx.AsyncClient(**limits) as http, httpx.AsyncClient(**limits, transport=small) as slow:
            for request in range(each):
                kind = chance.choices(
                    ["ask", "cancel", "leave", "bad", "huge", "slow", "talk"], [60, 12, 3, 6, 4, 6, 9]
                )[0]
                self.counts["requests"] += 1
                try:
                    while True:
                        try:
                            await getattr(self, kind)(slow if kind == "slow" else http, chance, f"c{number}-{request}")
                            break
                        except Refused as refused:
                            self.counts["repeated after 429"] += 1
                            await asyncio.sleep(float(str(refused)) * chance.uniform(0.3, 1.2))
                    self.counts[kind] += 1
                except (Failed, httpx.HTTPError, KeyError, ValueError) as error:
                    self.failures.append(f"{kind}: {type(error).__name__}: {error}")

    async def ask(self, http, chance, _, pause=0.0):
        number = chance.randrange(len(self.asked))
        found = await answer(http, *self.asked[number], pause)
        if found != self.expected[number]:
            raise Failed(f"request {number}: {found} instead of {self.expected[number]}")

    async def slow(self, http, chance, name):
        await self.ask(http, chance, name, pause=0.02)

    async def cancel(self, http, chance, _):
        """Closes a stream after some parts."""
        path, body = chance.choice(self.asked)
        wanted = chance.randrange(6)
        async with http.stream("POST", path, json={**body, "stream": True, "max_tokens": 500}) as stream:
            if stream.status_code == 429:
                await stream.aread()
                raise Refused(stream.headers["retry-after"])
            if stream.status_code != 200:
                raise Failed(f"status {stream.status_code}: {await stream.aread()}")
            async for line in stream.aiter_lines():
                wanted -= line.startswith("data")
                if wanted < 0:
                    break

    async def leave(self, http, chance, _):
        """Goes away while it sends a request, or before any answer."""
        host, port = self.url.removeprefix("http://").split(":")
        path, body = chance.choice(self.asked)
        data = json.dumps({**body, "stream": False}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\n"
        head = f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + data[: chance.choice([0, len(data) // 2, len(data)])])
        await writer.drain()
        await asyncio.sleep(chance.uniform(0, 0.1))
        writer.transport.abort()

    async def bad(self, http, chance, _):
        headers = {"content-type": "application/json"}
        got = await http.post("/v1/completions", content=chance.choice(BAD), headers=headers)
        if got.status_code != 400 or not got.json()["error"]["message"]:
            raise Failed(f"status {got.status_code}: {got.text}")

    async def huge(self, http, chance, _):
        got = await http.post("/v1/completions", json={"prompt": "a" * (BODY + chance.randrange(BODY))})
        if got.status_code != 413 or not got.json()["error"]["message"]:
            raise Failed(f"status {got.status_code}: {got.text}")

    async def talk(self, http, chance, name):
        """A conversation of two turns, which together are one request with all messages."""
        path = f"/v1/sessions/{name}"
        if (got := await http.put(path, json={})).status_code not in (200, 201):
            raise Failed(f"status {got.status_code}: {got.text}")
        body = {"max_tokens": 20, "temperature": 0, "logprobs": 0, "stream": False}
        first = await answer(http, "/v1/completions", {**body, "prompt": STORY, "session": name})
        turns = (await http.get(path)).json()["turns"]
        try:
            second = await answer(http, "/v1/completions", {**body, "prompt": " So", "session": name})
        finally:
            # A refused conversation begins again.
            deleted = await http.delete(path)
        if turns != 1 or deleted.status_code != 200:
            raise Failed(f"{turns} turns, deleted with status {deleted.status_code}")
        if (first, second) != self.expected["talk"]:
            raise Failed(f"a conversation: {(first, second)} instead of {self.expected['talk']}")


async def alone(url, asked):
    """What the requests get one after the other."""
    expected = {}
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        for number, (path, body) in enumerate(asked):
            expected[number] = await answer(http, path, body)
        body = {"max_tokens": 20, "temperature": 0, "logprobs": 0, "stream": False}
        first = await answer(http, "/v1/completions", {**body, "prompt": STORY})
        text = STORY + first[0][0] + " So"
        expected["talk"] = (first, await answer(http, "/v1/completions", {**body, "prompt": text}))
    return expected


async def idle(url):
    """Waits until nothing runs or waits; returns the counters."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for _ in range(300):
            lines = [line.rsplit(" ", 1) for line in (await http.get("/metrics")).text.splitlines() if line[0] != "#"]
            counters = {name: int(value) for name, value in lines}
            if counters["march_active_texts"] == 0 == counters["march_waiting_requests"]:
                return counters
            await asyncio.sleep(0.1)
    raise Failed(f"places do not become free: {counters}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--march", required=True)
    parser.add_argument("--models", required=True, help="a folder for checkpoints")
    parser.add_argument("--clients", type=int, help="[default: 16; 64 with --long]")
    parser.add_argument("--requests", type=int, help="of each client [default: 6; 50 with --long]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long", action="store_true")
    options = parser.parse_args()
    clients = options.clients or (64 if options.long else 16)
    each = options.requests or (50 if options.long else 6)
    model = serving.trained(options.march, options.models)
    asked = requests()
    with serving.server(options.march, model, "--cache-bytes", 0) as server:
        expected = asyncio.run(alone(server.url, asked))
    # Few places, so that some requests are refused with 429.
    flags = ["--batch", 8, "--queue", clients // 3, "--cache-bytes", CACHE, "--body-bytes", BODY]
    with serving.server(options.march, model, *flags) as server:
        load = Load(server.url, asked, expected)
        asyncio.run(load.run(clients, max(3, each // 3), f"warm-up {options.seed}"))
        asyncio.run(idle(server.url))
        before, load.counts = server.resident(), collections.Counter()
        start = time.monotonic()
        asyncio.run(load.run(clients, each, options.seed))
        seconds = time.monotonic() - start
        counters = asyncio.run(idle(server.url))
        after = server.resident()
    failures = load.failures
    counts = load.counts
    ended = sum(counts[kind] for kind in ("ask", "cancel", "leave", "bad", "huge", "slow", "talk"))
    names = {
        "requests": "requests",
        "ask": "  answered, equal to the answer alone",
        "slow": "  answered to a slow reader, equal",
        "talk": "  conversations, equal",
        "cancel": "  broken off in a stream",
        "leave": "  broken off before an answer",
        "bad": "  refused with 400",
        "huge": "  refused with 413",
        "repeated after 429": "repeated after 429",
    }
    print(f"  {clients} clients, {each} requests each, {seconds:.1f} s")
    for key, name in names.items():
        print(f"  {name}: {counts[key]}")
    print(f"  memory after the warm-up {before / 2**20:.1f} MiB, after the load {after / 2**20:.1f} MiB")
    print(f"  cancelled in the server, with the warm-up: {counters['march_cancelled_total']}")
    if not failures and ended != counts["requests"]:
        failures.append(f"{counts['requests'] - ended} requests are lost")
    if after > before * (1 + GROWTH) + SLACK:
        failures.append("the server's memory grows")
    if counters['march_answers_total{status="5xx"}'] or counters["march_failed_steps_total"]:
        failures.append(f"failures in the server: {counters}")
    if counters["march_sessions"] > 0:
        failures.append(f"{counters['march_sessions']} conversations are left")
    for failure, times in collections.Counter(failures).items():
        print(f"  wrong, {times} times: {failure[:1000]}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

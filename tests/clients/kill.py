"""Kills `march serve` (`kill -9`) at random moments of conversations, and damages their files.

    python kill.py --march target/release/march --models DIR [--kills 50] [--damages 200] [--long]

After each kill the server is started again with the same folder. A conversation must then have exactly the turns whose
end the client saw. A change that the client did not see finished (a turn, a new, forked, shortened or deleted
conversation) is there as a whole or not at all. The conversation goes on, with the same text and the same
log-probabilities as on a server that is never stopped.

A conversation with a damaged file must either go on in the same way, or be refused with a message.
"""

import argparse
import collections
import json
import random
import shutil
import tempfile
import threading
import time
from pathlib import Path

import httpx
import serving

TURNS = 4  # of a conversation, before it is deleted
TALKS = 3  # conversations at once
STORY = "There was nothing so very remarkable in that; nor did Alice think it so very much out of the way. "
# What may be said in each turn: some long texts, so that reading takes a while.
SAID = [STORY * 30, "And then?", "What did the Rabbit say? " + STORY * 8, "Why?", "Tell me more. " + STORY * 2]
PRESETS = ["tiny/march", "tiny/gdn", "tiny/memory-caching", "tiny/log-linear", "tiny/transformer"]
FINAL = "stop", "length"


class Wrong(Exception):
    """The server did something that it must not do."""


class Gone(Exception):
    """The server was killed during the request."""


def body_of(path):
    """The request that adds the last turn of a path, which is a tuple of places in SAID."""
    return {
        "messages": [{"role": "user", "content": SAID[path[-1]]}],
        "max_tokens": 80,
        "seed": sum(path) + len(path),
        "temperature": 0.8,
        "logprobs": True,
        "top_logprobs": 1,
        # Every second turn is streamed.
        "stream": len(path) % 2 == 0,
    }


class Client:
    """Asks a server, and says what it is doing in `at`."""

    def __init__(self, url):
        self.http = httpx.Client(base_url=url, timeout=300)
        self.at = "between"

    def ask(self, method, path, body=None):
        """The status and the JSON of an answer."""
        try:
            answer = self.http.request(method, path, json=body)
            return answer.status_code, answer.json()
        except (httpx.TransportError, json.JSONDecodeError) as error:
            raise Gone(f"{method} {path} was not answered: {error}") from error

    def turn(self, id, path):
        """The text and the log-probabilities of a turn."""
        body = {**body_of(path), "session": id}
        self.at = "reading"
        if not body["stream"]:
            status, answer = self.ask("POST", "/v1/chat/completions", body)
            self.at = "between"
            if status != 200:
                raise Wrong(f"turn {len(path)} of {id}: status {status}: {answer}")
            choice = answer["choices"][0]
            return choice["message"]["content"], values(choice["logprobs"])
        text, entries, done = "", [], False
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as stream:
                if stream.status_code != 200:
                    raise Wrong(f"turn {len(path)} of {id}: status {stream.status_code}: {stream.read()!r}")
                for line in stream.iter_lines():
                    parts, done = serving.parts([line])
                    for part in parts:
                        if "error" in part:
                            raise Wrong(f"turn {len(path)} of {id}: {part}")
                        for choice in part["choices"]:
                            text += choice["delta"].get("content", "")
                            entries += values(choice.get("logprobs"))
                            self.at = "saving" if choice["finish_reason"] in FINAL else "writing"
                    if done:
                        break
        except httpx.TransportError as error:
            raise Gone from error
        if not done:
            raise Gone
        self.at = "between"
        return text, entries


def values(logprobs):
    return [(entry["token"], entry["logprob"]) for entry in (logprobs or {}).get("content", [])]


def difference(found, expected):
    if found[0] != expected[0]:
        return f"answered {found[0]!r} instead of {expected[0]!r}"
    return f"the log-probabilities are {found[1]} instead of {expected[1]}"


class Reference:
    """What conversations are on a server that is never stopped and that keeps nothing else."""

    def __init__(self, url):
        self.client = Client(url)
        self.known = {}
        self.lock = threading.Lock()
        self.sessions = 0

    def answer(self, path):
        """The text and the log-probabilities of the last turn of a path."""
        with self.lock:
            if path not in self.known:
                self.sessions += 1
                id = f"reference-{self.sessions}"
                self.client.ask("PUT", f"/v1/sessions/{id}", {})
                for end in range(1, len(path) + 1):
                    self.known[path[:end]] = self.client.turn(id, path[:end])
                self.client.ask("DELETE", f"/v1/sessions/{id}")
            return self.known[path]

    def history(self, path):
        """The turns of a path, as the server shows them."""
        turns = []
        for end in range(1, len(path) + 1):
            messages = [{"role": "user", "content": SAID[path[end - 1]]}]
            turns.append({"messages": messages, "answer": self.answer(path[:end])[0]})
        return turns


def shown(session):
    return [{"messages": turn["messages"], "answer": turn["answer"]} for turn in session["history"]]


class Talk:
    """A conversation, and what it may be: one path, or two while the client does not know. `None`: there is none."""

    def __init__(self, id, reference, seed):
        self.id, self.reference = id, reference
        self.random = random.Random(seed)
        self.may_be = {None}
        self.answers = []

    def look(self, client):
        """After a start: which of the possible conversations it is."""
        status, session = client.ask("GET", f"/v1/sessions/{self.id}")
        if status == 404:
            found = None
        elif status == 200:
            history = shown(session)
            paths = [path for path in self.may_be if path is not None and self.reference.history(path) == history]
            if not paths:
                raise Wrong(f"{self.id} should be one of {self.may_be}, and is {history}")
            found = paths[0]
        else:
            raise Wrong(f"{self.id}: status {status}: {session}")
        if found not in self.may_be:
            raise Wrong(f"{self.id} should be one of {self.may_be}, and is {found}")
        self.may_be = {found}

    def change(self, client, method, body, to, expected):
        """Changes the conversation to the path `to`, apart from a turn."""
        self.may_be.add(to)
        client.at = "changing"
        status, answer = client.ask(method, f"/v1/sessions/{self.id}", body)
        client.at = "between"
        if status not in expected:
            raise Wrong(f"{method} {self.id} {body}: status {status}: {answer}")
        self.may_be = {to}

    def step(self, client):
        """The next thing that happens to it."""
        [path] = self.may_be
        if path is None:
            self.change(client, "PUT", {}, (), [201])
        elif len(path) == TURNS:
            self.change(client, "DELETE", None, None, [200])
        elif len(path) > 1 and self.random.random() < 0.15:
            turns = self.random.randrange(len(path))
            self.change(client, "PUT", {"turns": turns}, path[:turns], [200])
        else:
            # A turn that is repeated after a kill may say something else.
            new = (*path, self.random.choice([0, 2] if not path else [1, 2, 3, 4]))
            self.may_be.add(new)
            found = client.turn(self.id, new)
            self.may_be = {new}
            self.answers.append((new, found))

    def check(self):
        """Compares all answers so far; returns their number."""
        answers, self.answers = self.answers, []
        for path, found in answers:
            expected = self.reference.answer(path)
            if found != expected:
                raise Wrong(f"{self.id}, path {path}: {difference(found, expected)}")
        return len(answers)


def kills(options, preset, count, folder, seed):
    """Kills the server `count` times. Returns how often a client did what at that moment, and the finished turns."""
    model = serving.trained(options.march, options.models, preset)
    moments, turns, chance = collections.Counter(), 0, random.Random(seed)
    with serving.server(options.march, model, "--cache-bytes", 0, threads=1) as calm:
        reference = Reference(calm.url)
        talks = [Talk(f"talk-{number}", reference, f"{seed} {number}") for number in range(TALKS)]
        for round in range(count + 1):
            running = serving.Server(options.march, model, "--sessions", folder, threads=1)
            clients = [Client(running.url) for _ in talks]
            failures = []
            try:
                for talk, client in zip(talks, clients, strict=True):
                    talk.look(client)

                def go(talk, client):
                    try:
                        while True:
                            talk.step(client)
                            if round == count and talk.may_be == {None}:
                                return
                    except Gone:
                        pass
                    except Exception as error:
                        failures.append(error)

                threads = [threading.Thread(target=go, args=pair) for pair in zip(talks, clients, strict=True)]
                for thread in threads:
                    thread.start()
                if round == count:
                    # The last time, all conversations come to their end.
                    for thread in threads:
                        thread.join()
                    running.stop()
                else:
                    time.sleep(chance.uniform(0, 1))
                    if chance.random() < 0.5:
                        # Most moments are those of reading and writing; look for one between text and `[DONE]`.
                        end = time.monotonic() + 5
                        while time.monotonic() < end and not {"saving", "changing"} & {one.at for one in clients}:
                            time.sleep(0.0002)
                        time.sleep(chance.uniform(0, 0.004))
                    doing = [client.at for client in clients]
                    running.kill()
                    moments.update(doing)
                    for thread in threads:
                        thread.join()
            finally:
                if running.process.poll() is None:
                    running.kill()
            if failures:
                raise Wrong(f"{preset}, after {round} kills: {failures[0]}")
            turns += sum(talk.check() for talk in talks)
    return moments, turns


def damage(folder, other, chance):
    """Damages a conversation's folder; returns what was done."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    file = chance.choice(files)
    data = bytearray(file.read_bytes())
    kind = chance.choice(["flip", "flip", "truncate", "truncate", "zero", "longer", "missing", "empty", "foreign"])
    if kind == "flip":
        # In the header or anywhere.
        place = chance.randrange(min(len(data), chance.choice([64, 4096, len(data)])))
        data[place] ^= 1 << chance.randrange(8)
    elif kind == "truncate":
        del data[chance.randrange(len(data)) :]
    elif kind == "zero":
        start = chance.randrange(len(data))
        end = min(len(data), start + 4096)
        data[start:end] = bytes(end - start)
    elif kind == "longer":
        data += chance.randbytes(chance.choice([1, 8, 1000]))
    elif kind == "empty":
        data.clear()
    elif kind == "foreign":
        # The state of another conversation of as many tokens.
        states = [path for path in files if path.suffix != ".json" and (other / path.name).exists()]
        if not states:
            return damage(folder, other, chance)
        file = chance.choice(states)
        data = bytearray((other / file.name).read_bytes())
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(data)
    return f"{kind} {file.name}"


def after_damage(client, id, path, history, expected):
    """What a conversation with a damaged file does: it goes on as expected, or it is refused."""
    status, session = client.ask("GET", f"/v1/sessions/{id}")
    if status == 200:
        if shown(session) != history:
            raise Wrong(f"shown as {session}")
        answer = client.turn(id, path)
        if answer != expected:
            raise Wrong(difference(answer, expected))
        return "continued"
    if status not in (404, 409) or not session["error"]["message"]:
        raise Wrong(f"status {status}: {session}")
    # It has no more turns, and its id can be used again.
    again, _ = client.ask("POST", "/v1/chat/completions", {**body_of(path), "session": id})
    if again != status:
        raise Wrong(f"shown with {status}, continued with {again}")
    if status == 409:
        client.ask("DELETE", f"/v1/sessions/{id}")
    created, answer = client.ask("PUT", f"/v1/sessions/{id}", {})
    if created != 201:
        raise Wrong(f"could not be replaced: {created} {answer}")
    return f"refused with {status}"


def damages(options, preset, count, work, seed):
    """Damages files and continues. Returns how often what happened, and what was wrong."""
    model = serving.trained(options.march, options.models, preset)
    chance, outcomes, failures = random.Random(seed), collections.Counter(), []
    # Both have the same number of tokens after each turn.
    path, other = (2, 1, 3), (2, 3, 1)
    with serving.server(options.march, model, "--cache-bytes", 0, threads=1) as calm:
        reference = Reference(calm.url)
        history, expected = reference.history(path), reference.answer((*path, 4))
    whole = Path(work, "whole")
    with serving.server(options.march, model, "--sessions", whole, threads=1) as server:
        client = Client(server.url)
        for id, turns in ("talk", path), ("other", other):
            client.ask("PUT", f"/v1/sessions/{id}", {})
            for end in range(1, len(turns) + 1):
                client.turn(id, turns[:end])
    while outcomes.total() < count:
        folder = Path(work, "damaged")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        done = {}
        for number in range(min(16, count - outcomes.total())):
            id = f"talk-{number}"
            shutil.copytree(folder / "talk", folder / id)
            done[id] = damage(folder / id, folder / "other", chance)
        # Without the cache, in which one conversation would find the states of another with the same text.
        flags = ["--sessions", folder, "--cache-bytes", 0]
        with serving.server(options.march, model, *flags, threads=1) as server:
            client = Client(server.url)
            status, _ = client.ask("GET", "/v1/sessions")
            if status != 200:
                raise Wrong(f"the list of conversations: status {status} after {done}")
            for id, what in {**done, "talk": "nothing"}.items():
                try:
                    outcome = after_damage(client, id, (*path, 4), history, expected)
                    if what == "nothing" and outcome != "continued":
                        raise Wrong(f"an undamaged conversation was {outcome}")
                except Wrong as error:
                    outcome = "WRONG"
                    failures.append(f"{preset}, {what}: {error}")
                if what != "nothing":
                    kind, file = what.split()
                    outcomes[f"{file}: {kind}: {outcome}"] += 1
    return outcomes, failures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--march", required=True)
    parser.add_argument("--models", required=True, help="a folder for checkpoints")
    parser.add_argument("--kills", type=int, help="how often to kill the server [default: 5; 50 with --long]")
    parser.add_argument("--damages", type=int, help="how many files to damage [default: 32; 320 with --long]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long", action="store_true", help="more kills, and all kinds of models")
    options = parser.parse_args()
    presets = PRESETS if options.long else PRESETS[:1]
    count = options.kills if options.kills is not None else 50 if options.long else 5
    damaged = options.damages if options.damages is not None else 320 if options.long else 32
    moments, turns, outcomes, failures = collections.Counter(), 0, collections.Counter(), []
    for number, preset in enumerate(presets):
        share = lambda all: all // len(presets) + (number < all % len(presets))
        with tempfile.TemporaryDirectory() as work:
            try:
                found, finished = kills(options, preset, share(count), Path(work, "sessions"), options.seed)
                moments += found
                turns += finished
                found, wrong = damages(options, preset, share(damaged), work, options.seed)
                outcomes += found
                failures += wrong
            except (Wrong, Gone, RuntimeError) as error:
                failures.append(f"{preset}: {type(error).__name__}: {error}")
    doing = ", ".join(f"{what} {times}" for what, times in sorted(moments.items()))
    print(f"  {count} kills, {turns} finished turns; what {TALKS} clients did at the kills: {doing}")
    for what, times in sorted(outcomes.items()):
        print(f"  {what}: {times}")
    for failure, times in collections.Counter(failures).items():
        print(f"  wrong, {times} times: {failure[:1000]}")
    if failures:
        raise SystemExit(f"{len(failures)} failures")


if __name__ == "__main__":
    main()

"""Asks `march serve` with OpenAI's own client: answers, streams, log-probabilities, conversations, errors.

    python openai_client.py --march target/release/march --models DIR
"""

import argparse
import math
import tempfile
from pathlib import Path

import openai
import serving

STORY = "Alice was beginning to get very tired of sitting by her sister on the bank. "
KEY = "secret-key"


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=300)


def equal(found, expected, what):
    assert found == expected, f"{what}: {found!r} instead of {expected!r}"


def refused(kind, param, ask):
    """Asks for something that must be refused with this exception, about this key."""
    try:
        ask()
    except openai.APIStatusError as error:
        assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
        body = error.body
        assert isinstance(body, dict) and {"message", "type", "param", "code"} <= set(body), body
        if param is not None:
            equal(body["param"], param, "the key of the error")
        return body["message"]
    raise AssertionError(f"was answered instead of refused with {kind.__name__}")


# What a stream gives, put together again as an answer.


def joined_completion(stream):
    choices, usage, march = {}, None, None
    for part in stream:
        for choice in part.choices:
            text, entries, ended = choices.setdefault(choice.index, ["", [], None])
            if choice.logprobs:
                found = choice.logprobs
                entries += zip(found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True)
            assert ended is None, "a choice goes on after its end"
            choices[choice.index] = [text + choice.text, entries, choice.finish_reason]
        usage = part.usage or usage
        march = (part.model_extra or {}).get("march", march)
    return choices, usage, march


def whole_completion(answer):
    choices = {}
    for choice in answer.choices:
        entries, found = [], choice.logprobs
        if found:
            entries += zip(found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True)
        choices[choice.index] = [choice.text, entries, choice.finish_reason]
    return choices


def joined_chat(stream):
    choices, usage, march, roles = {}, None, None, {}
    for part in stream:
        for choice in part.choices:
            text, entries, ended = choices.setdefault(choice.index, ["", [], None])
            assert ended is None, "a choice goes on after its end"
            if choice.logprobs:
                entries += [entry.model_dump() for entry in choice.logprobs.content]
            roles.setdefault(choice.index, choice.delta.role)
            choices[choice.index] = [text + (choice.delta.content or ""), entries, choice.finish_reason]
        usage = part.usage or usage
        march = (part.model_extra or {}).get("march", march)
    equal(set(roles.values()), {"assistant"}, "the roles of a stream's first parts")
    return choices, usage, march


def whole_chat(answer):
    choices = {}
    for choice in answer.choices:
        entries = [entry.model_dump() for entry in choice.logprobs.content] if choice.logprobs else []
        choices[choice.index] = [choice.message.content, entries, choice.finish_reason]
    return choices


def user(*texts):
    """Messages of which the user's are at even places."""
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def completions(client):
    """Seeds, several prompts and choices, ids, echo, and numbers of tokens."""
    model = client.models.list().data[0]
    assert model.id == "tiny" and model.max_model_len > 0, model
    equal(client.models.retrieve("tiny"), model, "the model by its name")
    refused(openai.NotFoundError, None, lambda: client.models.retrieve("other"))
    ask = lambda **keys: client.completions.create(**{"model": "tiny", "prompt": STORY, "max_tokens": 24, **keys})
    first = ask(seed=3)
    equal(first.object, "text_completion", "object")
    equal((first.usage.prompt_tokens, first.usage.completion_tokens), (len(STORY), 24), "numbers of tokens")
    equal(first.usage.total_tokens, len(STORY) + 24, "total number of tokens")
    equal(ask(seed=3).choices[0].text, first.choices[0].text, "the same seed")
    assert ask(seed=4).choices[0].text != first.choices[0].text, "another seed gives the same text"
    equal(ask(seed=3, prompt=list(STORY.encode())).choices[0].text, first.choices[0].text, "a prompt of ids")
    many = ask(prompt=[STORY, "Down"], n=3, seed=3)
    equal([choice.index for choice in many.choices], list(range(6)), "indices")
    equal(many.choices[0].text, first.choices[0].text, "the first of several choices")
    equal(many.choices[1].text, ask(seed=4).choices[0].text, "the second choice has the next seed")
    echoed = ask(seed=3, echo=True)
    equal(echoed.choices[0].text, STORY + first.choices[0].text, "an echoed prompt")
    only = ask(echo=True, max_tokens=0)
    equal((only.choices[0].text, only.usage.completion_tokens), (STORY, 0), "only the prompt")


def chats(client):
    ask = lambda **keys: client.chat.completions.create(
        **{"model": "tiny", "messages": user("Who was Alice?"), "max_completion_tokens": 24, **keys}
    )
    first = ask(seed=1)
    equal((first.object, first.choices[0].message.role), ("chat.completion", "assistant"), "object and role")
    equal(ask(seed=1).choices[0].message.content, first.choices[0].message.content, "the same seed")
    equal(len(ask(n=3).choices), 3, "choices")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who was "}, {"type": "text", "text": "Alice?"}]}]
    equal(whole_chat(ask(seed=1, messages=parts)), whole_chat(first), "a message in parts")
    # `max_tokens` is the old name.
    old = client.chat.completions.create(model="tiny", messages=user("Who was Alice?"), max_tokens=24, seed=1)
    equal(whole_chat(old), whole_chat(first), "max_tokens")


def streams(client):
    """A stream gives the same text and the same log-probabilities as a whole answer."""
    for temperature in 0, 0.7, 1.3:
        keys = {"model": "tiny", "temperature": temperature, "seed": 7, "n": 2, "max_tokens": 30}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        for more in {}, {"stop": ["th", "e "]}, {"echo": True}:
            body = {**keys, **more, "prompt": [STORY, "Down, down"], "logprobs": 3}
            whole = client.completions.create(**body)
            choices, used, march = joined_completion(client.completions.create(**body, **usage))
            equal(choices, whole_completion(whole), f"a streamed completion with {more}")
            # What came from the cache may differ.
            equal(used.completion_tokens, whole.usage.completion_tokens, "tokens of a stream")
            equal(march, None, "the key `march` without `session` and `recall`")
        for more in {}, {"stop": "a"}:
            body = {**keys, **more, "messages": user("Hello"), "logprobs": True, "top_logprobs": 3}
            whole = client.chat.completions.create(**body)
            choices, used, _ = joined_chat(client.chat.completions.create(**body, **usage))
            equal(choices, whole_chat(whole), f"a streamed chat with {more}")
            equal(used.total_tokens, whole.usage.total_tokens, "tokens of a stream")
    # Without `include_usage` there is none.
    _, used, _ = joined_completion(client.completions.create(model="tiny", prompt="A", max_tokens=3, stream=True))
    equal(used, None, "usage")


def sane(own, top, greedy, number):
    """Checks the log-probability of a token against those of the best ones."""
    values = list(top.values())
    assert own <= 1e-6 and all(value <= 1e-6 for value in values), (own, values)
    equal(values, sorted(values, reverse=True), "the order of alternatives")
    assert len(values) <= max(1, number), values
    assert math.fsum(math.exp(value) for value in values) <= 1 + 1e-5, values
    assert own <= values[0], "a token is more probable than the best one"
    if greedy:
        equal(own, values[0], "the greedy token's log-probability")


def logprobs(client):
    for temperature in 0, 0.6:
        answer = client.completions.create(
            model="tiny", prompt=STORY, max_tokens=40, temperature=temperature, seed=2, logprobs=5
        )
        found = answer.choices[0].logprobs
        equal("".join(found.tokens), answer.choices[0].text, "tokens of ASCII text")
        equal(found.text_offset, list(range(40)), "offsets")
        for own, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
            sane(own, top, temperature == 0, 5)
        # The same text as a prompt: scores of reading and of writing agree.
        text = answer.choices[0].text
        echoed = client.completions.create(model="tiny", prompt=STORY + text, max_tokens=1, logprobs=1, echo=True)
        read = echoed.choices[0].logprobs
        equal(len(read.tokens), len(STORY) + 41, "entries of an echoed prompt")
        equal(read.token_logprobs[0], None, "the first token's log-probability")
        for written, again in zip(found.token_logprobs, read.token_logprobs[len(STORY) :], strict=False):
            assert abs(written - again) < 1e-3, (written, again)

        chat = client.chat.completions.create(
            model="tiny", messages=user("Hi"), max_tokens=40, temperature=temperature, logprobs=True, top_logprobs=20
        )
        choice = chat.choices[0]
        equal(len(choice.logprobs.content), chat.usage.completion_tokens, "entries of a chat")
        for entry in choice.logprobs.content:
            equal(len(entry.top_logprobs), 20, "alternatives")
            sane(entry.logprob, {one.token: one.logprob for one in entry.top_logprobs}, temperature == 0, 20)
        joined = b"".join(bytes(entry.bytes or entry.token.encode()) for entry in choice.logprobs.content)
        equal(joined.decode(errors="replace"), choice.message.content, "bytes of tokens")
        # 0 alternatives are allowed; the token's own number stays.
        none = client.chat.completions.create(
            model="tiny", messages=user("Hi"), max_tokens=40, temperature=temperature, logprobs=True, top_logprobs=0
        )
        equal(
            [entry.logprob for entry in none.choices[0].logprobs.content],
            [entry.logprob for entry in choice.logprobs.content],
            "log-probabilities without alternatives",
        )


def bytes_of_tokens(client):
    """Tokens that are no text on their own: `bytes` puts them together again."""
    # Greek letters have two bytes; a model that only read English writes such bytes at a high temperature.
    for seed in range(20):
        chat = client.chat.completions.create(
            model="tiny", messages=user("αβγδ"), max_tokens=30, temperature=50, seed=seed, logprobs=True
        )
        choice = chat.choices[0]
        if choice.finish_reason != "length":
            continue
        joined = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        equal(joined.decode(errors="replace"), choice.message.content, "the text of the tokens' bytes")


def stops(client):
    whole = client.completions.create(model="tiny", prompt=STORY, max_tokens=40, temperature=0).choices[0].text
    for stop in whole[10:12], [whole[20:23], "never comes"], ["never comes", whole[5:6]]:
        answer = client.completions.create(model="tiny", prompt=STORY, max_tokens=40, temperature=0, stop=stop)
        places = [whole.find(one) for one in ([stop] if isinstance(stop, str) else stop)]
        first = min(place for place in places if place >= 0)
        equal((answer.choices[0].text, answer.choices[0].finish_reason), (whole[:first], "stop"), f"stop {stop!r}")
    answer = client.completions.create(model="tiny", prompt=STORY, max_tokens=40, temperature=0, stop="never comes")
    equal((answer.choices[0].text, answer.choices[0].finish_reason), (whole, "length"), "a stop that never comes")


def errors(client):
    complete, chat = client.completions.create, client.chat.completions.create
    bad, missing = openai.BadRequestError, openai.NotFoundError
    refused(bad, "temperature", lambda: complete(model="tiny", prompt="a", temperature=-1))
    refused(bad, "n", lambda: complete(model="tiny", prompt="a", n=17))
    refused(bad, "logit_bias", lambda: complete(model="tiny", prompt="a", logit_bias={"1": 1}))
    refused(bad, "prompt", lambda: complete(model="tiny", prompt=[70000]))
    refused(bad, "tempo", lambda: complete(model="tiny", prompt="a", extra_body={"tempo": 1}))
    refused(bad, "messages", lambda: chat(model="tiny", messages=[]))
    refused(bad, "tools", lambda: chat(model="tiny", messages=user("a"), tools=[{"type": "function"}]))
    refused(bad, "top_logprobs", lambda: chat(model="tiny", messages=user("a"), top_logprobs=1))
    refused(bad, "memory", lambda: chat(model="tiny", messages=user("a"), extra_body={"memory": "interval=0"}))
    # A stream that cannot begin is an error, not a stream.
    refused(bad, "temperature", lambda: complete(model="tiny", prompt="a", temperature=-1, stream=True))
    assert "`other`" in refused(missing, None, lambda: complete(model="other", prompt="a"))
    refused(missing, None, lambda: client.get("/nothing", cast_to=object))
    refused(missing, None, lambda: complete(model="tiny", prompt="a", extra_body={"session": "none"}))
    refused(missing, None, lambda: client.get("/sessions/none", cast_to=object))
    refused(bad, None, lambda: client.put("/sessions/Not%20an%20id", cast_to=object, body={}))
    refused(openai.APIStatusError, None, lambda: client.get("/completions", cast_to=object))


def conversations(client):
    """A conversation of two turns is the same as one request with all messages, and reads only what is new."""
    put = lambda id, **body: client.put(f"/sessions/{id}", cast_to=object, body=body)
    get = lambda id: client.get(f"/sessions/{id}", cast_to=object)
    # Greedy answers of this model begin with a space, so that the plain form of chats writes them as they were.
    keys = {"model": "tiny", "temperature": 0, "max_tokens": 30}
    chat_keys = {**keys, "logprobs": True, "top_logprobs": 2}
    questions = [STORY + "What did she do?", "And then?", "Why?"]
    created = put("talk")
    equal((created["turns"], created["kind"], created["object"]), (0, None, "session"), "a new conversation")
    equal(put("talk")["turns"], 0, "the same conversation")
    said, answers, reports = [], [], []
    for number, question in enumerate(questions, 1):
        said += user(question)
        body = {**chat_keys, "messages": user(question), "extra_body": {"session": "talk"}}
        if number == 2:
            choices, usage, march = joined_chat(client.chat.completions.create(**body, stream=True))
        else:
            answer = client.chat.completions.create(**body)
            choices, usage, march = whole_chat(answer), answer.usage, answer.model_extra["march"]
        alone = client.chat.completions.create(**chat_keys, messages=said)
        equal(choices, whole_chat(alone), f"turn {number}")
        equal(usage.prompt_tokens, alone.usage.prompt_tokens, f"prompt tokens of turn {number}")
        equal((march["session"], march["turn"]), ("talk", number), "session and turn")
        equal(march["tokens"], usage.total_tokens, "tokens of the conversation")
        if number > 1:
            # All but what is new, and perhaps the last token of the answer, which the model had not read.
            new = usage.prompt_tokens - reports[-1]["tokens"]
            cached = usage.prompt_tokens_details.cached_tokens
            assert usage.prompt_tokens - new - 1 <= cached < usage.prompt_tokens, (cached, usage)
        said.append({"role": "assistant", "content": choices[0][0]})
        answers.append(choices)
        reports.append(march)
    kept = get("talk")
    equal((kept["turns"], kept["kind"], kept["messages"]), (3, "chat", said), "the conversation")
    equal([turn["answer"] for turn in kept["history"]], [choices[0][0] for choices in answers], "answers")
    equal([turn["tokens"] for turn in kept["history"]], [march["tokens"] for march in reports], "tokens of turns")
    equal(client.get("/sessions", cast_to=object)["data"][0]["id"], "talk", "the list")

    # Forks and undone turns continue as the original did.
    equal(put("fork", **{"from": "talk", "turns": 1})["turns"], 1, "a fork")
    equal(put("talk", turns=1)["turns"], 1, "an undone turn")
    for id in "fork", "talk":
        body = {**chat_keys, "messages": user(questions[1]), "extra_body": {"session": id}}
        equal(whole_chat(client.chat.completions.create(**body)), answers[1], f"turn 2 of {id}")
    refused(openai.ConflictError, None, lambda: put("talk", **{"from": "fork"}))
    refused(openai.BadRequestError, "turns", lambda: put("talk", turns=9))

    # A conversation is in one kind; one turn at a time; one that breaks off leaves no trace.
    complete = client.completions.create
    text = {"model": "tiny", "prompt": "a", "extra_body": {"session": "talk"}}
    refused(openai.BadRequestError, "session", lambda: complete(**text))
    long = {**chat_keys, "max_tokens": 2000, "messages": user("Tell a long story."), "stop": "never comes"}
    stream = client.chat.completions.create(**long, extra_body={"session": "talk"}, stream=True)
    next(iter(stream))
    busy = {**chat_keys, "messages": user("Hi"), "extra_body": {"session": "talk"}}
    refused(openai.ConflictError, None, lambda: client.chat.completions.create(**busy))
    refused(openai.ConflictError, None, lambda: client.delete("/sessions/talk", cast_to=object))
    stream.close()
    for _ in range(200):
        try:
            put("talk")
            break
        except openai.ConflictError:
            pass
    equal(get("talk")["turns"], 2, "turns after one that broke off")
    body = {**chat_keys, "messages": user(questions[2]), "extra_body": {"session": "talk"}}
    equal(whole_chat(client.chat.completions.create(**body)), answers[2], "the turn after one that broke off")
    # What `n` and `echo` ask for has no meaning there.
    refused(openai.BadRequestError, "session", lambda: client.chat.completions.create(**{**busy, "n": 2}))

    # Texts.
    put("text")
    text = ""
    for number, prompt in enumerate([STORY, " So she", ", but then"], 1):
        text += prompt
        ask = {**keys, "logprobs": 2}
        turn = complete(**ask, prompt=prompt, extra_body={"session": "text"})
        alone = complete(**ask, prompt=text)
        equal(whole_completion(turn), whole_completion(alone), f"turn {number} of a text")
        equal(turn.usage.prompt_tokens, alone.usage.prompt_tokens, "tokens of a text")
        text += turn.choices[0].text
    equal(get("text")["kind"], "text", "the kind of a text")

    # Another policy: the text is read again, as a request with all of it and that policy would.
    policy = "interval=8 top-k=2"
    body = {**chat_keys, "messages": user("Why not?")}
    turn = client.chat.completions.create(**body, extra_body={"session": "fork", "memory": policy})
    assert policy in turn.model_extra["march"]["memory"]["policy"], turn.model_extra
    messages = get("fork")["messages"]
    alone = client.chat.completions.create(**{**body, "messages": messages[:-1]}, extra_body={"memory": policy})
    equal(whole_chat(turn), whole_chat(alone), "a turn with another policy")
    assert policy in get("fork")["policy"], "the policy stays"

    for id in "talk", "fork", "text":
        equal(client.delete(f"/sessions/{id}", cast_to=object)["deleted"], True, "deleted")
        refused(openai.NotFoundError, None, lambda: get(id))


def recall(client):
    """The weights of what an answer read are shares of 1."""
    body = {"model": "tiny", "messages": user(STORY * 3), "max_tokens": 20, "temperature": 0}
    plain = client.chat.completions.create(**body)
    answer = client.chat.completions.create(**body, extra_body={"recall": True})
    equal(whole_chat(answer), whole_chat(plain), "an answer whose reading is observed")
    _, _, march = joined_chat(client.chat.completions.create(**body, extra_body={"recall": True}, stream=True))
    equal(march["recall"], answer.model_extra["march"]["recall"], "recall of a stream")
    assert march["session"] is None and march["turn"] is None, march
    found = march["recall"]
    assert found["anchors"] and found["tokens"] > 0, found
    for layer in range(found["layers"]):
        total = found["null"][layer] + math.fsum(anchor["weights"][layer] for anchor in found["anchors"])
        assert abs(total - 1) < 1e-3, f"layer {layer}: {total}"
    before = 0
    for anchor in found["anchors"]:
        assert before <= anchor["from"] < anchor["to"] <= march["tokens"], anchor
        equal(len(anchor["weights"]), found["layers"], "weights by layer")
        before = anchor["to"]
    text = f"\nUser: {STORY * 3}\nAssistant:" + answer.choices[0].message.content
    first = found["anchors"][0]
    equal(first["text"], text[first["from"] : first["to"]], "the text before an anchor")


def no_recall(client):
    """A model without anchors has nothing to report, and conversations all the same."""
    body = {"model": "tiny", "messages": user(STORY), "max_tokens": 20, "temperature": 0}
    answer = client.chat.completions.create(**body, extra_body={"recall": True})
    equal(answer.model_extra["march"]["recall"], None, "recall of a model without anchors")
    client.put("/sessions/talk", cast_to=object, body={})
    said = []
    for question in STORY, "And then?":
        said += user(question)
        turn = client.chat.completions.create(**{**body, "messages": user(question)}, extra_body={"session": "talk"})
        alone = client.chat.completions.create(**{**body, "messages": said})
        equal(whole_chat(turn), whole_chat(alone), "a turn")
        equal(turn.usage.prompt_tokens, alone.usage.prompt_tokens, "tokens of a turn")
        said.append({"role": "assistant", "content": turn.choices[0].message.content})
    assert turn.usage.prompt_tokens_details.cached_tokens > len(STORY), turn.usage


def keys(right, wrong):
    ask = lambda client: client.completions.create(model="tiny", prompt="a", max_tokens=1)
    ask(right)
    refused(openai.AuthenticationError, None, lambda: ask(wrong))
    refused(openai.AuthenticationError, None, lambda: wrong.models.list())
    refused(openai.AuthenticationError, None, lambda: wrong.get("/sessions", cast_to=object))
    # Anyone may know whether the server is up.
    root = openai.OpenAI(base_url=str(wrong.base_url).removesuffix("v1/"), api_key="wrong", max_retries=0)
    equal(root.get("/health", cast_to=object)["status"], "ok", "health")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--march", required=True)
    parser.add_argument("--models", required=True, help="a folder for checkpoints")
    parser.add_argument("--long", action="store_true", help="has no effect: all of it is short")
    options = parser.parse_args()
    failures = []

    def run(test, *clients):
        try:
            test(*clients)
            print(f"  {test.__name__}: ok", flush=True)
        except (AssertionError, openai.OpenAIError) as error:
            failures.append(test.__name__)
            print(f"  {test.__name__}: {type(error).__name__}: {error}", flush=True)

    tests = [completions, chats, streams, logprobs, bytes_of_tokens, stops, errors, conversations, recall]
    with serving.server(options.march, serving.trained(options.march, options.models)) as server:
        for test in tests:
            run(test, client_of(server))
    with serving.server(options.march, serving.trained(options.march, options.models, "tiny/gdn")) as server:
        run(no_recall, client_of(server))
    with tempfile.TemporaryDirectory() as work:
        file = Path(work, "key")
        file.write_text(KEY + "\n", encoding="ascii")
        model = serving.trained(options.march, options.models)
        with serving.server(options.march, model, "--api-key-file", file) as server:
            run(keys, client_of(server, KEY), client_of(server, KEY.upper()))
    if failures:
        raise SystemExit(f"failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()

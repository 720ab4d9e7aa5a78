"""Results are those of the program `march`, bit by bit."""

import json

import numpy as np
import pytest
from conftest import DAYS, QUESTION

import march_lm

safetensors = pytest.importorskip("safetensors.numpy")


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "q8", "q4"])
def test_logits(program, tiny_folder, numbers, tmp_path, weights):
    (tmp_path / "ids.json").write_text(json.dumps(numbers.tolist()))
    arguments = ["--tokens", tmp_path / "ids.json", "--output", tmp_path / "logits", "--weights", weights]
    program("logits", "--model", tiny_folder, *arguments)
    expected = safetensors.load_file(tmp_path / "logits")["logits"]
    found = march_lm.load(tiny_folder, weights=weights).logits(numbers)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)


def test_routing(program, tiny_folder, tiny, numbers, tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps(numbers.tolist()))
    arguments = ["--tokens", tmp_path / "ids.json", "--output", tmp_path / "logits"]
    program("logits", "--model", tiny_folder, "--trace", "--interval", 16, "--routing-top-k", 2, *arguments)
    expected = safetensors.load_file(tmp_path / "logits")
    routing = tiny.with_policy(interval=16, top_k=2).routing(numbers)
    assert routing.weights.shape[1] == len(numbers) == len(routing.pieces)
    for layer, weights in enumerate(routing.weights):
        assert np.array_equal(weights, expected[f"routing_weights.{layer}"])
    assert np.array_equal(routing.boundaries, expected["boundaries"])


def test_ranges_are_the_text_between_anchors(model):
    routing = model.routing(DAYS + QUESTION)
    parts = [routing.text[a:b] for a, b in routing.ranges]
    ends = [0, *routing.boundaries]
    assert parts == ["".join(routing.pieces[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    assert parts[0].startswith("3 May")


def test_requests(program, model, tmp_path):
    requests = [
        {"kind": "loglikelihood", "context": DAYS + QUESTION, "continuations": [" barn", " shed", " castle"]},
        {"kind": "loglikelihood_rolling", "text": DAYS},
        {"kind": "generate_until", "context": DAYS + QUESTION, "until": [], "max_tokens": 4},
    ]
    (tmp_path / "requests").write_text("".join(json.dumps(request) + "\n" for request in requests))
    program("eval", "requests", tmp_path / "requests", "--model", "diary", "--output", tmp_path / "answers")
    expected = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    assert model.answer(requests) == expected
    # The pairs of one context are read together, and come back in their order.
    pairs = [(DAYS + QUESTION, " shed"), (DAYS, " 5 May"), (DAYS + QUESTION, " barn")]
    scores = {" shed": 1, " barn": 0}
    answers = expected[0]["loglikelihood"]
    for (_, continuation), (found, greedy) in zip(pairs, model.loglikelihood(pairs), strict=True):
        if continuation in scores:
            score = answers[scores[continuation]]
            assert (found, greedy) == (score["loglikelihood"], score["is_greedy"])
    assert model.loss(DAYS) == pytest.approx(model.losses(DAYS).mean(dtype=np.float64), abs=0)


def test_losses(tiny, numbers):
    # After the token that begins a text, they are the parts of its log-likelihood.
    text = "Alice was beginning to get very tired"
    [answer] = tiny.answer([{"kind": "loglikelihood_rolling", "text": text}])
    losses = tiny.losses([tiny.vocabulary - 1, *text.encode()])
    assert -sum(losses.tolist()) == answer["loglikelihood_rolling"]["loglikelihood"]
    logits = tiny.logits(numbers).astype(np.float64)
    normalised = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    normalised -= logits.max(-1, keepdims=True)
    expected = -normalised[np.arange(len(numbers) - 1), numbers[1:]]
    assert np.allclose(tiny.losses(numbers), expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_generate(program, tiny_folder, tiny, temperature):
    flags = ["--temperature", temperature, "--top-k", 20, "--top-p", 0.9, "--repetition-penalty", 1.1, "--seed", 7]
    shown = program("generate", "--model", tiny_folder, "--prompt", "Alice was", "--max-tokens", 40, *flags)
    options = {"temperature": temperature, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 7}
    pieces = tiny.generate("Alice was", 40, **options)
    assert "".join(pieces).strip() == shown.strip()
    assert pieces.ended == "length"


def test_chat(program, model):
    shown = program("chat", "--model", "diary", "--temperature", 0, text=DAYS + QUESTION + "\n")
    answer = "".join(model.chat([{"role": "user", "content": DAYS + QUESTION}], temperature=0.0))
    assert answer.strip() == shown.strip() == "barn"


def test_bank_files(program, tiny_folder, tiny, tmp_path):
    # One that the program wrote.
    flags = ["--max-tokens", 5, "--temperature", 0, "--interval", 16, "--storage", "int8"]
    program("generate", "--model", tiny_folder, "--prompt", "x" * 100, "--save-bank", tmp_path / "a.bank", *flags)
    theirs = tiny.load_bank(tmp_path / "a.bank")
    ours = tiny.bank(interval=16, storage="int8")
    list(ours.generate("x" * 100, 5, temperature=0.0))
    assert ours.tokens == theirs.tokens == 105
    assert np.array_equal(ours.logits, theirs.logits)
    assert ours.bytes == theirs.bytes
    assert np.array_equal(ours.anchors, np.arange(16, 105, 16))
    # One that the program reads.
    ours.save(tmp_path / "b.bank")
    assert "105" in program("inspect", "bank", tmp_path / "b.bank")


def test_training(program, tmp_path):
    """The run folder is the command's: the same metrics and weights, and each resumes the other's."""
    settings = ["train.steps=4", "data.sequence_length=64", "train.tokens_per_step=128", "train.validate_every=2"]
    settings += ["train.sample_every=0", "train.save_every=2"]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    program("train", "tiny/march", "--run", tmp_path / "theirs", *flags)
    events = []
    found = march_lm.train("tiny/march", tmp_path / "ours", settings=settings, callbacks=[events.append])

    def numbers_of(lines):
        return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]

    assert numbers_of(found) == numbers_of(march_lm.metrics(tmp_path / "theirs"))
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]
    weights = "checkpoints/step-4/model.safetensors"
    assert (tmp_path / "ours" / weights).read_bytes() == (tmp_path / "theirs" / weights).read_bytes()

    # Stopped by a callback, and resumed by the command; from a dict.
    sections = {"extends": "tiny/march", "data": {"sequence_length": 64}}
    sections["train"] = {"steps": 4, "tokens_per_step": 128, "validate_every": 2, "sample_every": 0, "save_every": 2}
    march_lm.train(sections, tmp_path / "stopped", callbacks=[lambda event: event.get("step") != 3])
    assert (tmp_path / "stopped/checkpoints/step-3").is_dir()
    program("train", "--resume", tmp_path / "stopped")
    assert (tmp_path / "stopped" / weights).read_bytes() == (tmp_path / "theirs" / weights).read_bytes()
    with pytest.raises(march_lm.Error, match="already holds a run"):
        march_lm.train(sections, tmp_path / "stopped")
    assert march_lm.train(folder=tmp_path / "stopped", resume=True)[-1]["step"] == 4
    assert march_lm.load(tmp_path / "ours").loss("Alice was beginning") > 0

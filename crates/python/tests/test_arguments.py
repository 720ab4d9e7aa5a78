"""What goes in and what comes out: types, shapes, errors."""

import numpy as np
import pytest
from conftest import DAYS, QUESTION

import march_lm
from march_lm import ops


class WithArray:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class WithDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_token_ids_in_any_form(model):
    expected = model.logits(DAYS)
    ids = model.encode(DAYS)
    assert ids.dtype == np.uint32
    signed = ids.astype(np.int64)
    strided = np.repeat(signed, 2)[::2]
    for form in [ids, ids.tolist(), tuple(ids.tolist()), signed, signed.astype(np.int16), strided, WithArray(signed)]:
        assert np.array_equal(model.logits(form), expected)
    assert np.array_equal(model.logits(WithDLPack(signed)), expected)


def test_tensors_of_torch(model):
    torch = pytest.importorskip("torch")
    ids = torch.tensor(model.encode(DAYS).astype(np.int64))
    logits = model.logits(ids)
    assert np.array_equal(logits, model.logits(DAYS))
    tensor = torch.from_dlpack(logits)
    assert tensor.data_ptr() == logits.ctypes.data  # not a copy
    assert np.array_equal(tensor.numpy(), logits)


@pytest.mark.parametrize(
    ("ids", "kind", "words"),
    [
        (3, ValueError, "one dimension"),
        ([[1, 2]], ValueError, r"one dimension.*\[1, 2\]"),
        ([1.5], TypeError, "whole numbers.*float64"),
        (["a"], TypeError, "whole numbers"),
        ([True], TypeError, "whole numbers"),
        (None, ValueError, "one dimension"),
        ([1, -1], ValueError, "token id -1 at position 1"),
        ([2**32], ValueError, "token id 4294967296 at position 0"),
        ([0, 265], march_lm.Error, "265 at position 1 is out of range for the model's vocabulary of 265"),
    ],
)
def test_wrong_token_ids(model, ids, kind, words):
    for call in (model.logits, model.losses, model.bank().read, model.routing, model.generate):
        if call == model.generate and ids is None:
            continue  # no prompt
        if call == model.losses and ids in ([0, 265],):
            continue  # the last token is only predicted; see below
        with pytest.raises(kind, match=words):
            call(ids)


def test_wrong_arguments(model, tmp_path):
    for call, kind, words in [
        (lambda: march_lm.load(tmp_path / "nothing"), march_lm.Error, "does not exist"),
        (lambda: march_lm.load(weights="q9"), march_lm.Error, "`weights` is `q9`; it must be"),
        (lambda: march_lm.load(device="tpu"), march_lm.Error, "`device` is `tpu`"),
        (lambda: march_lm.load(3), TypeError, "PathLike|str"),
        (lambda: march_lm.load("diary", "q8"), TypeError, "positional"),
        (lambda: model.bank(interval=0), march_lm.Error, "`interval` is `0`; it must be a whole number above 0"),
        (lambda: model.bank(top_k="some"), march_lm.Error, "dense"),
        (lambda: model.bank(retention="none"), march_lm.Error, "fenwick"),
        (lambda: model.bank(colour="red"), march_lm.Error, "`colour` is not a setting"),
        (lambda: model.load_bank(tmp_path / "nothing"), FileNotFoundError, "could not"),
        (lambda: model.bank().save(tmp_path / "no" / "bank"), FileNotFoundError, "could not"),
        (lambda: model.generate(DAYS, temperature=-1.0), march_lm.Error, "the temperature is -1"),
        (lambda: model.generate(DAYS, colour="red"), TypeError, "`colour` is not an argument"),
        (lambda: model.generate(DAYS, -1), OverflowError, "negative"),
        (lambda: model.chat([{"content": "a"}]), march_lm.Error, "role"),
        (lambda: model.chat(3), march_lm.Error, "messages"),
        (lambda: model.loglikelihood([3]), TypeError, "tuple"),
        (lambda: model.loglikelihood([("a", "")]), march_lm.Error, "no token of its own"),
        (lambda: model.answer([{"kind": "sing"}]), march_lm.Error, "sing"),
        (lambda: model.decode([9999]), march_lm.Error, "9999"),
        (lambda: model.loss([1]), march_lm.Error, "two tokens"),
        (lambda: model.bank().rollback(3), march_lm.Error, "cannot roll back to 3 tokens"),
        (lambda: march_lm.train("tiny/march"), TypeError, "folder"),
        (lambda: march_lm.train("tiny/marsh", tmp_path / "run"), march_lm.Error, "tiny/march"),
        (lambda: march_lm.train({"extends": "tiny/march", "train": {"stpes": 1}}, "x"), march_lm.Error, "mean `steps`"),
        (lambda: march_lm.train(folder=tmp_path / "none", resume=True), march_lm.Error, "does not exist"),
    ]:
        with pytest.raises(kind, match=words):
            call()


def test_other_models_have_no_anchors():
    plain = march_lm.load("tiny/gdn", threads=1)
    assert plain.model_type == "gated_deltanet"
    with pytest.raises(march_lm.Error, match="does not route"):
        plain.routing("text")
    with pytest.raises(march_lm.Error, match="has no anchors"):
        plain.bank(interval=4)


def test_presets_have_random_weights():
    assert "tiny/march" in march_lm.presets()
    first, second = march_lm.load("tiny/march"), march_lm.load("tiny/march", seed=1)
    assert first.vocabulary in (256, 257)
    assert np.array_equal(first.logits("a"), march_lm.load("tiny/march").logits("a"))
    assert not np.array_equal(first.logits("a"), second.logits("a"))
    assert "tiny/march" in repr(first)


def test_empty_texts(model):
    assert model.logits("").shape == (0, model.vocabulary)
    assert model.losses([]).shape == (0,)
    bank = model.bank()
    bank.read([])
    assert bank.tokens == 0 and bank.logits is None
    assert model.loglikelihood([]) == []


def test_the_reference_device(model):
    exact = march_lm.load(device="reference").logits(DAYS)
    assert np.abs(exact - model.logits(DAYS)).max() < 1e-3 * np.abs(exact).max()


def test_policies(model):
    bank = model.bank(interval=2, top_k=1, retention="recent:2", storage="int8")
    assert bank.policy == "interval=2 top-k=1 retention=recent:2 storage=int8"
    bank.read(DAYS)
    assert len(bank.anchors) == 2
    small, large = bank.bytes, model.bank(interval=2)
    large.read(DAYS)
    assert small < large.bytes
    assert model.with_policy(top_k=3).policy == "interval=6 top-k=3"
    assert model.with_policy(top_k=3).with_policy(top_k="dense").policy == model.policy


def test_forks_and_rollbacks(model):
    bank = model.bank(interval=4)
    bank.read(DAYS)
    fork = bank.fork()
    answer = "".join(fork.generate(QUESTION, 4, temperature=0.0))
    assert fork.tokens > bank.tokens
    assert "".join(bank.fork().generate(QUESTION, 4, temperature=0.0)) == answer
    end, why = bank.rollback(7)
    assert (end, why) == (4, None) and bank.tokens == 4
    again = model.bank(interval=4)
    again.read(model.encode(DAYS)[:4])
    bank.read(QUESTION)
    again.read(QUESTION)
    assert np.array_equal(bank.logits, again.logits)


def test_saved_banks(model, tmp_path):
    bank = model.bank(storage="bf16")
    bank.read(DAYS)
    bank.save(tmp_path / "days.bank")
    loaded = model.load_bank(str(tmp_path / "days.bank"))
    assert np.array_equal(loaded.logits, bank.logits) and loaded.policy == bank.policy
    assert list(loaded.generate(QUESTION, 4, seed=3)) == list(bank.generate(QUESTION, 4, seed=3))
    with pytest.raises(march_lm.Error):
        march_lm.load("tiny/march").load_bank(tmp_path / "days.bank")


def test_several_banks_in_one_call(model):
    texts = [DAYS, QUESTION, model.encode(DAYS + QUESTION)]
    banks = [model.bank(), model.bank(interval=3), model.bank(storage="int8")]
    alone = [bank.fork() for bank in banks]
    model.read(banks, texts)
    for bank, other, text in zip(banks, alone, texts, strict=True):
        other.read(text)
        assert np.array_equal(bank.logits, other.logits)
    with pytest.raises(march_lm.Error, match="given twice"):
        model.read([banks[0], banks[0]], [DAYS, DAYS])
    with pytest.raises(march_lm.Error, match="one text for each bank"):
        model.read(banks, [DAYS])
    with pytest.raises(march_lm.Error, match="another model"):
        march_lm.load("tiny/march").read(banks[:1], ["a"])
    with pytest.raises(march_lm.Error, match="out of range"):
        model.read(banks[:1], [[9999]])


def test_pieces(model):
    bank = model.bank()
    first = bank.generate(DAYS, 4, temperature=0.0)
    second = bank.generate(QUESTION, 1, temperature=0.0, stop="x")
    with pytest.raises(march_lm.Error, match="another text since"):
        next(first)
    assert list(second) == [" barn"] and second.ended == "length"
    assert second.bank.tokens == bank.tokens
    assert list(second) == []
    stopped = model.generate(DAYS + QUESTION, 4, temperature=0.0, stop=["barn"])
    assert "".join(stopped) == " " and stopped.ended == "stop"


def arrays(dtype=np.float32, *, tokens=20, values=2):
    random = np.random.default_rng(0)

    def draw(*shape):
        return random.standard_normal(shape).astype(dtype)

    return [draw(2, tokens, 1, 4), draw(2, tokens, 1, 4), draw(2, tokens, values, 6), draw(2, tokens, values),
            draw(2, tokens, values), draw(values), draw(values)]  # fmt: skip


def test_operations_in_f32_are_those_in_f64():
    (q, k, v, a, b, decay, bias), bounds = arrays(), [[8, 16], [3, 20]]
    exact = [array.astype(np.float64) for array in (q, k, v, a, b, decay, bias)]
    found, back = ops.gated_delta_vjp(q, k, v, a, b, decay, bias, boundaries=bounds, final_state=True)
    right, exact_back = ops.gated_delta_vjp(*exact, boundaries=bounds, final_state=True)
    for one, other in zip(found, right, strict=True):
        assert one.dtype == np.float32 and other.dtype == np.float64
        assert np.allclose(one, other, atol=1e-5)
    gradients = back(*(np.ones_like(one) for one in found))
    exact_gradients = exact_back(*(np.ones_like(one) for one in right))
    for one, other, value in zip(gradients[:7], exact_gradients, (q, k, v, a, b, decay, bias), strict=False):
        assert one.shape == value.shape and np.allclose(one, other, atol=1e-3)
    assert gradients[7] is None
    # The states of some tokens, which continue elsewhere.
    rest = ops.gated_delta(*(x[:, 8:] for x in exact[:5]), *exact[5:], initial_state=ops.gated_delta(
        *(x[:, :8] for x in exact[:5]), *exact[5:], final_state=True).final_state)  # fmt: skip
    assert np.allclose(rest.readout, right.readout[:, 8:])


@pytest.mark.parametrize("form", [np.asfortranarray, lambda x: np.repeat(x, 2, 1)[:, ::2], WithArray, WithDLPack])
def test_operations_take_arrays_in_any_form(form):
    inputs = arrays()
    expected = ops.gated_delta(*inputs).readout
    formed = [form(x) if x.ndim > 1 else x for x in inputs]
    assert np.array_equal(ops.gated_delta(*formed).readout, expected)


def test_wrong_arrays():
    inputs = arrays()
    q, k, v, a, b, decay, bias = inputs
    for call, kind, words in [
        (lambda: ops.gated_delta(q, k, v, a, b, decay, bias.astype(float)), march_lm.Error, "must all be of float32"),
        (lambda: ops.gated_delta(q.astype(int), k, v, a, b, decay, bias), TypeError, "`q` must be of float32 or float64"),
        (lambda: ops.gated_delta(q[0], k, v, a, b, decay, bias), march_lm.Error, r"`q` has shape \[20, 1, 4\], expected"),
        (lambda: ops.gated_delta(q, k, v[:, :5], a, b, decay, bias), march_lm.Error, "gated_delta: `value` has shape"),
        (lambda: ops.gated_delta(q, k, v, a[:, :3], b, decay, bias), march_lm.Error, "retention_input"),
        (lambda: ops.gated_delta(*inputs, boundaries=[[3]]), march_lm.Error, "1 boundary lists"),
        (lambda: ops.gated_delta(*inputs, boundaries=[[3], [21]]), march_lm.Error, "boundary 21"),
        (lambda: ops.gated_delta(*inputs, initial_state=q), march_lm.Error, "initial_state"),
        (lambda: ops.gated_delta_vjp(*inputs)[1](np.ones(3, np.float32)), march_lm.Error, "a gradient has shape"),
        (lambda: ops.gated_delta_vjp(*inputs)[1](np.ones(v.shape)), march_lm.Error, "same type"),
        (lambda: ops.anchor_read(q, a[..., None], a[0, :2, :, None], v, boundaries=[[1], [2]]), march_lm.Error, "shape"),
        (lambda: ops.anchor_read(q, v, v[0], v, boundaries=[[1]]), march_lm.Error, "1 lists with 1 anchors"),
        (lambda: ops.log_linear_delta(*inputs, a[..., None], a[0]), march_lm.Error, "level_scale"),
    ]:
        with pytest.raises(kind, match=words):
            call()


def test_threads_of_operations():
    before = ops.threads()
    expected = ops.gated_delta(*arrays(tokens=200)).readout
    ops.set_threads(1)
    assert ops.threads() == 1
    assert np.array_equal(ops.gated_delta(*arrays(tokens=200)).readout, expected)
    ops.set_threads(before)

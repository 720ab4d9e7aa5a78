"""The process: threads, Ctrl-C, forks, memory."""

import _thread
import gc
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import DAYS, ROOT

import march_lm
from march_lm import ops


@pytest.fixture(scope="module")
def slow():
    """A model that takes a while to read."""
    return march_lm.load("tiny/march", threads=1)


LONG = np.zeros(100_000, dtype=np.int64)


def test_other_threads_run_during_work(slow):
    """The GIL is released: another thread counts while this one reads."""
    counted, done = 0, threading.Event()

    def count():
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    started = time.monotonic()
    slow.logits(LONG[:2048])
    seconds = time.monotonic() - started
    at_end = counted
    done.set()
    thread.join()
    assert at_end > 50 * seconds, f"{at_end} in {seconds:.2f} s"


def test_threads_share_a_model(model):
    expected = model.logits(DAYS)
    wrong = []

    def work(number):
        for _ in range(20):
            if not np.array_equal(model.logits(DAYS), expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_threads_share_banks(model):
    """Calls on one bank wait for each other, and calls on several do not wait for ever."""
    banks = [model.bank() for _ in range(3)]
    part = model.encode(DAYS)

    def work(number):
        for i in range(10):
            chosen = [banks[(number + i) % 3], banks[(number + i + 1) % 3]]
            model.read(chosen if number % 2 else chosen[::-1], [part, part])
            banks[number % 3].read(part)
            assert banks[i % 3].bytes > 0

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    assert sum(bank.tokens for bank in banks) == 4 * 10 * 3 * len(part)


def interrupted(work, after=0.5):
    """The seconds between Ctrl-C and the exception."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    sent = []

    def send():
        time.sleep(after)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        thread.join()
    return time.monotonic() - sent[0]


def test_interruption(slow, tmp_path):
    bank = slow.bank()
    assert interrupted(lambda: bank.read(LONG)) < 5
    assert 0 < bank.tokens < len(LONG)
    before = bank.tokens
    bank.read([1, 2, 3])  # it goes on
    assert bank.tokens == before + 3
    assert interrupted(lambda: slow.losses(LONG)) < 5
    assert interrupted(lambda: slow.read([slow.bank(), slow.bank()], [LONG, LONG])) < 5
    assert interrupted(lambda: slow.loglikelihood([("a" * 20000, " b")] * 3)) < 5
    assert interrupted(lambda: [list(slow.generate("a", 100)) for _ in range(10_000)]) < 5


def test_interrupted_training_is_saved(tmp_path):
    settings = ["train.steps=100000", "train.save_every=0", "train.validate_every=0", "train.sample_every=0"]
    settings += ["data.sequence_length=64", "train.tokens_per_step=128"]
    folder = tmp_path / "run"
    steps = []
    tell = [lambda event: steps.append(event["step"]) if event["event"] == "step" else None]
    assert interrupted(lambda: march_lm.train("tiny/march", folder, settings=settings, callbacks=tell), 2) < 5
    [checkpoint] = (folder / "checkpoints").iterdir()
    made = int(checkpoint.name.removeprefix("step-"))
    assert made in (steps[-1], steps[-1] + 1)  # Ctrl-C may come while the callback runs
    found = march_lm.train(folder=folder, resume=True, settings=[f"train.steps={made + 2}"])
    assert found[-1]["step"] == made + 2


def test_callbacks(tmp_path):
    """They run on the thread of the caller, while training waits; their exceptions stop it."""
    settings = ["train.steps=3", "data.sequence_length=64", "train.tokens_per_step=128", "train.validate_every=0"]
    here = []

    def fail(event):
        here.append(_thread.get_ident())
        if event["event"] == "step" and event["step"] == 2:
            raise RuntimeError("as asked")

    with pytest.raises(RuntimeError, match="as asked"):
        march_lm.train("tiny/march", tmp_path / "run", settings=settings, callbacks=[fail])
    assert set(here) == {_thread.get_ident()}
    assert (tmp_path / "run/checkpoints/step-2").is_dir()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_after_threads():
    """A child has none of the threads; it computes alone, with the same bits, and ends."""
    model = march_lm.load(threads=3)
    expected = model.logits(DAYS * 20)
    inputs = [np.ones((1, 64, 2, 8), np.float32)] * 3 + [np.ones((1, 64, 2), np.float32)] * 2 + [np.ones(2, np.float32)] * 2
    readout = ops.gated_delta(*inputs).readout
    child = os.fork()
    if child == 0:
        same = np.array_equal(model.logits(DAYS * 20), expected)
        same &= np.array_equal(ops.gated_delta(*inputs).readout, readout)
        del model
        gc.collect()
        again = march_lm.load(threads=2)  # has threads of its own
        same &= np.array_equal(again.logits(DAYS * 20), expected)
        os._exit(0 if same else 1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child hangs")
    assert status == 0


def resident():
    """Bytes of memory that the process has."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_thousand_banks_leave_nothing(model):
    """Banks, forks, texts and arrays are freed: a thousand take no more memory than the first hundred."""
    ids = np.zeros(300, dtype=np.int64)

    def use(count):
        for i in range(count):
            bank = model.bank(interval=16)
            bank.read(ids)
            fork = bank.fork()
            "".join(fork.generate([1], 2))
            assert fork.logits.shape == (model.vocabulary,)
            if i % 10 == 0:
                with pytest.raises(march_lm.Error):
                    bank.read([999])
                model.routing(ids)
        gc.collect()

    use(100)
    before, size = resident(), 0
    bank = model.bank(interval=16)
    bank.read(ids)
    size = bank.bytes
    use(1000)
    grown = resident() - before
    print(f"1,000 banks of {size} bytes: {grown} bytes more than before")
    assert grown < 20 * size, f"{grown} bytes more, {grown / 1000:.0f} for each bank of {size}"


def test_doctests():
    """The examples in the documentation of everything that is public."""
    import doctest

    from march_lm import _march

    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    found = 0
    names = ["march_lm", "march_lm.ops"]
    texts = [(march_lm.__doc__, names[0]), (ops.__doc__, names[1])]
    for name in march_lm.__all__:
        value = getattr(march_lm, name)
        if name != "EXAMPLE":
            texts.append((value.__doc__, name))
        if isinstance(value, type):
            texts += [(getattr(value, each).__doc__, f"{name}.{each}") for each in vars(value)]
    assert _march.Model.__module__ == "march_lm"
    for text, name in texts:
        test = parser.get_doctest(text or "", {}, name, None, 0)
        found += len(test.examples)
        runner.run(test)
    assert found > 40 and runner.summarize().failed == 0
    undocumented = [name for text, name in texts if not text and not name.rpartition(".")[2].startswith("_")]
    assert not undocumented


def test_the_example_of_the_readme(capsys):
    """The first lines that readers try."""
    for page, code in [("README.md", "import march_lm"), ("crates/python/README.md", "import march_lm")]:
        blocks = (ROOT / page).read_text(encoding="utf-8").split("```python\n")[1:]
        [example] = [block.split("```")[0] for block in blocks if block.startswith(code)]
        exec(compile(example, page, "exec"), {})
        assert capsys.readouterr().out.strip() == "barn"

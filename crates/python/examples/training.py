"""Trains a tiny MARCH on a built-in book for a few steps, and shows the loss."""

import tempfile
from pathlib import Path
from typing import Any

import march_lm

CONFIG = {
    "extends": "tiny/march",
    "data": {"sequence_length": 128},
    "train": {"steps": 3, "tokens_per_step": 256, "validate_every": 0, "sample_every": 0},
}


def show(event: dict[str, Any]) -> None:
    """A callback: called with every event."""
    if event["event"] == "step":
        print(f"step {event['step']} of {event['steps']}: loss {event['loss']:.3f}")


with tempfile.TemporaryDirectory() as folder:
    run = Path(folder) / "run"
    metrics = march_lm.train(CONFIG, run, callbacks=[show])
    print("".join(march_lm.load(run).generate("Alice was", 20, seed=1)))
assert [line["step"] for line in metrics if "loss" in line] == [1, 2, 3]

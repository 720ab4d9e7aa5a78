"""What the tests share: models, and the program `march` to compare with."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import march_lm

ROOT = Path(__file__).resolve().parents[3]

DAYS = "3 May: the key is in the barn, the map in the shed. That was 3 May. 4 May: the key is in the castle. That was 4 May. "
QUESTION = "Where was the key on 3 May?"


@pytest.fixture(scope="session")
def program():
    """Runs `march` with some arguments and an input; MARCH names it."""
    march = Path(os.environ.get("MARCH", ROOT / "target/release/march"))
    assert march.is_file(), f"{march} is not there; build it (cargo build --release) or name it with MARCH"

    def run(*arguments, text=""):
        command = [str(march), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, input=text.encode(), check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr.decode()}"
        return done.stdout.decode()

    return run


@pytest.fixture(scope="session")
def golden():
    """The folder of the golden checkpoints."""
    return ROOT / "crates/cli/golden"


@pytest.fixture(scope="session")
def model():
    """The model inside the package."""
    return march_lm.load(threads=2)


@pytest.fixture(scope="session")
def tiny_folder(program, tmp_path_factory):
    """A checkpoint of a tiny MARCH with random weights, which reads bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    program("init", "--config", "tiny/march", "--output", folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    return march_lm.load(tiny_folder)


@pytest.fixture
def numbers():
    """Random token ids of bytes."""
    return np.random.default_rng(0).integers(0, 256, 300)

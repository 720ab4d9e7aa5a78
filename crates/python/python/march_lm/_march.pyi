"""Types of the compiled part of `march_lm`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EXAMPLE",
    "Backward",
    "Bank",
    "Error",
    "Model",
    "Pieces",
    "Routing",
    "anchor_read_vjp",
    "gated_delta_vjp",
    "load",
    "log_linear_delta_vjp",
    "metrics",
    "presets",
    "set_threads",
    "threads",
    "train",
]

class _HasArray(Protocol):
    def __array__(self) -> NDArray[Any]: ...

class _HasDLPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# Numbers: what numpy can read.
_Array = NDArray[Any] | Sequence[Any] | _HasArray | _HasDLPack
# A text, or token ids.
_Ids = str | _Array
_Path = str | PathLike[str]
_Floats = NDArray[np.float32]
_Ints = NDArray[np.int64]
_Numbers = NDArray[np.float32] | NDArray[np.float64]

EXAMPLE: str

class _Message(TypedDict, total=False):
    role: str
    content: str
    reasoning_content: str

class Error(ValueError): ...

@final
class Pieces(Iterator[str]):
    def __iter__(self) -> Pieces: ...
    def __next__(self) -> str: ...
    @property
    def bank(self) -> Bank: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def ended(self) -> Literal["end", "stop", "length", "asked"] | None: ...

@final
class Bank:
    def read(self, ids: _Ids) -> None: ...
    def generate(
        self,
        prompt: _Ids,
        max_tokens: int = 256,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        penalty_window: int = 64,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> Pieces: ...
    def fork(self) -> Bank: ...
    def rollback(self, tokens: int) -> tuple[int, str | None]: ...
    def save(self, path: _Path) -> None: ...
    @property
    def logits(self) -> _Floats | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def anchors(self) -> _Ints: ...
    @property
    def policy(self) -> str: ...

@final
class Routing:
    @property
    def pieces(self) -> list[str]: ...
    @property
    def text(self) -> str: ...
    @property
    def boundaries(self) -> _Ints: ...
    @property
    def ranges(self) -> _Ints: ...
    @property
    def weights(self) -> _Floats: ...

@final
class Model:
    def encode(self, text: str) -> NDArray[np.uint32]: ...
    def decode(self, ids: _Array) -> str: ...
    def logits(self, ids: _Ids) -> _Floats: ...
    def losses(self, ids: _Ids) -> _Floats: ...
    def loss(self, ids: _Ids) -> float: ...
    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]: ...
    def answer(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]: ...
    def generate(
        self,
        prompt: _Ids | None = None,
        max_tokens: int = 256,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        penalty_window: int = 64,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> Pieces: ...
    def chat(
        self,
        messages: Sequence[_Message] | Sequence[dict[str, Any]],
        max_tokens: int = 256,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        penalty_window: int = 64,
        seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> Pieces: ...
    def bank(
        self,
        *,
        interval: int | None = None,
        top_k: int | Literal["dense"] | None = None,
        retention: str | None = None,
        placement: str | None = None,
        storage: Literal["f32", "bf16", "int8"] | None = None,
    ) -> Bank: ...
    def load_bank(self, path: _Path) -> Bank: ...
    def with_policy(
        self,
        *,
        interval: int | None = None,
        top_k: int | Literal["dense"] | None = None,
        retention: str | None = None,
        placement: str | None = None,
        storage: Literal["f32", "bf16", "int8"] | None = None,
    ) -> Model: ...
    def read(self, banks: Sequence[Bank], texts: list[_Ids]) -> None: ...
    def routing(self, ids: _Ids) -> Routing: ...
    @property
    def policy(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def weights(self) -> str: ...
    @property
    def model_type(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...

def presets() -> list[str]: ...
def load(
    model: _Path | None = None,
    *,
    weights: Literal["f32", "bf16", "int8", "q8", "q4"] | None = None,
    threads: int | None = None,
    device: Literal["cpu", "reference"] = "cpu",
    tokenizer: str | None = None,
    seed: int = 0,
) -> Model: ...
def train(
    config: _Path | dict[str, Any] | None = None,
    folder: _Path | None = None,
    *,
    callbacks: Sequence[Callable[[dict[str, Any]], object]] | None = None,
    settings: Sequence[str] | None = None,
    resume: bool = False,
    init_from: _Path | None = None,
    threads: int | None = None,
) -> list[dict[str, Any]]: ...
def metrics(folder: _Path) -> list[dict[str, Any]]: ...

@final
class Backward:
    def __call__(self, *gradients: _Array | None) -> list[_Numbers | None]: ...

def set_threads(threads: int) -> None: ...
def threads() -> int: ...
def gated_delta_vjp(
    inputs: Sequence[_Array | None],
    boundaries: Iterable[Sequence[int]],
    allow_neg_eigval: bool,
    final_state: bool,
    backward: bool,
) -> tuple[list[_Numbers], Backward | None]: ...
def anchor_read_vjp(
    inputs: Sequence[_Array | None],
    boundaries: Iterable[Sequence[int]],
    top_k: int | None,
    scale: float,
    backward: bool,
) -> tuple[list[_Numbers], Backward | None]: ...
def log_linear_delta_vjp(
    inputs: Sequence[_Array | None], allow_neg_eigval: bool, backward: bool
) -> tuple[list[_Numbers], Backward | None]: ...

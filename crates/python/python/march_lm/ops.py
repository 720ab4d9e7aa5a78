"""Operations for models of your own: arrays in, arrays out, each with its backward pass.

Arrays of float32 are computed by march's kernels on all threads, those of float64 by its reference, which is slow and
exact. Heads are an axis of their own: queries `[batch, tokens, heads, width]`. `march_lm.torch` has the same operations
for PyTorch, with gradients.

A function with `_vjp` in its name returns the result and a function that computes the gradients of the inputs from those
of the result, in their order.

>>> import numpy as np
>>> from march_lm import ops
>>> random = np.random.default_rng(0)
>>> q, k = random.standard_normal((2, 1, 32, 2, 8), dtype=np.float32)
>>> v = random.standard_normal((1, 32, 2, 16), dtype=np.float32)
>>> a, b = random.standard_normal((2, 1, 32, 2), dtype=np.float32)
>>> decay = np.zeros(2, dtype=np.float32)
>>> out = ops.gated_delta(q, k, v, a, b, decay, decay, boundaries=[[16, 32]])
>>> out.readout.shape, out.boundary_states.shape
((1, 32, 2, 16), (2, 2, 8, 16))
>>> out, backward = ops.gated_delta_vjp(q, k, v, a, b, decay, decay)
>>> d_q, d_k, *others = backward(np.ones_like(out.readout))
>>> d_q.shape == q.shape
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from march_lm import _march
from march_lm._march import set_threads, threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from march_lm._march import _Array

__all__ = [
    "GatedDelta",
    "anchor_read",
    "anchor_read_vjp",
    "gated_delta",
    "gated_delta_vjp",
    "log_linear_delta",
    "log_linear_delta_vjp",
    "set_threads",
    "threads",
]

Gradients = Callable[..., "list[NDArray[Any] | None]"]


class GatedDelta(NamedTuple):
    """The result of the gated delta rule."""

    readout: NDArray[Any]
    """o, `[batch, n, value_heads, d_v]`."""
    final_state: NDArray[Any]
    """The state after the last token, `[batch, value_heads, d_k, d_v]`; empty if it was not asked for."""
    boundary_states: NDArray[Any]
    """The states at the boundaries of the first sequence, then of the second, …: `[N, value_heads, d_k, d_v]`."""


def gated_delta(
    q: _Array,
    k: _Array,
    v: _Array,
    a: _Array,
    b: _Array,
    a_log: _Array,
    dt_bias: _Array,
    *,
    initial_state: _Array | None = None,
    boundaries: Sequence[Sequence[int]] = (),
    final_state: bool = False,
    allow_neg_eigval: bool = False,
) -> GatedDelta:
    """The gated delta rule, with the normalisation of queries and keys and the activations of the gates.

        q, k ← x / sqrt(Σx² + 1e-6)          β = σ(b), doubled with allow_neg_eigval
        α = exp(−exp(a_log) softplus(a + dt_bias))
        S ← α S,   S ← S + β k (v − Sᵀk)ᵀ,   o = d_k^-½ Sᵀq

    `q`, `k` `[batch, tokens, key_heads, d_k]`, `v` `[batch, tokens, value_heads, d_v]`, `a`, `b` `[batch, tokens,
    value_heads]`, `a_log`, `dt_bias` `[value_heads]`, `initial_state` `[batch, value_heads, d_k, d_v]`. `q` may have only
    the last n tokens. `boundaries` has for each sequence the numbers of tokens after which its state is returned.
    """
    inputs = [q, k, v, a, b, a_log, dt_bias, initial_state]
    found, _ = _march.gated_delta_vjp(inputs, boundaries, allow_neg_eigval, final_state, False)
    return GatedDelta(*found)


def gated_delta_vjp(
    q: _Array,
    k: _Array,
    v: _Array,
    a: _Array,
    b: _Array,
    a_log: _Array,
    dt_bias: _Array,
    *,
    initial_state: _Array | None = None,
    boundaries: Sequence[Sequence[int]] = (),
    final_state: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[GatedDelta, Gradients]:
    """`gated_delta` and its backward pass.

    The gradients of readout, final state and boundary states, which may be None, give those of q, k, v, a, b, a_log,
    dt_bias and initial_state.
    """
    inputs = [q, k, v, a, b, a_log, dt_bias, initial_state]
    found, backward = _march.gated_delta_vjp(inputs, boundaries, allow_neg_eigval, final_state, True)
    assert backward is not None
    of_all = backward
    return GatedDelta(*found), lambda readout=None, final=None, states=None: of_all(readout, final, states)


def anchor_read(
    q: _Array,
    routing_query: _Array,
    routing_keys: _Array,
    states: _Array,
    null_score: _Array | None = None,
    *,
    boundaries: Sequence[Sequence[int]],
    top_k: int | None = None,
    scale: float = 1.0,
) -> NDArray[Any]:
    """Attention over saved states: what each token reads of the anchors before it.

        q ← d_k^-½ q / sqrt(Σq² + 1e-6)      score of anchor m: scale · routing_query·routing_key_m
        π = softmax([scores …, null_score]),   o = Σ_m π_m S_mᵀ q

    `q` `[batch, tokens, key_heads, d_k]`, `routing_query` `[batch, tokens, value_heads, d_r]`, `routing_keys` `[N,
    value_heads, d_r]`, `states` `[N, value_heads, d_k, d_v]` as `gated_delta` returns them, `null_score` `[batch, tokens,
    value_heads]`. A token sees the anchors whose boundary is at or before its position, and reads the `top_k` with the
    highest scores, or all.
    """
    inputs = [q, routing_query, routing_keys, states, null_score]
    (readout,), _ = _march.anchor_read_vjp(inputs, boundaries, top_k, scale, False)
    return readout


def anchor_read_vjp(
    q: _Array,
    routing_query: _Array,
    routing_keys: _Array,
    states: _Array,
    null_score: _Array | None = None,
    *,
    boundaries: Sequence[Sequence[int]],
    top_k: int | None = None,
    scale: float = 1.0,
) -> tuple[NDArray[Any], Gradients]:
    """`anchor_read` and its backward pass: the gradients of the five arrays."""
    inputs = [q, routing_query, routing_keys, states, null_score]
    (readout,), backward = _march.anchor_read_vjp(inputs, boundaries, top_k, scale, True)
    assert backward is not None
    return readout, backward


def log_linear_delta(
    q: _Array,
    k: _Array,
    v: _Array,
    a: _Array,
    b: _Array,
    a_log: _Array,
    dt_bias: _Array,
    level_input: _Array,
    level_scale: _Array,
    *,
    allow_neg_eigval: bool = False,
) -> NDArray[Any]:
    """The log-linear gated delta rule: a state for each block of the past of 1, 2, 4, … tokens, with weights per token.

    Inputs are those of `gated_delta` and `level_input` `[batch, tokens, value_heads, levels]`, `level_scale`
    `[value_heads, levels]`: the weight of level m is softplus(level_scale · level_input). Queries are not scaled.
    """
    inputs = [q, k, v, a, b, a_log, dt_bias, level_input, level_scale]
    (readout,), _ = _march.log_linear_delta_vjp(inputs, allow_neg_eigval, False)
    return readout


def log_linear_delta_vjp(
    q: _Array,
    k: _Array,
    v: _Array,
    a: _Array,
    b: _Array,
    a_log: _Array,
    dt_bias: _Array,
    level_input: _Array,
    level_scale: _Array,
    *,
    allow_neg_eigval: bool = False,
) -> tuple[NDArray[Any], Gradients]:
    """`log_linear_delta` and its backward pass: the gradients of the nine arrays."""
    inputs = [q, k, v, a, b, a_log, dt_bias, level_input, level_scale]
    (readout,), backward = _march.log_linear_delta_vjp(inputs, allow_neg_eigval, True)
    assert backward is not None
    return readout, backward

"""march's operations for PyTorch on a CPU, with gradients, and a layer of MARCH built from them.

>>> import torch
>>> from march_lm.torch import MarchLayer
>>> layer = MarchLayer(64, num_heads=2, head_dim=16, anchor_interval=16)
>>> y, anchors = layer(torch.randn(2, 50, 64))
>>> y.shape, anchors.shape
(torch.Size([2, 50, 64]), torch.Size([6, 64]))
>>> y.sum().backward()
>>> layer.routing_query_proj.weight.grad.shape
torch.Size([16, 64])

Tensors of float32 are computed by march's kernels, those of float64 by its reference, so that `torch.autograd.gradcheck`
can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from march_lm import _march
from march_lm.ops import GatedDelta

__all__ = ["MarchLayer", "anchor_read", "gated_delta", "log_linear_delta"]


class _Call(torch.autograd.Function):
    """A function of `_march` with a backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Any, options: tuple[Any, ...], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        arrays = [None if x is None else x.detach().numpy() for x in inputs]
        found, ctx.gradients = function(arrays, *options, any(ctx.needs_input_grad))
        ctx.set_materialize_grads(False)
        return tuple(torch.from_numpy(array) for array in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.gradients(*(None if d is None else d.numpy() for d in gradients))
        return (None, None, *(None if d is None else torch.from_numpy(d) for d in found))


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    initial_state: Tensor | None = None,
    boundaries: Sequence[Sequence[int]] = (),
    final_state: bool = False,
    allow_neg_eigval: bool = False,
) -> GatedDelta:
    """`march_lm.ops.gated_delta` for tensors."""
    options = (boundaries, allow_neg_eigval, final_state)
    return GatedDelta(*_Call.apply(_march.gated_delta_vjp, options, q, k, v, a, b, a_log, dt_bias, initial_state))


def anchor_read(
    q: Tensor,
    routing_query: Tensor,
    routing_keys: Tensor,
    states: Tensor,
    null_score: Tensor | None = None,
    *,
    boundaries: Sequence[Sequence[int]],
    top_k: int | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`march_lm.ops.anchor_read` for tensors."""
    inputs = (q, routing_query, routing_keys, states, null_score)
    (readout,) = _Call.apply(_march.anchor_read_vjp, (boundaries, top_k, scale), *inputs)
    return readout


def log_linear_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    level_input: Tensor,
    level_scale: Tensor,
    *,
    allow_neg_eigval: bool = False,
) -> Tensor:
    """`march_lm.ops.log_linear_delta` for tensors."""
    inputs = (q, k, v, a, b, a_log, dt_bias, level_input, level_scale)
    (readout,) = _Call.apply(_march.log_linear_delta_vjp, (allow_neg_eigval,), *inputs)
    return readout


class MarchLayer(nn.Module):
    """A layer of MARCH: Gated DeltaNet that can also read the states it had every `anchor_interval` tokens.

    Its parameters have the names that they have in a checkpoint of march, below `attn.`. Called with `x` `[batch, tokens,
    hidden_size]` it returns `y` of the same shape, to be added to the stream of the text, and the same for the stream of
    the anchors, `[batch · (tokens // anchor_interval), hidden_size]`.

    A token finds an anchor by a key that is computed from the anchor's own stream, which passes through the layers beside
    the text: each layer gets what the layers before have made of it, as `anchors`; a single row stands for anchors that are
    all equal. Without `anchors`, in a first layer or a single one, that is `anchor_embedding`. Tokens cannot tell equal
    anchors apart: they read the mean of all, or with top-K of the newest.

        y, anchors = first(norm(x))
        x, anchors = x + y, first.anchor_embedding + anchors
        y, more = second(norm(x), norm(anchors))
        x, anchors = x + y, anchors + more
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        anchor_interval: int,
        num_v_heads: int | None = None,
        expand_v: float = 2.0,
        conv_size: int = 4,
        routing_dim: int = 8,
        routing_top_k: int | None = None,
        routing_scale: float = 1.0,
        null_route: bool = True,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.key_heads, self.value_heads = num_heads, num_v_heads or num_heads
        self.key_dim, self.value_dim = head_dim, round(head_dim * expand_v)
        self.anchor_interval, self.conv_size, self.norm_eps = anchor_interval, conv_size, norm_eps
        self.top_k, self.routing_scale, self.allow_neg_eigval = routing_top_k, routing_scale, allow_neg_eigval
        key, value = self.key_heads * self.key_dim, self.value_heads * self.value_dim

        def linear(outputs: int, inputs: int = hidden_size, bias: bool = False) -> nn.Linear:
            layer = nn.Linear(inputs, outputs, bias=bias)
            nn.init.normal_(layer.weight, std=0.02)
            if bias:
                nn.init.zeros_(layer.bias)
            return layer

        def conv(channels: int) -> nn.Conv1d:
            layer = nn.Conv1d(channels, channels, conv_size, groups=channels, bias=False)
            nn.init.normal_(layer.weight, std=0.02)
            return layer

        self.q_proj, self.k_proj, self.v_proj = linear(key), linear(key), linear(value)
        self.a_proj, self.b_proj = linear(self.value_heads), linear(self.value_heads)
        self.g_proj, self.o_proj = linear(value), linear(hidden_size, value)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = conv(key), conv(key), conv(value)
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(0.01, 16.0).log())
        step = torch.empty(self.value_heads).uniform_(-6.9078, -2.3026).exp()
        self.dt_bias = nn.Parameter(step + (-torch.expm1(-step)).log())
        self.o_norm = nn.RMSNorm(self.value_dim, eps=norm_eps)
        self.routing_query_proj = linear(self.value_heads * routing_dim)
        self.routing_key_proj = linear(self.value_heads * routing_dim)
        self.null_proj = linear(self.value_heads, bias=True) if null_route else None
        self.anchor_embedding = nn.Parameter(torch.empty(hidden_size).normal_(std=0.02))

    def forward(self, x: Tensor, anchors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the layer adds to the text and to the anchors."""
        batch, tokens, _ = x.shape
        ends = list(range(self.anchor_interval, tokens + 1, self.anchor_interval))
        boundaries = [ends] * batch
        count = batch * len(ends)
        if anchors is None:
            anchors = self.anchor_embedding[None]
        elif anchors.shape[0] not in (1, count):
            raise ValueError(f"got {anchors.shape[0]} anchors; {batch} texts of {tokens} tokens have {count}")
        q = self._heads(self._convolve(self.q_conv1d, self.q_proj(x)), self.key_heads)
        k = self._heads(self._convolve(self.k_conv1d, self.k_proj(x)), self.key_heads)
        v = self._heads(self._convolve(self.v_conv1d, self.v_proj(x)), self.value_heads)
        out = gated_delta(
            q, k, v, self.a_proj(x), self.b_proj(x), self.A_log, self.dt_bias,
            boundaries=boundaries, allow_neg_eigval=self.allow_neg_eigval,
        )  # fmt: skip
        readout = out.readout
        if count == 0:
            return self._written(readout, x), anchors[:0]
        states = out.boundary_states
        readout = readout + anchor_read(
            q,
            self._heads(self.routing_query_proj(x), self.value_heads),
            self._heads(self.routing_key_proj(anchors), self.value_heads).expand(count, -1, -1),
            states,
            None if self.null_proj is None else self.null_proj(x),
            boundaries=boundaries,
            top_k=self.top_k,
            scale=self.routing_scale,
        )
        # Each anchor asks its own state.
        own = self._heads(functional.silu(self.q_proj(anchors)), self.key_heads)
        own = own * (own.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * self.key_dim**-0.5
        own = own.repeat_interleave(self.value_heads // self.key_heads, dim=-2).expand(count, -1, -1)
        own = torch.einsum("nhk,nhkv->nhv", own, states)
        return self._written(readout, x), self._written(own, anchors)

    @staticmethod
    def _heads(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1))

    def _convolve(self, conv: nn.Conv1d, x: Tensor) -> Tensor:
        x = functional.pad(x.transpose(1, 2), (self.conv_size - 1, 0))
        return functional.silu(conv(x)).transpose(1, 2)

    def _written(self, readout: Tensor, x: Tensor) -> Tensor:
        gate = self._heads(functional.silu(self.g_proj(x)), self.value_heads)
        return self.o_proj((self.o_norm(readout) * gate).flatten(-2))

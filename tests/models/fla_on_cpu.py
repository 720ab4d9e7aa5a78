"""Makes the models of flash-linear-attention compute on a CPU.

Its layers, its configurations and its loading and saving are used as they are. Only the functions below them, which
start Triton kernels (or come from the package flash-attn), are replaced: by its own naive code for the delta rule and
its gate, and by plain torch for the others.
"""

import torch
import torch.nn.functional as F


def delta_rule(
    q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval=False, initial_state=None, output_final_state=False, **fixed
):
    """`chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule`, as the layer calls them."""
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    flags = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel")
    assert all(fixed.pop(flag) for flag in flags)
    assert initial_state is None and not output_final_state and fixed.pop("cu_seqlens", None) is None
    assert set(fixed) <= {"state_v_first"}, fixed
    # Each query and key serves the values of as many heads as there are of them for each.
    sharing = v.shape[2] // q.shape[2]
    q, k = (unit(x).repeat_interleave(sharing, dim=2) for x in (q, k))
    beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    g = naive_gdn_gate(g, A_log, dt_bias)
    return naive_recurrent_gated_delta_rule(q, k, v, beta, g)


def unit(x):
    """Vectors of length 1, with the epsilon of the kernels (1e-6, added to the square of the length)."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def convolution(x, weight, bias=None, activation=None, backend=None):
    """`causal_conv1d` of a text from its beginning: x is [texts, tokens, channels], weight [channels, width]."""
    width = weight.shape[1]
    y = F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), weight.unsqueeze(1), bias, groups=weight.shape[0])
    y = y.transpose(1, 2)
    assert activation in (None, "silu", "swish")
    return (y if activation is None else F.silu(y)), None


def rms_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False):
    """`rms_norm`; with `prenorm` also returns what was normed, the sum with the residual."""
    assert bias is None and not residual_in_fp32
    total = x if residual is None else x + residual
    y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight
    return (y, total) if prenorm else y


def rms_norm_gated(x, g, weight, bias, activation="swish", eps=1e-6, **more):
    """`rms_norm_gated`."""
    assert not any(more.values()), more
    gate = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}[activation]
    return rms_norm(x, weight, bias, eps=eps) * gate(g)


def rotary(x, cos, sin, interleaved=False, seqlen_offsets=0, cu_seqlens=None, chunk_indices=None):
    """`rotary_embedding`, of the two halves of a head: x is [texts, tokens, heads, width]."""
    assert not interleaved and seqlen_offsets == 0 and cu_seqlens is None
    cos, sin = (table[: x.shape[1], None, :] for table in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def attention(q, k, v, causal, window_size):
    """`flash_attn_func`: `window_size` are the tokens to the left and right that are seen besides the own, or -1."""
    left, right = window_size
    assert causal and right in (-1, 0)
    tokens = torch.arange(q.shape[1])
    distance = tokens[:, None] - tokens[None, :]
    seen = (distance >= 0) & (distance <= left if left >= 0 else True)
    sharing = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(sharing, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def swiglu(gate, up):
    return F.silu(gate) * up


def replace():
    """Replaces the kernels wherever the models of this comparison call them."""
    import fla.layers.attn
    import fla.layers.gated_deltanet
    import fla.modules.causal_conv1d.ops
    import fla.modules.mlp
    import fla.modules.norm.fused_norm_gate
    import fla.modules.norm.layernorm
    import fla.modules.rotary.ops

    def shaped(x, weight, **more):
        """As the convolution of one projection calls it, with arguments for texts that it does not have here."""
        unused = ("residual", "initial_state", "output_final_state", "cu_seqlens", "chunk_indices")
        assert not any(more.pop(key, None) for key in unused)
        return convolution(x, weight, **more)

    places = {
        fla.layers.gated_deltanet: {
            "chunk_gated_delta_rule": delta_rule,
            "fused_recurrent_gated_delta_rule": delta_rule,
            "causal_conv1d": convolution,
        },
        fla.layers.attn: {"flash_attn_func": attention},
        fla.modules.causal_conv1d.ops: {"causal_conv1d": shaped},
        fla.modules.mlp: {
            "swiglu": swiglu,
            "swiglu_linear": lambda gate, up, weight, bias: F.linear(swiglu(gate, up), weight, bias),
        },
        fla.modules.norm.fused_norm_gate: {"rms_norm_gated": rms_norm_gated},
        fla.modules.norm.layernorm: {"rms_norm": rms_norm},
        fla.modules.rotary.ops: {"rotary_embedding": rotary},
    }
    for module, functions in places.items():
        for name, function in functions.items():
            assert hasattr(module, name), f"{module.__name__} has no {name}"
            setattr(module, name, function)

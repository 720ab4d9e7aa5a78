"""The four models in PyTorch, eager: Transformer, Gated DeltaNet, Log-Linear Gated DeltaNet and MARCH.

The modules' tensors are named as in march's checkpoints. What does not need the recurrent state is computed for all
chunks at once; only the state's own path is a loop. `train_step.py --check` compares all of it with golden files.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

CHUNK = 64
# Intervals that the historical reader takes at once: they share one slice of the anchors, invisible ones weigh 0.
READ_INTERVALS = 4
linear = functools.partial(nn.Linear, bias=False)


def l2norm(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def split_heads(x, heads):
    """[B, T, H·d] to [B, H, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class UnitLowerInverse(torch.autograd.Function):
    """N = (I + strict_tril(L))⁻¹; dL = −strict_tril(Nᵀ dN Nᵀ). The rest of L is not read."""

    @staticmethod
    def forward(ctx, lower):
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient):
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ gradient @ inverse.mT).neg_().tril_(-1)


unit_lower_inverse = UnitLowerInverse.apply


def inverse_by_rows(lower):
    """The same row by row, as eager code does it that leaves the gradient to autograd."""
    n = -lower.tril(-1)
    rows = [n[..., 0, :]]
    for i in range(1, n.shape[-1]):
        row = n[..., i, :]
        rows.append(row + (row[..., :i].unsqueeze(-1) * torch.stack(rows, -2)).sum(-2))
    return torch.stack(rows, -2) + torch.eye(n.shape[-1], dtype=n.dtype)


def plain():
    """From now on without what was tuned by hand: the inverse row by row, and every token reads under a mask."""
    global unit_lower_inverse, READ_INTERVALS
    unit_lower_inverse, READ_INTERVALS = inverse_by_rows, 1 << 30


def cut(x, chunk):
    """[B, H, T, …] to [n, B·H, chunk, …], the tail padded with zeros. Chunks first: each is contiguous."""
    tail = -x.shape[2] % chunk
    if tail:
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, tail))
    x = x.unflatten(2, (-1, chunk))
    return x.permute(2, 0, 1, *range(3, x.dim())).flatten(1, 2)


def join(chunks, batch, tokens):
    """A list of n outputs [B·H, chunk, d] to [B, H, T, d]."""
    return torch.stack(chunks, 1).flatten(1, 2)[:, :tokens].unflatten(0, (batch, -1))


def chunkwise(q, k, v, log_alpha, beta, chunk):
    """All of the gated delta rule that does not need the state, for all chunks at once.

    Returns e∘Q, (d∘K)ᵀ, the total decay, P, N, diag(β) V and diag(βe) K, all [n, B·H, …].
    """
    q, k, v, g, beta = (cut(x, chunk) for x in (q, k, v, log_alpha, beta.unsqueeze(-1)))
    g = g.cumsum(-1)
    # Mask first, then exponentiate: above the diagonal the exponents are positive.
    upper = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(upper, -math.inf).exp()
    e, total = g.exp().unsqueeze(-1), g[..., -1:]
    k_beta = k * beta
    inverse = unit_lower_inverse(k_beta @ k.mT * decay)
    k_decayed = (k * (total - g).exp().unsqueeze(-1)).mT
    return q * e, k_decayed, total.exp().unsqueeze(-1), q @ k.mT * decay, inverse, v * beta, k_beta * e


def gated_delta(q, k, v, log_alpha, beta, interval=None):
    """The gated delta rule: q, k [B, H, T, d_k], v [B, H, T, d_v], log_alpha and beta [B, H, T].

    Returns the output [B, H, T, d_v] and, with an interval, the states after every so many tokens that have a token
    after them, [B, H, M, d_k, d_v].
    """
    batch, heads, tokens, d_k = q.shape
    chunk = CHUNK if not interval else math.gcd(CHUNK, interval)
    q_decayed, k_decayed, total, p, inverse, v_beta, k_beta = chunkwise(q, k, v, log_alpha, beta, chunk)
    u, w = inverse @ v_beta, inverse @ k_beta
    state = q.new_zeros(batch * heads, d_k, v.shape[-1])
    out, anchors = [], []
    # unbind: its backward is one stack, that of indexing would be a full tensor of zeros for each chunk.
    loop = zip(*(x.unbind(0) for x in (q_decayed, k_decayed, total, p, u, w)))
    for c, (q_c, k_c, total_c, p_c, u_c, w_c) in enumerate(loop, 1):
        new = torch.baddbmm(u_c, w_c, state, alpha=-1)
        out.append(torch.baddbmm(p_c @ new, q_c, state))
        state = torch.baddbmm(state * total_c, k_c, new)
        if interval and c * chunk % interval == 0 and c * chunk < tokens:
            anchors.append(state)
    anchors = torch.stack(anchors, 1).unflatten(0, (batch, heads)) if anchors else None
    return join(out, batch, tokens), anchors


def log_linear_delta(q, k, v, log_alpha, beta, levels):
    """The same on a Fenwick tree of states, each read with its own weight; levels [B, H, T, NL], q unscaled."""
    batch, heads, tokens, d_k = q.shape
    q_decayed, k_decayed, total, p, inverse, v_beta, k_beta = chunkwise(q, k, v, log_alpha, beta, CHUNK)
    levels = cut(levels, CHUNK)
    top = levels.shape[-1] - 1
    u, w = inverse @ v_beta, inverse @ k_beta
    # Inside a chunk: level(i, j) = bit_length(i XOR j), picked by one product with a one-hot for each row i.
    inner = CHUNK.bit_length()
    place = [[min((i ^ j).bit_length(), top) for j in range(CHUNK)] for i in range(CHUNK)]
    one_hot = F.one_hot(torch.tensor(place), top + 1).mT.to(q.dtype)
    weights = torch.einsum("xil,ilj->xij", levels.flatten(0, 1), one_hot).view_as(p)
    inside = (p @ inverse * weights) @ v_beta
    q_inter = q_decayed - p @ w
    states, out = {}, []
    loop = zip(*(x.unbind(0) for x in (inside, q_inter, k_decayed, total, u, w, levels)))
    for c, (inside_c, q_c, k_c, total_c, u_c, w_c, levels_c) in enumerate(loop):
        for level, state in states.items():
            inside_c = inside_c + levels_c[..., min(inner + level, top), None] * (q_c @ state)
        out.append(inside_c)
        # Levels of c's trailing ones merge with the chunk's own write into the next; those above go on.
        ones = ((c + 1) & -(c + 1)).bit_length() - 1
        merged = [states.pop(level) for level in range(ones)]
        states = {l: torch.baddbmm(s * total_c, k_c, w_c @ s, alpha=-1) for l, s in states.items()}
        if merged:
            merged = sum(merged)
            states[ones] = torch.baddbmm(merged * total_c, k_c, torch.baddbmm(u_c, w_c, merged, alpha=-1))
        else:
            states[ones] = k_c @ u_c
    return join(out, batch, tokens)


class ShortConv(nn.Conv1d):
    """Depthwise causal convolution and SiLU, [B, T, D]."""

    def __init__(self, width, size):
        super().__init__(width, width, size, groups=width, bias=False)

    def forward(self, x):
        # Contiguous before SiLU: else its backward, too, walks a transposed gradient.
        return F.silu(super().forward(F.pad(x.mT, (self.kernel_size[0] - 1, 0))).mT.contiguous())


class GatedDeltaNet(nn.Module):
    """Also the base of the two models that change only how states are read."""

    def __init__(self, config, layer):
        super().__init__()
        width, d_k = config["hidden_size"], config["head_dim"]
        self.heads = config["num_heads"]
        self.v_heads = config.get("num_v_heads") or self.heads
        self.beta_scale = 2.0 if config.get("allow_neg_eigval") else 1.0
        d_v = round(d_k * config["expand_v"])
        keys, values = self.heads * d_k, self.v_heads * d_v
        self.q_proj, self.k_proj, self.v_proj = linear(width, keys), linear(width, keys), linear(width, values)
        self.a_proj, self.b_proj = linear(width, self.v_heads), linear(width, self.v_heads)
        self.g_proj, self.o_proj = linear(width, values), linear(values, width)
        size = config["conv_size"]
        self.q_conv1d, self.k_conv1d = ShortConv(keys, size), ShortConv(keys, size)
        self.v_conv1d = ShortConv(values, size)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(self.v_heads)) for _ in range(2))
        self.o_norm = nn.RMSNorm(d_v, eps=config["norm_eps"])
        self.q_scale = d_k**-0.5

    def normalised(self, x):
        """Queries or keys after SiLU, [B, T, H·d_k], to unit length, [B, H_v, T, d_k]."""
        x = l2norm(x.unflatten(-1, (self.heads, -1))).transpose(1, 2)
        return x if self.heads == self.v_heads else x.repeat_interleave(self.v_heads // self.heads, 1)

    def inputs(self, x):
        """q, k, v, log α and β."""
        q = self.normalised(self.q_conv1d(self.q_proj(x))) * self.q_scale
        k = self.normalised(self.k_conv1d(self.k_proj(x)))
        v = split_heads(self.v_conv1d(self.v_proj(x)), self.v_heads)
        log_alpha = -self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias)
        return q, k, v, log_alpha.mT, (self.b_proj(x).sigmoid() * self.beta_scale).mT

    def output(self, o, x):
        """Norm, gate and projection of o [B, H, T, d_v]."""
        return self.o_proj((self.o_norm(o.transpose(1, 2)).flatten(2)) * F.silu(self.g_proj(x)))

    def forward(self, x, anchors):
        return self.output(gated_delta(*self.inputs(x))[0], x), None


class LogLinear(GatedDeltaNet):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.q_scale = 1.0
        self.l_proj = linear(config["hidden_size"], self.v_heads * config["num_levels"])
        self.L = nn.Parameter(torch.empty(self.v_heads, config["num_levels"]))

    def forward(self, x, anchors):
        levels = F.softplus(self.L.unsqueeze(1) * split_heads(self.l_proj(x), self.v_heads))
        return self.output(log_linear_delta(*self.inputs(x), levels), x), None


class March(GatedDeltaNet):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        width, routing = config["hidden_size"], self.v_heads * config["routing_dim"]
        self.first, self.last = layer == 0, layer == config["num_hidden_layers"] - 1
        self.interval, self.top_k = config["anchor_interval"], config.get("routing_top_k")
        self.scale = config.get("routing_scale", 1.0)
        self.routing_query_proj, self.routing_key_proj = linear(width, routing), linear(width, routing)
        self.null_proj = linear(width, self.v_heads, bias=True) if config.get("null_route", True) else None

    def forward(self, x, u):
        """Text x [B, T, D] and anchors u [B, M, D]; [1, 1, D] while all are equal."""
        q, *others = self.inputs(x)
        o, states = gated_delta(q, *others, interval=self.interval)
        if states is None:
            return self.output(o, x), None
        history = self.read(q[:, :, self.interval :], x[:, self.interval :], u, states)
        out = self.output(torch.cat([o[:, :, : self.interval], o[:, :, self.interval :] + history], 2), x)
        if self.last:
            return out, None
        q_own = self.normalised(F.silu(self.q_proj(u))) * self.q_scale
        return out, self.output((q_own.unsqueeze(-2) @ states).squeeze(-2), u)

    def weights(self, x, u, count):
        """Routing weights [B, H, T − C, M] of the tokens after the first interval, which all see an anchor."""
        scores = split_heads(self.routing_query_proj(x) * self.scale, self.v_heads)
        scores = scores @ split_heads(self.routing_key_proj(u), self.v_heads).mT
        scores = scores.expand(-1, -1, -1, count)
        age = torch.arange(x.shape[1]).unsqueeze(1) // self.interval - torch.arange(count)
        hidden = age < 0
        # Top-K masks: there is no cheap grouped product here. In the first layer all keys are equal: the newest.
        if self.top_k and self.first:
            hidden = hidden | (age >= self.top_k)
        scores = scores.masked_fill(hidden, -math.inf)
        if self.top_k and not self.first and self.top_k < count:
            best = scores.detach().topk(self.top_k, -1).indices
            rest = torch.ones_like(scores, dtype=torch.bool).scatter(-1, best, False)
            scores = scores.masked_fill(rest, -math.inf)
        if self.null_proj is None:
            return scores.softmax(-1)
        return torch.cat([scores, self.null_proj(x).mT.unsqueeze(-1)], -1).softmax(-1)[..., :count]

    def read(self, q, x, u, states):
        """Σ_m π_m A_mᵀ q: the queries times their weights, [T, M·d_k], against the anchors, [M·d_k, d_v]."""
        batch, heads, count, d_k, d_v = states.shape
        weights = self.weights(x, u, count).flatten(0, 1)
        states, q = states.view(batch * heads, count * d_k, d_v), q.flatten(0, 1)
        size = READ_INTERVALS * self.interval
        out = []
        for i, (weights_i, q_i) in enumerate(zip(weights.split(size, 1), q.split(size, 1)), 1):
            seen = min(i * READ_INTERVALS, count)
            weighted = weights_i[..., :seen].unsqueeze(-1) * q_i.unsqueeze(-2)
            out.append(weighted.flatten(2) @ states[:, : seen * d_k])
        return torch.cat(out, 1).unflatten(0, (batch, heads))


@functools.lru_cache
def rotary(tokens, width, theta):
    angle = torch.outer(torch.arange(tokens), theta ** -(torch.arange(0, width, 2) / width))
    return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        width = config["hidden_size"]
        self.heads, self.theta = config["num_heads"], config["rope_theta"]
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(width, width) for _ in range(4))

    def rotate(self, x):
        cos, sin = rotary(x.shape[2], x.shape[3], self.theta)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, x, anchors):
        q, k, v = (split_heads(f(x), self.heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        o = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(2)), None


class FeedForward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj = linear(width, inner), linear(width, inner)
        self.down_proj = linear(inner, width)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


MIXERS = {
    "transformer": Attention,
    "gated_deltanet": GatedDeltaNet,
    "log_linear_gated_deltanet": LogLinear,
    "march": March,
}


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        width, eps = config["hidden_size"], config["norm_eps"]
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.attn = MIXERS[config["model_type"]](config, layer)
        self.mlp = FeedForward(width, config["intermediate_size"])

    def forward(self, text, anchors):
        mixed, mixed_anchors = self.attn(self.attn_norm(text), None if anchors is None else self.attn_norm(anchors))
        text = text + mixed
        text = text + self.mlp(self.mlp_norm(text))
        if mixed_anchors is not None:
            anchors = anchors + mixed_anchors
            anchors = anchors + self.mlp(self.mlp_norm(anchors))
        return text, anchors


class Model(nn.Module):
    """The tensors are named as in the checkpoint."""

    def __init__(self, config):
        super().__init__()
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(vocabulary, width)
        self.model.layers = nn.ModuleList(Block(config, n) for n in range(config["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(width, eps=config["norm_eps"])
        self.model.register_parameter("anchor_embedding", None)
        if config["model_type"] == "march":
            self.model.anchor_embedding = nn.Parameter(torch.empty(width))
        self.lm_head = linear(width, vocabulary)

    def forward(self, ids):
        text, anchors = self.model.embeddings(ids), self.model.anchor_embedding
        anchors = None if anchors is None else anchors.view(1, 1, -1)
        for layer in self.model.layers:
            text, anchors = layer(text, anchors)
        return self.lm_head(self.model.norm(text))

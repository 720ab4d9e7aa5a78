"""The core of attention and of Gated DeltaNet in PyTorch on the CPU, eager, float32: the peers of
`march reproduce efficiency`.

Forward and backward on one sequence of each length: scaled_dot_product_attention, causal, and the gated delta rule by
chunks with one triangular solve, the faster of the two ways in bench/peers/engine.py. Prints one JSON object a line as
it goes: {"arm", "length", "seconds" (the best of all repeats), "repeats"}. A run that would take longer than --limit, as
predicted from the length before, is skipped: it has 0 repeats, and its seconds are the prediction. The program reads
no other file, because march has it inside and passes it to Python.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F

CHUNK = 64
EPS = 1e-6


def l2norm(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def gated_delta(q, k, v, a, b, a_log, dt_bias):
    """All that does not need the state for all chunks at once, then a loop over chunks; as in bench/peers/engine.py.

    q, k [B, H, T, d_k], v [B, H, T, d_v], a and b [B, H, T], a_log and dt_bias [H]; T is a multiple of CHUNK.
    """
    log_alpha, beta = -a_log.exp()[:, None] * F.softplus(a + dt_bias[:, None]), torch.sigmoid(b)
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    batch, heads, tokens, d = q.shape
    cut = lambda x: x.reshape(batch, heads, tokens // CHUNK, CHUNK, *x.shape[3:])
    q, k, v, log_alpha, beta = cut(q), cut(k), cut(v), cut(log_alpha), cut(beta)

    g = log_alpha.cumsum(-1)
    # Mask first, then exponentiate: above the diagonal the exponents are positive.
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    k_beta = k * beta[..., None]
    mixed = (k_beta @ k.transpose(-1, -2) * decay).tril(-1)
    # u = N diag(β) V and w = N diag(β e) K with N = (I + mixed)⁻¹, in one triangular solve.
    right = torch.cat([v * beta[..., None], k_beta * g.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(mixed, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], d], -1)
    p = q @ k.transpose(-1, -2) * decay
    q_decayed = q * g.exp()[..., None]
    k_decayed = (k * (g[..., -1:] - g).exp()[..., None]).transpose(-1, -2)
    total = g[..., -1].exp()[..., None, None]
    # Chunks are taken apart once: taking them one by one would make every gradient as long as the sequence.
    parts = [x.unbind(2) for x in (u, w, q_decayed, p, k_decayed, total)]

    state = q.new_zeros(batch, heads, d, v.shape[-1])
    out = []
    for u, w, q_decayed, p, k_decayed, total in zip(*parts):
        new = u - w @ state
        out.append(q_decayed @ state + p @ new)
        state = state * total + k_decayed @ new
    return torch.cat(out, 2)


def delta_inputs(options, tokens):
    """Random inputs, with decays as a new layer has them."""
    heads = options.heads
    widths = [options.head_dim_k, options.head_dim_k, options.head_dim_v]
    wide = [torch.randn(1, heads, tokens, width) for width in widths]
    narrow = [torch.randn(1, heads, tokens) for _ in range(2)]
    a_log, dt_bias = torch.full((heads,), 1.4), torch.full((heads,), -4.6)
    return gated_delta, [*wide, *narrow, a_log, dt_bias]


def attention_inputs(options, tokens):
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attend, [torch.randn(1, options.attention_heads, tokens, options.attention_head_dim) for _ in range(3)]


def best(options, function, inputs):
    """Seconds of the fastest run, and the number of runs; as often as the engine's own operations are repeated."""
    inputs = [x.requires_grad_() for x in inputs]
    with torch.no_grad():
        gradient = torch.randn_like(inputs[2])
    times = []
    while True:
        start = time.perf_counter()
        torch.autograd.grad(function(*inputs), inputs, gradient)
        times.append(time.perf_counter() - start)
        taken, long = sum(times), 20 * options.seconds
        if taken >= long or len(times) > 1 and taken >= options.seconds or len(times) >= 1000:
            return min(times), len(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,2048,4096,8192", help="with commas between them, ascending")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim-k", type=int, default=48)
    parser.add_argument("--head-dim-v", type=int, default=96)
    parser.add_argument("--attention-heads", type=int, default=2)
    parser.add_argument("--attention-head-dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="repeat each for so long")
    parser.add_argument("--limit", type=float, default=90.0, help="skip a run that would take longer, in seconds")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    arms = {"attention": (attention_inputs, 2), "GDN": (delta_inputs, 1)}
    before = {}
    for length in map(int, options.lengths.split(",")):
        for arm, (inputs, power) in arms.items():
            known, seconds = before.get(arm, (length, 0.0))
            seconds *= (length / known) ** power
            repeats = 0
            if seconds <= options.limit:
                seconds, repeats = best(options, *inputs(options, length))
            before[arm] = (length, seconds)
            print(json.dumps({"arm": arm, "length": length, "seconds": seconds, "repeats": repeats}), flush=True)


if __name__ == "__main__":
    main()

"""Times of the engine's operations in PyTorch on the CPU, eager, float32.

Prints one JSON object, {"name": milliseconds}: the best of several repetitions after a warm-up. The names are
those of `cargo bench --workspace --bench engine`, with the peer's way of doing it in brackets where there are two. With
--check it instead compares the chunked gated delta rule that is timed here, and its gradients, with the
token-by-token recurrence in float64. --quick runs everything once, without a warm-up.
"""

import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F

CHUNK = 64
EPS = 1e-6


def l2norm(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def gates(a, b, a_log, dt_bias):
    """log α and β from the layer's projections, [B, H, T]."""
    return -a_log.exp()[:, None] * F.softplus(a + dt_bias[:, None]), torch.sigmoid(b)


def recurrence(q, k, v, a, b, a_log, dt_bias):
    """One token after another: S ← αS, S ← S + β k (v − Sᵀk)ᵀ, o = Sᵀq."""
    log_alpha, beta = gates(a, b, a_log, dt_bias)
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    batch, heads, tokens, d = q.shape
    state = q.new_zeros(batch, heads, d, v.shape[-1])
    out = []
    for t in range(tokens):
        state = state * log_alpha[:, :, t].exp()[..., None, None]
        kt = k[:, :, t]
        error = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, kt)
        state = state + torch.einsum("bhk,bhv->bhkv", kt * beta[:, :, t, None], error)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(out, 2)


def inverse_by_rows(mixed):
    """(I + mixed)⁻¹ row after row, as the usual eager fallback does it."""
    inverse = -mixed
    for i in range(1, CHUNK):
        row = inverse[..., i, :i].clone()
        above = inverse[..., :i, :i].clone()
        inverse[..., i, :i] = row + (row[..., None] * above).sum(-2)
    return inverse + torch.eye(CHUNK, dtype=mixed.dtype, device=mixed.device)


def gated_delta_by_rows(*inputs):
    return gated_delta(*inputs, by_rows=True)


def gated_delta(q, k, v, a, b, a_log, dt_bias, by_rows=False):
    """The same by chunks: all that does not need the state for all chunks at once, then a loop over chunks.

    q, k [B, H, T, d_k], v [B, H, T, d_v], a and b [B, H, T], a_log and dt_bias [H]; T is a multiple of CHUNK.
    With by_rows the triangular system is solved as the usual eager fallback does, else by one triangular solve.
    """
    log_alpha, beta = gates(a, b, a_log, dt_bias)
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    batch, heads, tokens, d = q.shape
    cut = lambda x: x.reshape(batch, heads, tokens // CHUNK, CHUNK, *x.shape[3:])
    q, k, v, log_alpha, beta = cut(q), cut(k), cut(v), cut(log_alpha), cut(beta)

    g = log_alpha.cumsum(-1)
    # Mask first, then exponentiate: above the diagonal the exponents are positive.
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    k_beta = k * beta[..., None]
    mixed = (k_beta @ k.transpose(-1, -2) * decay).tril(-1)
    # u = N diag(β) V and w = N diag(β e) K with N = (I + mixed)⁻¹, in one triangular solve.
    right = torch.cat([v * beta[..., None], k_beta * g.exp()[..., None]], -1)
    if by_rows:
        solved = inverse_by_rows(mixed) @ right
    else:
        solved = torch.linalg.solve_triangular(mixed, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], d], -1)
    p = q @ k.transpose(-1, -2) * decay
    q_decayed = q * g.exp()[..., None]
    k_decayed = (k * (g[..., -1:] - g).exp()[..., None]).transpose(-1, -2)
    total = g[..., -1].exp()[..., None, None]

    state = q.new_zeros(batch, heads, d, v.shape[-1])
    out = []
    for c in range(tokens // CHUNK):
        new = u[:, :, c] - w[:, :, c] @ state
        out.append(q_decayed[:, :, c] @ state + p[:, :, c] @ new)
        state = state * total[:, :, c] + k_decayed[:, :, c] @ new
    return torch.cat(out, 2)


def delta_inputs(heads, tokens, d, dtype=torch.float32):
    """Random inputs with decays and β as a trained layer has them."""
    wide = [torch.randn(1, heads, tokens, d, dtype=dtype) for _ in range(3)]
    narrow = [torch.randn(1, heads, tokens, dtype=dtype) for _ in range(2)]
    a_log = torch.empty(heads, dtype=dtype).uniform_(0.01, 16).log()
    dt = torch.empty(heads, dtype=dtype).uniform_(1e-3, 1e-1)
    return [x.requires_grad_() for x in [*wide, *narrow, a_log, dt.expm1().log()]]


def check():
    torch.manual_seed(0)
    inputs = delta_inputs(heads=2, tokens=4 * CHUNK, d=16, dtype=torch.float64)
    weights = torch.randn(1, 2, 4 * CHUNK, 16, dtype=torch.float64)
    results = []
    for function in (recurrence, gated_delta, gated_delta_by_rows):
        out = function(*inputs)
        results.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    worst = 0.0
    names = ["o", "dq", "dk", "dv", "da", "db", "dA_log", "d dt_bias"]
    for name, want, *found in zip(names, *results):
        error = max(((want - each).abs().max() / want.abs().max()).item() for each in found)
        worst = max(worst, error)
        print(f"{name:10} {error:.1e} of the largest value")
    if not worst < 1e-10:
        sys.exit("the chunked form does not equal the recurrence")


def best(function, repetitions, seconds=2.0):
    """Milliseconds of the fastest of several runs, for at least `repetitions` runs and about `seconds`.

    With 0 repetitions, of a single run.
    """
    if repetitions == 0:
        repetitions = 1
        seconds = 0.0
    else:
        for _ in range(2):
            function()
    times = []
    start = time.perf_counter()
    while len(times) < repetitions or (time.perf_counter() - start < seconds and len(times) < 200):
        before = time.perf_counter()
        function()
        times.append(time.perf_counter() - before)
    return min(times) * 1e3


def forward(function, inputs):
    def run():
        with torch.no_grad():
            function(*inputs)

    return run


def forward_backward(function, inputs, gradient):
    def run():
        torch.autograd.grad(function(*inputs), inputs, gradient)

    return run


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def swiglu(gate, up):
    return F.silu(gate) * up


def short_conv(x, weight):
    """x [B, T, D], weight [D, 1, K]."""
    tokens = x.shape[1]
    y = F.conv1d(x.transpose(1, 2), weight, padding=weight.shape[-1] - 1, groups=x.shape[2])[..., :tokens]
    # Contiguous, as the next operation needs it.
    return F.silu(y).transpose(1, 2).contiguous()


def measure(repetitions):
    results = {}
    heads, tokens = 4, 4096
    for d in (64, 128):
        inputs = delta_inputs(heads, tokens, d)
        gradient = torch.randn(1, heads, tokens, d)
        for how, function in [("row loop", gated_delta_by_rows), ("triangular solve", gated_delta)]:
            results[f"gated_delta forward d={d} ({how})"] = best(forward(function, inputs), repetitions)
            run = forward_backward(function, inputs, gradient)
            results[f"gated_delta forward+backward d={d} ({how})"] = best(run, repetitions)

    inputs = [torch.randn(1, 8, 4096, 64).requires_grad_() for _ in range(3)]
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    run = forward_backward(attend, inputs, torch.randn(1, 8, 4096, 64))
    results["attention forward+backward"] = best(run, repetitions)

    # 32 MiB each: beyond the last level of cache together.
    new = lambda *shape: torch.randn(*shape).requires_grad_()
    gradient = torch.randn(1, 8192, 1024)
    layers = [
        ("rms_norm", rms_norm, [new(1, 8192, 1024), new(1024)]),
        ("swiglu", swiglu, [new(1, 8192, 1024), new(1, 8192, 1024)]),
        ("short_conv", short_conv, [new(1, 8192, 1024), new(1024, 1, 4)]),
    ]
    for name, function, inputs in layers:
        run = forward_backward(function, inputs, gradient)
        results[f"{name} forward+backward"] = best(run, repetitions)

    x, weight = torch.randn(2048, 512), torch.randn(2048, 512)
    results["linear 2048x512x2048"] = best(forward(F.linear, [x, weight]), 4 * repetitions)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5, help="at least this many runs of each")
    parser.add_argument("--check", action="store_true", help="prove the chunked form instead of timing")
    parser.add_argument("--quick", action="store_true", help="one run of each, which shows that it works")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.check:
        check()
        return
    torch.manual_seed(0)
    results = {name: round(ms, 4) for name, ms in measure(0 if options.quick else options.repetitions).items()}
    print(json.dumps(results, indent=2))
    print(f"PyTorch {torch.__version__}, {options.threads} threads", file=sys.stderr)


if __name__ == "__main__":
    main()

"""march's operations in PyTorch (`march_lm.torch`) and the same in plain PyTorch, on the CPU in float32.

    python python.py [--tokens 2048] [--heads 4] [--width 64] [--threads N] [--quick]

Prints milliseconds of a forward pass and of forward and backward passes, the fastest of several runs, and how many times
as fast march's operations are. The plain forms are those of models.py: chunkwise, tuned by hand; `by rows` leaves the
inverse in a chunk to autograd, as eager code does it. First the results of the two are compared.

    python python.py --logits DIR

times `model.logits` of a checkpoint on 2,048 tokens, as `cargo bench -p march-lm --bench decode -- --logits DIR` times the
same call in Rust.
"""

import argparse
import math
import sys
import time

import models
import torch
import torch.nn.functional as F
from engine import best, forward, forward_backward

import march_lm
import march_lm.ops
import march_lm.torch as march


def inputs(options):
    """q, k, v, a, b, a_log, dt_bias as a trained layer has them, with heads as an axis after the tokens."""
    heads, tokens, width = options.heads, options.tokens, options.width
    wide = [torch.randn(1, tokens, heads, width) for _ in range(3)]
    narrow = [torch.randn(1, tokens, heads) for _ in range(2)]
    rates = [torch.empty(heads).uniform_(0.01, 16).log(), torch.empty(heads).uniform_(1e-3, 0.1).expm1().log()]
    return [x.requires_grad_() for x in [*wide, *narrow, *rates]]


def heads_first(q, k, v, a, b, a_log, dt_bias, scale=True):
    """The arguments of the forms in models.py."""
    q, k, v, a, b = (x.transpose(1, 2) for x in (q, k, v, a, b))
    q = models.l2norm(q) * (q.shape[-1] ** -0.5 if scale else 1.0)
    log_alpha = -a_log.exp().unsqueeze(-1) * F.softplus(a + dt_bias.unsqueeze(-1))
    return q, models.l2norm(k), v, log_alpha, b.sigmoid()


def plain_delta(*x):
    return models.gated_delta(*heads_first(*x))[0].transpose(1, 2)


def plain_log_linear(*x):
    levels = F.softplus(x[8].unsqueeze(1) * x[7].transpose(1, 2))
    return models.log_linear_delta(*heads_first(*x[:7], scale=False), levels).transpose(1, 2)


def reader(options):
    """Reading anchors in both forms, and their arguments."""
    interval, tokens, heads, width = options.interval, options.tokens, options.heads, options.width
    count = (tokens - 1) // interval
    ends = [[interval * (m + 1) for m in range(count)]]
    x = [torch.randn(1, tokens, heads, width), torch.randn(1, tokens, heads, 16), torch.randn(count, heads, 16)]
    x += [torch.randn(count, heads, width, width), torch.randn(1, tokens, heads)]

    def ours(q, routing, keys, states, null):
        return march.anchor_read(q, routing, keys, states, null, boundaries=ends)

    def plain(q, routing, keys, states, null):
        # As March.read and March.weights of models.py, from their inputs.
        q = (models.l2norm(q) * width**-0.5).transpose(1, 2)[:, :, interval:].flatten(0, 1)
        scores = routing.transpose(1, 2)[:, :, interval:] @ keys.transpose(0, 1).mT
        age = torch.arange(tokens - interval).unsqueeze(1) // interval - torch.arange(count)
        scores = scores.masked_fill(age < 0, -math.inf)
        weights = torch.cat([scores, null.mT[:, :, interval:, None]], -1).softmax(-1)[..., :count].flatten(0, 1)
        states = states.transpose(0, 1).reshape(heads, count * width, width)
        size, out = models.READ_INTERVALS * interval, []
        for i, (weights_i, q_i) in enumerate(zip(weights.split(size, 1), q.split(size, 1)), 1):
            seen = min(i * models.READ_INTERVALS, count)
            weighted = weights_i[..., :seen].unsqueeze(-1) * q_i.unsqueeze(-2)
            out.append(weighted.flatten(2) @ states[:, : seen * width])
        read = torch.cat(out, 1).unflatten(0, (1, heads)).transpose(1, 2)
        return F.pad(read, (0, 0, 0, 0, interval, 0))

    return ours, plain, [tensor.requires_grad_() for tensor in x]


def time_logits(folder, threads):
    model = march_lm.load(folder, threads=threads)
    ids = [i * i % 251 for i in range(2048)]
    seconds = []
    for _ in range(30):
        begun = time.perf_counter()
        logits = model.logits(ids)
        seconds.append(time.perf_counter() - begun)
        assert logits.shape == (len(ids), model.vocabulary)
    seconds.sort()
    print(f"model.logits, 2,048 tokens: best {1e3 * seconds[0]:.2f} ms, median {1e3 * seconds[15]:.2f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--interval", type=int, default=64, help="tokens from one anchor to the next")
    parser.add_argument("--threads", type=int, default=0, help="0 uses all cores")
    parser.add_argument("--quick", action="store_true", help="small sizes, one run: the times mean nothing")
    parser.add_argument("--logits", metavar="DIR", help="time model.logits of this checkpoint instead")
    options = parser.parse_args()
    if options.logits:
        return time_logits(options.logits, options.threads)
    if options.quick:
        options.tokens, options.heads, options.width = 192, 2, 16
    march_lm.ops.set_threads(options.threads)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    delta, levels = inputs(options), (options.tokens - 1).bit_length() + 1
    more = [torch.randn(1, options.tokens, options.heads, levels), torch.randn(options.heads, levels)]
    of_levels = [*delta, *(x.requires_grad_() for x in more)]
    cases = [
        ("gated_delta", lambda *x: march.gated_delta(*x).readout, plain_delta, delta),
        ("log_linear_delta", march.log_linear_delta, plain_log_linear, of_levels),
        ("anchor_read", *reader(options)),
    ]
    repetitions = 0 if options.quick else 5
    print(f"1 × {options.tokens} tokens, {options.heads} heads of {options.width}, {march_lm.ops.threads()} threads")
    print(f"{'':18}{'march':>20}   {'PyTorch':>20}   {'by rows':>20}   times as fast")
    for name, ours, plain, arguments in cases:
        gradient = torch.randn_like(plain(*arguments))
        wanted = torch.autograd.grad(plain(*arguments), arguments, gradient)
        found = torch.autograd.grad(ours(*arguments), arguments, gradient)
        for one, other in zip(found, wanted, strict=True):
            if not (one - other).abs().max() <= 2e-3 * other.abs().max() + 1e-6:
                sys.exit(f"{name}: the gradients differ by {(one - other).abs().max():.1e} of {other.abs().max():.1e}")
        columns = []
        tuned = models.unit_lower_inverse, models.READ_INTERVALS
        for function, by_rows in [(ours, False), (plain, False), (plain, True)]:
            if by_rows:
                models.plain()
            runs = forward(function, arguments), forward_backward(function, arguments, gradient)
            columns.append([best(run, repetitions) for run in runs])
        models.unit_lower_inverse, models.READ_INTERVALS = tuned
        shown = "   ".join(f"{one:8.2f} {both:8.2f} ms" for one, both in columns)
        ratios = ", ".join(f"{other[1] / columns[0][1]:.1f}" for other in columns[1:])
        print(f"{name:18}{shown}   {ratios}")


if __name__ == "__main__":
    main()

"""Roofline on paper of the GPU engine's kernels: a training step of the paper's MARCH, in f32.

    python bench/gpu_roofline.py [--config configs/paper/march.toml] [--batch 8] [--tokens 4096]

Prints the table of docs/gpu.md. Nothing is measured: FLOP and bytes are counted from the shapes (each tensor moved once
per kernel that reads or writes it), and the time is the larger of FLOP / (share · peak) and bytes / (0.8 · bandwidth).
The share of the peak that a kernel reaches is an assumption, in the table.
"""

import argparse
import pathlib
import tomllib

CARDS = {"RTX 4090": (82.6e12, 1008e9), "M3 Max": (14.1e12, 400e9)}
BANDWIDTH = 0.8
PRODUCT, SCAN = 0.4, 0.15  # of the peak: tiled products; the recurrence, whose workgroups are few
GDN_CHUNK = 32  # tokens between the states that the recurrence keeps for its backward pass


def products(rows, sizes):
    """[FLOP, bytes] of y = x Wᵀ for each (in, out), and of dx = dy W, dW = dyᵀ x."""
    flop = sum(2 * rows * a * b for a, b in sizes)
    moved = sum(rows * a + rows * b + a * b for a, b in sizes)
    return [flop, 4 * moved], [2 * flop, 8 * moved]


def streams(numbers, forward, backward):
    """A kernel that only moves numbers: so many tensors of this size in each direction."""
    return [4 * numbers, 4 * forward * numbers], [8 * numbers, 4 * backward * numbers]


def march(model, batch, tokens):
    """Rows (kernel, share of the peak, forward, backward) of all layers together."""
    rows, layers, width = batch * tokens, model["num_hidden_layers"], model["hidden_size"]
    heads, d_k, inner = model["num_heads"], model["head_dim"], model["intermediate_size"]
    d_v = round(d_k * model["expand_v"])
    keys, values, routing = heads * d_k, heads * d_v, heads * model["routing_dim"]
    state, interval = heads * d_k * d_v, model["anchor_interval"]
    anchors = (tokens - 1) // interval
    seen = sum(min(t // interval, anchors) for t in range(tokens)) / tokens  # anchors that a token sees on average
    mixer = [(width, out) for out in (keys, keys, values, values, heads, heads, routing, heads)] + [(values, width)]
    chunks = rows / GDN_CHUNK
    kept = 4 * state * chunks
    recurrence = 4 * rows * (2 * keys + 2 * values)
    read = 2 * rows * seen * state
    all_of = lambda pair: [[layers * n for n in direction] for direction in pair]
    vocabulary = products(rows, [(width, model["vocab_size"])])
    logits = 4 * rows * model["vocab_size"]
    count = layers * (sum(a * b for a, b in mixer) + width * routing + 3 * width * inner)
    count += 2 * width * model["vocab_size"]
    return [
        ("linear: projections of the mixer", PRODUCT, *all_of(products(rows, mixer))),
        ("linear: feed-forward", PRODUCT, *all_of(products(rows, [(width, inner)] * 2 + [(inner, width)]))),
        ("gated_delta", SCAN, *all_of([
            [7 * rows * state, recurrence + 4 * rows * values + kept],
            [15 * rows * state, 3 * recurrence + 3 * kept],
        ])),
        ("anchor_read", PRODUCT, *all_of([
            [read + 4 * rows * seen * routing, 4 * rows * (keys + routing + values)],
            [2 * read + 8 * rows * seen * routing, 4 * rows * (2 * keys + 2 * routing + 2 * values)],
        ])),
        ("linear_cross_entropy", PRODUCT, [3 * vocabulary[0][0], 3 * vocabulary[0][1] + 4 * logits], [0, 0]),
        ("short_conv", PRODUCT, *all_of(streams(rows * (2 * keys + values), 2, 6))),
        ("swiglu", PRODUCT, *all_of(streams(rows * inner, 3, 5))),
        ("rms_norm", PRODUCT, *all_of(streams(2 * rows * width, 2, 3))),
        ("gated_rms_norm", PRODUCT, *all_of(streams(rows * values, 3, 5))),
        ("add (residuals, history), accumulate", PRODUCT, *all_of(streams(rows * (2 * width + values), 3, 3))),
        ("squared_norm, adamw", PRODUCT, [0, 0], [12 * count, 32 * count]),
    ]


def attention(layers, heads, d, batch, tokens):
    """Causal attention of a Transformer; a tile of 64 queries or keys reads the other side once."""
    pairs = batch * heads * tokens * (tokens + 64) / 2
    moved = 4 * batch * tokens * heads * d
    tiles = tokens / 64 / 2
    forward = [4 * d * pairs, moved * (2 + 2 * tiles)]
    backward = [14 * d * pairs, moved * (6 + 5 * tiles)]
    return ("attention (Transformer, 24 layers)", PRODUCT, *[[layers * n for n in x] for x in (forward, backward)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parents[1]
    parser.add_argument("--config", type=pathlib.Path, default=root / "configs/paper/march.toml")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    model = tomllib.loads(options.config.read_text())["model"]
    kernels = march(model, options.batch, options.tokens)
    print("| operation | TFLOP | GB | FLOP per byte | share of peak | " + " | ".join(CARDS) + " | limited by |")
    print("|---|--:|--:|--:|--:|" + "--:|" * len(CARDS) + "---|")
    totals = [0.0] * len(CARDS)
    flops = 0

    def row(kernel, count):
        nonlocal flops
        name, share, *directions = kernel
        flop, moved = (sum(direction[i] for direction in directions) for i in (0, 1))
        times, limits = [], []
        for i, (peak, bandwidth) in enumerate(CARDS.values()):
            parts = [(max(f / (share * peak), b / (BANDWIDTH * bandwidth)), f / (share * peak)) for f, b in directions]
            times.append(sum(time for time, _ in parts))
            limits.append("arithmetic" if sum(work for _, work in parts) > times[-1] / 2 else "bandwidth")
            if count:
                totals[i] += times[-1]
        if count:
            flops += flop
        limit = limits[0] if len(set(limits)) == 1 else " / ".join(limits)
        shown = " | ".join(f"{1000 * time:,.0f} ms" for time in times)
        print(f"| {name} | {flop / 1e12:.2f} | {moved / 1e9:.0f} | {flop / moved:.1f} | {share:.0%} | {shown} | {limit} |")

    for kernel in kernels:
        row(kernel, True)
    shown = " | ".join(f"{total:.2f} s" for total in totals)
    print(f"| **a step** | {flops / 1e12:.0f} | | | | {shown} | |")
    tokens = options.batch * options.tokens
    print("| tokens per second | | | | | " + " | ".join(f"{tokens / total:,.0f}" for total in totals) + " | |")
    row(attention(24, 16, 96, options.batch, options.tokens), False)


if __name__ == "__main__":
    main()

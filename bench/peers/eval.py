"""Scores the requests of `cargo bench -p march-lab --bench eval -- --peer FILE` in PyTorch with plain code.

    eval.py MODEL_DIR REQUESTS.json [--threads N] [--quick]

MODEL_DIR is a checkpoint of tiny/gdn (`march init --config tiny/gdn --output MODEL_DIR`). Every continuation is read
with its context, as scorers without shared contexts do; sequences are sorted by length and padded to batches of 32.
Prints the requests per second, best of three runs; with --quick, of one.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import train_step


def score(model, sequences, rows=32):
    """The sum of ln p of all tokens of each sequence; what is scored does not change the work."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    scores = [0.0] * len(sequences)
    for start in range(0, len(order), rows):
        batch = [sequences[i] for i in order[start : start + rows]]
        longest = max(len(ids) for ids in batch)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in batch])
        log_p = F.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None])[..., 0]
        for row, i in enumerate(order[start : start + rows]):
            scores[i] = log_p[row, : len(sequences[i]) - 1].sum().item()
    return scores


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one run, which shows that it works")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    requests = json.loads(options.requests.read_text())
    sequences = [ids for request in requests for ids in request]
    model, _ = train_step.load(options.model)
    best = float("inf")
    with torch.inference_mode():
        score(model, sequences[:32])
        for _ in range(1 if options.quick else 3):
            began = time.perf_counter()
            score(model, sequences)
            best = min(best, time.perf_counter() - began)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads: {len(requests) / best:.1f} requests/s")


if __name__ == "__main__":
    main()

"""One training step of each model in PyTorch on the CPU, eager, float32: the peer of `march train`.

Reads a checkpoint folder of march (config.json, model.safetensors) and a file of batches, trains some steps with
AdamW and prints one JSON object: the losses, and the seconds of a step, the median of the steps after the warm-up.
A file of batches is what `kind = "batches"` reads, {"batches": [steps][rows][T + 1 ids]}, or a safetensors file
with `input_ids` and `targets` [rows, T]; after the last batch comes the first again. With --check it instead
compares logits, gradients and six steps with a folder of golden checkpoints. The models are in models.py.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import models
from models import Model

SETTINGS = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U32": torch.uint32}


def read_tensors(path):
    """A safetensors file: eight bytes with the header's length, the header in JSON, the numbers."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            kind, count = DTYPES[entry["dtype"]], math.prod(entry["shape"])
            flat = torch.frombuffer(data, dtype=kind, count=count, offset=start + entry["data_offsets"][0])
            tensors[name] = flat.view(entry["shape"]).clone()
    return tensors


def load(folder, **changes):
    """A model with a checkpoint's weights; changes replace keys of its configuration."""
    config = json.loads((folder / "config.json").read_text()) | changes
    weights = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights |= {name: tensor.float() for name, tensor in read_tensors(path).items()}
    tied = config.get("tie_word_embeddings", False)
    if tied:
        weights["lm_head.weight"] = weights["model.embeddings.weight"]
    with torch.device("meta"):
        model = Model(config)
    model.load_state_dict(weights, assign=True)
    if tied:
        model.lm_head.weight = model.model.embeddings.weight
    return model, config


def read_batches(path, rows=None):
    """Pairs of inputs and targets [rows, T], and what else the file says."""
    if path.suffix == ".safetensors":
        tensors = read_tensors(path)
        return [(tensors["input_ids"][:rows].long(), tensors["targets"][:rows].long())], {}
    content = json.loads(path.read_text())
    batches = [torch.tensor(batch[:rows]) for batch in content.pop("batches")]
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in batches], content


def loss_of(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def train(model, batches, rates, settings):
    """Losses, gradient norms before clipping and seconds of one step after the other, one for each rate."""
    parameters = list(model.parameters())
    decayed, others = ([p for p in parameters if (p.dim() >= 2) == wide] for wide in (True, False))
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    keys = {"betas": tuple(settings["betas"]), "eps": settings["eps"], "weight_decay": settings["weight_decay"]}
    optimizer = torch.optim.AdamW(groups, **keys, fused=True)
    losses, norms, seconds = [], [], []
    for step, rate in enumerate(rates):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, *batches[step % len(batches)])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, settings["clip_norm"])
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
        seconds.append(time.perf_counter() - start)
    return losses, norms, seconds


def check(folder):
    """Every golden checkpoint: logits, gradients of one text, losses and gradient norms of training."""
    largest = lambda found, want: (found - want).abs().max().item()
    changed = {"logits": {}, "logits.interval_20": {"anchor_interval": 20}, "logits.top_k_2": {"routing_top_k": 2}}
    good = True
    for case in sorted(path.parent for path in folder.glob("*/config.json")):
        errors = {}
        ids = torch.tensor([json.loads((case / "tokens.json").read_text())])
        expected = read_tensors(case / "expected.safetensors")
        for name in changed.keys() & expected.keys():
            with torch.no_grad():
                errors[name] = largest(load(case, **changed[name])[0](ids)[0], expected[name])
        model, _ = load(case)
        loss_of(model, ids[:, :-1], ids[:, 1:]).backward()
        found = dict(model.named_parameters())
        gradients = read_tensors(case / "gradients.safetensors").items()
        errors["gradients"] = max(largest(found[name].grad, want) for name, want in gradients)
        batches, run = read_batches(case / "training.json")
        losses, norms, _ = train(model, batches, run["learning_rates"], run)
        errors["losses"] = max(abs(a - b) for a, b in zip(losses, run["losses"], strict=True))
        norm_error = max(abs(a / b - 1) for a, b in zip(norms, run["gradient_norms"], strict=True))
        good = good and max(errors.values()) < 1e-4 and norm_error < 1e-3
        errors = ", ".join(f"{name} {error:.1e}" for name, error in sorted(errors.items()))
        print(f"{case.name:14}  {errors}, gradient norms {norm_error:.1e} (relative)")
    if not good:
        sys.exit(f"the models differ from those of {folder}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, help="checkpoint folder")
    parser.add_argument("--batch", type=pathlib.Path, help="file of batches, JSON or safetensors")
    parser.add_argument("--batch-size", type=int, help="take only so many rows of each batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="where the batches' file gives no rates")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", type=pathlib.Path, metavar="GOLDEN", help="compare with these checkpoints")
    parser.add_argument("--plain", action="store_true", help="without what was tuned by hand, as in most eager code")
    options = parser.parse_args()
    if options.plain:
        models.plain()
    torch.set_num_threads(options.threads)
    if options.check:
        return check(options.check)
    if not (options.model and options.batch and options.steps > options.warm_up):
        parser.error("needs --model, --batch and more --steps than --warm-up, or --check")
    model, config = load(options.model)
    batches, content = read_batches(options.batch, options.batch_size)
    given = content.get("learning_rates", [options.learning_rate])
    rates = [given[min(step, len(given) - 1)] for step in range(options.steps)]
    losses, norms, seconds = train(model, batches, rates, SETTINGS)
    step = statistics.median(seconds[options.warm_up :])
    ids = batches[0][0]
    result = {"mixer": config["model_type"], "losses": losses, "gradient_norms": norms}
    result |= {"rows": ids.shape[0], "sequence_length": ids.shape[1], "step_seconds": seconds}
    result |= {"seconds_per_step": step, "tokens_per_second": ids.numel() / step}
    print(json.dumps(result | {"threads": options.threads, "torch": torch.__version__}))


if __name__ == "__main__":
    main()

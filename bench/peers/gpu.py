"""Training steps of `march train --device gpu` and of PyTorch on the same GPU (CUDA or MPS), in turn; prints a table.

    python gpu.py MARCH [--presets tiny/march …] [--rows N] [--length T] [--steps N] [--quick]

MARCH is the program, built with `--features gpu`. For each preset both start from the same checkpoint and take the same
steps, in float32 without TF32. PyTorch runs eagerly: scaled_dot_product_attention, and the gated delta rule by chunks
with one triangular solve (models.py). On CUDA it also runs with TF32, which march does not have. Without PyTorch, a GPU,
or a program with GPU support, it says what is missing and ends with status 0. This was never run on a GPU by its authors.

--quick takes the fewest steps on a short text. If PyTorch has no GPU, both run on the processor, and the output says so:
that shows that this script works, in seconds, and its times mean nothing.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile

import train

TOLERANCE = 1e-3


def missing(what):
    print(f"nothing was measured: {what}")
    sys.exit(0)


def torch_device(quick):
    """PyTorch, and its GPU and the name of that; the processor if it has none and the processor will do."""
    try:
        import torch
    except ImportError:
        missing("this Python has no PyTorch (pip install torch)")
    if torch.cuda.is_available():
        return torch, "cuda", torch.cuda.get_device_name()
    if torch.backends.mps.is_available():
        return torch, "mps", "Apple GPU"
    if quick:
        return torch, "cpu", "PyTorch finds no GPU, so both run on the processor"
    missing("PyTorch finds neither a CUDA GPU nor MPS")


def torch_steps(torch, device, model, batch, options, tf32):
    """Losses and tokens per second on the GPU."""
    import train_step

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    network, _ = train_step.load(model)
    batches, _ = train_step.read_batches(batch)
    network.to(device)
    batches = [(ids.to(device), targets.to(device)) for ids, targets in batches]
    rates = [3e-3] * options.steps
    # The models create masks and tables on the default device.
    torch.set_default_device(device)
    try:
        # Each step reads its loss, so its time includes all of the GPU's work.
        losses, _, seconds = train_step.train(network, batches, rates, train_step.SETTINGS)
    finally:
        torch.set_default_device("cpu")
    return losses, options.rows * options.length / statistics.median(seconds[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("march")
    parser.add_argument("--presets", nargs="+", default=["tiny/march", "tiny/gdn", "tiny/transformer"])
    parser.add_argument("--device", default="gpu", help="of march: gpu, or gpu:N")
    parser.add_argument("--steps", type=int, default=6, help="the first two are not timed")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="3 steps of tiny/gdn on 128 tokens, also without a GPU")
    options = parser.parse_args()
    options.threads = 1
    if options.quick:
        options.presets, options.steps, options.rows, options.length = ["tiny/gdn"], 3, 1, 128
    if options.steps < 3:
        parser.error("--steps must be at least 3: the first two are not timed")
    torch, device, name = torch_device(options.quick)
    if device == "cpu":
        options.device = "cpu"
    probe = subprocess.run(
        [options.march, "doctor", "--device", options.device], capture_output=True, text=True
    )
    if probe.returncode:
        missing(f"{options.march} cannot use --device {options.device}: {probe.stderr.strip()}")
    variants = [False, True] if device == "cuda" else [False]
    print(f"{name}, PyTorch {torch.__version__}; tokens per second\n")
    print("| model | march | PyTorch, float32 | / march |" + (" TF32 | / march |" if len(variants) > 1 else "")
          + " loss differs by |")
    print("|---|--:|--:|--:|" + ("--:|--:|" if len(variants) > 1 else "") + "--:|", flush=True)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        batch = folder / "batches.json"
        train.batches(batch, options.steps, options.rows, options.length)
        for preset in options.presets:
            label = preset.replace("/", "-")
            model = folder / label
            train.march(options.march, "init", "--config", preset, "--output", model)
            own, seconds = train.march_steps(
                options.march, preset, model, batch, options, folder / f"{label}-run", "--device", options.device
            )
            speed = options.rows * options.length / seconds
            results = [torch_steps(torch, device, model, batch, options, tf32) for tf32 in variants]
            off = max(abs(a - b) for a, b in zip(own, results[0][0], strict=True))
            if off > TOLERANCE:
                wrong.append(f"{preset}: the losses differ by {off:.1e}, more than {TOLERANCE:.0e}")
            cells = "".join(f" {peer:,.0f} | {peer / speed:.2f} |" for _, peer in results)
            print(f"| {preset} | {speed:,.0f} |{cells} {off:.1e} |", flush=True)
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()

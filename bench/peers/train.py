"""Training steps of `march train` and of PyTorch, eager, on the same weights and batches, in turn; prints a table.

train.py MARCH [--presets tiny/march …] [--steps N]: MARCH is the program. For each preset both start from the same
checkpoint and take the same steps; their losses must agree to 1e-4. Work is counted over all products of a step, the
peak is what `march doctor` measures just before, with the widest instructions that the processor has. PyTorch runs
twice: as most eager code does it (the triangular inverse row by row, the reader under a mask), and with both tuned by
hand. --quick takes the fewest steps of one model on a short text: that shows that this works, the times mean nothing.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TEXT = HERE / "../../crates/lm/assets/text.txt"
TOLERANCE = 1e-4


def march(program, *arguments):
    return subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def report(program, *arguments):
    """What a command prints with --json."""
    return json.loads(march(program, *arguments, "--json"))


def batches(path, steps, rows, length):
    """The text's bytes, one sequence after the other."""
    text = TEXT.read_bytes()
    count = (len(text) - 1) // length
    at = lambda i: list(text[i % count * length : i % count * length + length + 1])
    data = [[at(step * rows + row) for row in range(rows)] for step in range(steps)]
    path.write_text(json.dumps({"batches": data}))


def march_steps(program, preset, model, batch, options, folder, *more):
    settings = {
        "data.kind": "batches",
        "data.path": batch,
        "data.sequence_length": options.length,
        "train.steps": options.steps,
        "train.tokens_per_step": options.rows * options.length,
        "train.micro_batch": options.rows,
        "train.schedule": "constant",
        "train.warmup": 0.0,
        "train.decay": 0.0,
        "train.learning_rate": 3e-3,
        "train.recompute": "off",
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    march(program, "train", preset, "--run", folder, "--init-from", model, "--threads", options.threads, *sets, *more)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    speed = statistics.median(line["tokens_per_second"] for line in steps[2:])
    return [line["loss"] for line in steps], options.rows * options.length / speed


def torch_steps(model, batch, options, *more):
    command = [sys.executable, "-W", "ignore", HERE / "train_step.py", "--model", model, "--batch", batch, *more]
    command += ["--steps", str(options.steps), "--threads", str(options.threads)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result["losses"], result["seconds_per_step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("march")
    parser.add_argument("--presets", nargs="+", default=["tiny/march", "tiny/gdn", "tiny/transformer"])
    parser.add_argument("--steps", type=int, default=5, help="the first two are not timed")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="3 steps of tiny/march on 128 tokens")
    options = parser.parse_args()
    if options.quick:
        options.presets, options.steps, options.rows, options.length = ["tiny/march"], 3, 1, 128
    print("| model | march s | PyTorch s | / march | tuned by hand s | / march | march GFLOP/s | of FMA peak | loss differs by |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        batch = folder / "batches.json"
        batches(batch, options.steps, options.rows, options.length)
        for preset in options.presets:
            name = preset.replace("/", "-")
            model = folder / name
            march(options.march, "init", "--config", preset, "--output", model)
            length = f"data.sequence_length={options.length}"
            inspected = report(options.march, "inspect", "training", preset, "--set", length)
            work = inspected["flop_per_token"]["training"] * options.rows * options.length / 1e9
            peak = report(options.march, "doctor", "--threads", options.threads)["peak"]
            own, seconds = march_steps(options.march, preset, model, batch, options, folder / f"{name}-run")
            peer, peer_seconds = torch_steps(model, batch, options)
            # What was tuned by hand is in the recurrence and the reader.
            recurrent = "transformer" not in preset
            plain = torch_steps(model, batch, options, "--plain")[1] if recurrent else peer_seconds
            off = max(abs(a - b) for a, b in zip(own, peer, strict=True))
            if off > TOLERANCE:
                wrong.append(f"{preset}: the losses differ by {off:.1e}, more than {TOLERANCE:.0e}")
            rate = work / seconds
            row = f"{preset} | {seconds:.2f} | {plain:.2f} | {plain / seconds:.2f}"
            row += f" | {peer_seconds:.2f} | {peer_seconds / seconds:.2f} | {rate:.0f}"
            share = f"{100 * rate / peak['gflops']:.0f} % of {peak['gflops']:.0f} ({peak['instructions']})"
            print(f"| {row} | {share} | {off:.1e} |", flush=True)
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()

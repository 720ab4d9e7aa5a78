"""The speed of march and llama.cpp on a GGUF file and its copies in other formats, as a table; models.sh calls it.

    python models_peers.py PROGRAM FILE [--threads N] [--seconds N] [--formats bf16,q8_0,q4_0,q4_1]

FILE is in Q4_1. Each measurement is the best of as many runs as fit in the seconds, at least one, after a warm-up. Every
engine runs in a process of its own. Decoding continues a text of 64 tokens; the figure of several texts is the sum of
their rates. llama.cpp's peak memory is that of a Python process with one text of 2,304 tokens, its keys and values in
f16; march's are in f32. Needs the packages `gguf`, `numpy` and `xllamacpp`.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LENGTHS, BEGINNING, WRITTEN, TEXTS = (512, 2048), 64, 32, 8
# A format of GGUF, and march's with as many bits.
FORMATS = {"bf16": "bf16", "q8_0": "q8", "q4_0": "q4", "q4_1": "q4"}


def copied(source, kind):
    """The file with its matrices in another format, beside it."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    target = source.with_name(source.name.replace("Q4_1", kind.upper()))
    if target.exists():
        return target
    reader, part = GGUFReader(source), target.with_suffix(".part")
    writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    wanted = GGMLQuantizationType[kind.upper()]
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        numbers = quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, quants.quantize(numbers, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
    return target


class Llama:
    """llama.cpp's server in this process."""

    def __init__(self, path, threads, texts):
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path, options.n_parallel, options.verbosity = str(path), texts, 0
        # The context is divided among the texts.
        options.n_ctx = LENGTHS[-1] + 256 if texts == 1 else 256 * texts
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
        # Nothing of one request is kept for the next.
        options.cache_ram_mib = 0
        self.server = xllamacpp.Server(options)

    def timings(self, tokens, written, first=0):
        """What the server says of a request with random ids."""
        ids = [(first + i) * 7919 % 40000 + 10 for i in range(tokens)]
        body = {"prompt": ids, "n_predict": written, "cache_prompt": False, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(
            f"{self.server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            timings = json.load(answer)["timings"]
        found, expected = (timings["prompt_n"], timings["predicted_n"]), (tokens, written)
        if found != expected:
            raise SystemExit(f"llama.cpp read and wrote {found} tokens instead of {expected}")
        return timings


def best(seconds, run):
    start, rates = time.monotonic(), []
    while not rates or time.monotonic() - start < seconds:
        rates.append(run())
    return max(rates)


def llama_alone(path, threads, seconds):
    llama = Llama(path, threads, 1)
    llama.timings(BEGINNING, 1)
    prefill = [best(seconds, lambda: llama.timings(n, 1)["prompt_per_second"]) for n in LENGTHS]
    decode = best(seconds, lambda: llama.timings(BEGINNING, WRITTEN)["predicted_per_second"])
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 if "VmHWM:" in status else None
    import xllamacpp

    # As "CPU : SSE3 = 1 | AVX2 = 1 | OPENMP = 1 | ".
    parts = xllamacpp.get_system_info().removeprefix("CPU : ").split(" | ")
    features = " ".join(part.split(" = ")[0] for part in parts if part.endswith(" = 1"))
    return {"prefill": prefill, "decode": decode, "peak": peak, "features": features}


def llama_together(path, threads, seconds):
    llama = Llama(path, threads, TEXTS)
    llama.timings(BEGINNING, 1)

    def run():
        # Short beginnings, so that texts hardly wait for each other's.
        one = lambda i: llama.timings(4, 2 * WRITTEN, i)["predicted_per_second"]
        with ThreadPoolExecutor(TEXTS) as pool:
            return sum(pool.map(one, range(TEXTS)))

    return {"sum": best(seconds, run)}


def march(program, path, weights, threads, seconds):
    command = [program, "bench", "--model", path, "--weights", weights, "--threads", threads, "--seconds", seconds]
    command += ["--lengths", ",".join(map(str, LENGTHS)), "--streams", TEXTS, "--json"]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE)
    report = json.loads(done.stdout)
    return {
        "prefill": [row["tokens_per_second"] for row in report["prefill"]],
        "decode": report["decode"]["tokens_per_second"],
        "sum": report["streams"]["sum"]["tokens_per_second"],
        "peak": report["peak_bytes"]["one"],
        "machine": report["machine"],
    }


def child(what, path, arguments):
    """The result of a function in a process of its own."""
    command = [sys.executable, __file__, arguments.program, path, "--only", what]
    command += ["--threads", arguments.threads, "--seconds", arguments.seconds]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])


def row(name, kind, result):
    cells = [f"{rate:.0f}" for rate in (*result["prefill"], result["decode"], result["sum"])]
    memory = f"{result['peak'] / 2**30:.2f} GiB" if result["peak"] else "unknown"
    print(f"| {name} | {kind} | {' | '.join(cells)} | {memory} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--only", choices=["alone", "together"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        run = llama_alone if arguments.only == "alone" else llama_together
        print(json.dumps(run(arguments.file, arguments.threads, arguments.seconds)))
        return
    formats = arguments.formats.split(",")
    if wrong := [kind for kind in formats if kind not in FORMATS]:
        parser.error(f"--formats {wrong[0]}: one of {', '.join(FORMATS)}")
    files = {kind: arguments.file if kind == "q4_1" else copied(arguments.file, kind) for kind in formats}
    print(f"{arguments.file.name} and its copies, {arguments.threads} threads, tokens/s\n")
    lengths = " | ".join(f"prefill {n:,}" for n in LENGTHS)
    print(f"| engine | weights | {lengths} | decoding | {TEXTS} texts, sum | peak memory |")
    print("|---|---|" + "---|" * (len(LENGTHS) + 3))
    for kind, path in files.items():
        ours = march(arguments.program, path, FORMATS[kind], arguments.threads, arguments.seconds)
        row("march", FORMATS[kind], ours)
        theirs = child("alone", path, arguments) | child("together", path, arguments)
        row("llama.cpp", kind, theirs)
    machine = ours["machine"]
    busy = "; the machine was busy, so measure again" if machine["busy"] else ""
    print(f"\nThe machine reads {machine['read_gbs']:.1f} GB/s{busy}. march: products with {machine['instructions']}.")
    print(f"llama.cpp was built with {theirs['features']}.")


if __name__ == "__main__":
    main()

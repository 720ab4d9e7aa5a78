"""One engine's speed on one model, in a process of its own; models_peers.py calls it.

    python models_engines.py xllamacpp|mistralrs|transformers alone|together PATH FORMAT THREADS SECONDS

PATH is a GGUF file, or for transformers also a folder. The last line is the result as JSON: alone the rates of prefill,
the rate of decoding and the peak memory; together the sum of the rates of several texts.
"""

import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# BEGINNING tokens are read before WRITTEN are written; TEXTS is how many texts are written together.
LENGTHS, BEGINNING, WRITTEN, TEXTS = (512, 2048), 64, 32, 8


def tokens(count, first=0):
    """Ids that no two texts begin with."""
    return [(first + i) * 7919 % 40000 + 10 for i in range(count)]


def check(engine, found, expected):
    if found != expected:
        raise SystemExit(f"{engine} read and wrote {found} tokens instead of {expected}")


class Xllamacpp:
    """llama.cpp's server in this process."""

    def __init__(self, path, kind, threads, texts):
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path, options.n_parallel, options.verbosity = str(path), texts, 0
        # The context is divided among the texts.
        options.n_ctx = LENGTHS[-1] + 256 if texts == 1 else 256 * texts
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
        # Nothing of one request is kept for the next.
        options.cache_ram_mib = 0
        self.server = xllamacpp.Server(options)
        # As "CPU : SSE3 = 1 | AVX2 = 1 | OPENMP = 1 | ".
        parts = xllamacpp.get_system_info().removeprefix("CPU : ").split(" | ")
        self.features = " ".join(part.split(" = ")[0] for part in parts if part.endswith(" = 1"))

    def rates(self, count, written, text=0):
        body = {"prompt": tokens(count, text), "n_predict": written, "cache_prompt": False, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.server.listening_address}/completion",
            json.dumps(body | {"temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            timings = json.load(answer)["timings"]
        check("llama.cpp", (timings["prompt_n"], timings["predicted_n"]), (count, written))
        return timings["prompt_per_second"], timings["predicted_per_second"]


class Mistralrs:
    """mistral.rs, which takes texts; a digit is a token."""

    features = "its own kernels"

    def __init__(self, path, kind, threads, texts):
        # Its pool of threads has this size.
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        import mistralrs

        self.request = mistralrs.CompletionRequest
        # It takes minutes to read a GGUF file's tokenizer that has many unused ids, as the random model's.
        own = path.with_name("tokenizer.json")
        which = mistralrs.Which.GGUF(
            quantized_model_id=str(path.parent),
            quantized_filename=path.name,
            tokenizer_json=str(own) if own.exists() else None,
        )
        self.runner = mistralrs.Runner(which=which, max_seqs=texts, prefix_cache_n=0)

    def rates(self, count, written, text=0):
        prompt = "".join(str((i * i // 3 + i * (text + 1)) % 10) for i in range(count))
        request = self.request(prompt=prompt, model="default", max_tokens=written, temperature=0.0, ignore_eos=True)
        usage = self.runner.send_completion_request(request).usage
        check("mistral.rs", (usage.prompt_tokens, usage.completion_tokens), (count, written))
        # The first token comes with the prompt.
        writing = usage.total_completion_time_sec
        return count / usage.total_prompt_time_sec, (written - 1) / writing if written > 1 else None


class Transformers:
    """transformers on PyTorch, decoding by hand: the most probable token, with its cache."""

    def __init__(self, path, kind, threads, texts):
        # An installed flash-linear-attention would be chosen for a model that it cannot run without a GPU.
        sys.modules["fla"] = None
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        where = {}
        if path.is_file():
            where = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        folder = path.parent if path.is_file() else path
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[kind]
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where).eval()
        self.torch, self.features = torch, torch.backends.cpu.get_cpu_capability()

    def rates(self, count, written, text=0, texts=1):
        ids = self.torch.tensor([tokens(count, text + i) for i in range(texts)])
        start, cache = time.monotonic(), None
        for step in range(written):
            answer = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = answer.logits[:, -1:].argmax(-1), answer.past_key_values
            if step == 0:
                read = time.monotonic()
        end = time.monotonic()
        return count / (read - start), texts * (written - 1) / (end - read) if written > 1 else None


def best(seconds, run):
    """The highest rate of as many runs as fit in the seconds, at least one."""
    start, rates = time.monotonic(), []
    while not rates or time.monotonic() - start < seconds:
        rates.append(run())
    return max(rates)


def alone(engine, seconds):
    result = {"prefill": [best(seconds, lambda: engine.rates(n, 1)[0]) for n in LENGTHS]}
    result["decode"] = best(seconds, lambda: engine.rates(BEGINNING, WRITTEN)[1])
    status = Path("/proc/self/status")
    if status.exists():
        result["peak"] = int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return result


def together(engine, seconds):
    # Short beginnings, so that texts hardly wait for each other's.
    if isinstance(engine, Transformers):
        return {"sum": best(seconds, lambda: engine.rates(4, 2 * WRITTEN, texts=TEXTS)[1])}

    def run():
        with ThreadPoolExecutor(TEXTS) as pool:
            return sum(pool.map(lambda text: engine.rates(4, 2 * WRITTEN, text)[1], range(TEXTS)))

    return {"sum": best(seconds, run)}


def main():
    name, part, path, kind, threads, seconds = sys.argv[1:]
    engines = {"xllamacpp": Xllamacpp, "mistralrs": Mistralrs, "transformers": Transformers}
    engine = engines[name](Path(path), kind, int(threads), TEXTS if part == "together" else 1)
    engine.rates(BEGINNING, 2)
    result = (alone if part == "alone" else together)(engine, float(seconds))
    print(json.dumps(result | {"features": engine.features}), flush=True)
    # Some engines' threads do not end.
    os._exit(0)


if __name__ == "__main__":
    main()

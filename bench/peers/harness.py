"""lm-evaluation-harness with march in its process, and `march eval`: the same scores, and requests per second of both.

    python harness.py --march target/release/march [--originals DIR] [--model DIR] [--limit 200] [--threads N] [--quick]

LAMBADA, PIQA and WinoGrande, on the built-in documents of tests/harness, or on the first of the original files in DIR (as
tests/harness/README.md names them). MODEL is a checkpoint, by default tiny/march with random weights. Seconds are those of
answering the requests: of the harness the calls of the model, of `march eval` the whole command, with the time to open the
model and the data, and without the harness's own work, which is named apart. The best of three runs; with --quick of one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TASKS = ["lambada_openai", "piqa", "winogrande"]
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/harness"))
import data  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--march", type=Path, required=True, help="the program")
    parser.add_argument("--originals", type=Path, help="a folder with the original files")
    parser.add_argument("--model", type=Path, help="a checkpoint")
    parser.add_argument("--limit", type=int, default=200, help="documents of each task")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one run: the times mean nothing")
    options = parser.parse_args()
    march = options.march.resolve()
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        documents = data.originals(options.originals) if options.originals else data.built_in()
        data.write(work / "data", {task: documents[task][: options.limit] for task in TASKS})
        model = options.model.resolve() if options.model else work / "tiny"
        if options.model is None:
            subprocess.run([march, "init", "--config", "tiny/march", "--output", model], check=True, capture_output=True)
        compare(march, model, work, options.threads, 1 if options.quick else 3)


def compare(march, model, work, threads, runs):
    # Read when lm_eval is imported.
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(work / "cache"))
    os.environ.update(DISABLE_MULTIPROC="1", LMEVAL_LOG_LEVEL="ERROR", TQDM_DISABLE="1")
    os.chdir(work / "data")
    import lm_eval

    import march_lm.lm_eval as ours

    answering = [0.0, 0]

    class Timed(ours.March):
        def loglikelihood(self, requests, disable_tqdm=False):
            begun = time.perf_counter()
            found = super().loglikelihood(requests, disable_tqdm)
            answering[0] += time.perf_counter() - begun
            answering[1] += len(requests)
            return found

    command = [march, "eval", "--model", model, "--tasks", ",".join(TASKS), "--data-root", work / "data"]
    command += ["--threads", str(threads), "--output", work / "theirs.json"]
    commands, calls, wholes = [], [], []
    for _ in range(runs):
        (work / "theirs.json").unlink(missing_ok=True)
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        commands.append(time.perf_counter() - begun)
        answering[:] = [0.0, 0]
        begun = time.perf_counter()
        timed = Timed(path=str(model), threads=threads)
        found = lm_eval.simple_evaluate(model=timed, tasks=TASKS, bootstrap_iters=0)
        wholes.append(time.perf_counter() - begun)
        calls.append(answering[0])
    theirs = json.loads((work / "theirs.json").read_text(encoding="utf-8"))
    for task in theirs["tasks"]:
        for metric in task["metrics"]:
            one, other = metric["value"], found["results"][task["task"]].get(f"{metric['metric']},none")
            print(f"{task['task']:16}{task['documents']:5} documents  {metric['metric']:12}{one:<12.6g}{other:<12.6g}")
            if abs(one - other) > 1e-6 * abs(one):
                sys.exit("the two differ")
    requests = answering[1]
    print(f"{requests} requests, {threads} threads")
    for name, seconds in [("march eval", commands), ("harness, the model", calls), ("harness, everything", wholes)]:
        print(f"{name:22}{min(seconds):8.2f} s{requests / min(seconds):10.1f} requests/s")
    print(f"the model in the harness: {min(commands) / min(calls):.2f} times the rate of march eval")


if __name__ == "__main__":
    main()

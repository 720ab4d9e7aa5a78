"""Asks a model the tasks of lm-evaluation-harness twice, through the harness and through `march eval`, and compares.

    python compare.py --march target/release/march --model DIR [--data DIR] [--limit 200]

The harness runs its own tasks and metrics twice: once with a model that asks `march eval requests` (prompts, answers
and results must agree), once with the answers that `march eval` gave (scores must agree to 1e-6). Some tasks are also
asked over HTTP, with the harness's own client and `march serve`.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

import data

ANSWERS = 1e-3  # largest difference of two log-likelihoods of the same model
SCORES = 1e-6  # largest difference of two scores of the same answers
NEEDLES = 12  # number of RULER prompts, which are long
SERVED = {"lambada_openai", "piqa", "winogrande"}  # tasks that are asked over HTTP, too
ONLY_MARCH = {"token_perplexity"}  # metrics that the harness does not have


def native(options, tasks, root, limit, *more):
    """What `march eval` finds, by task: `metrics`, and `samples` in the order of the documents.

    All knowledge of the command and its file is here.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        command = [options.march, "eval", "--model", options.model, "--threads", options.threads]
        command += ["--tasks", ",".join(tasks), "--data-root", root, "--limit", limit]
        command += ["--output", file, "--samples", *more]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        results = json.loads(file.read_text(encoding="utf-8"))["tasks"]
    found = {}
    for result in results:
        samples = [
            {"index": one["index"], "answers": asked(one["requests"], one["answers"]), "scores": one["scores"]}
            for one in result["samples"]
        ]
        metrics = {metric["metric"]: metric for metric in result["metrics"]}
        found[result["task"]] = {"metrics": metrics, "samples": samples}
    missing = set(tasks) - set(found)
    if missing:
        sys.exit(f"march eval gave no results for {', '.join(sorted(missing))}")
    return found


def asked(requests, answers):
    """Pairs of a prompt and its answer, one for each continuation."""
    pairs = []
    for request, answer in zip(requests, answers, strict=True):
        if request["kind"] == "loglikelihood":
            for continuation, score in zip(request["continuations"], answer["loglikelihood"], strict=True):
                pairs.append(((request["context"], continuation), (score["loglikelihood"], score["is_greedy"])))
        elif request["kind"] == "loglikelihood_rolling":
            pairs.append(((request["text"],), answer["loglikelihood_rolling"]["loglikelihood"]))
        else:
            prompt = (request["context"], tuple(request["until"]), request["max_tokens"])
            pairs.append((prompt, answer["generate_until"]))
    return pairs


def prompt_of(arguments):
    """The arguments of a harness request as a prompt of `asked`."""
    from march_lm import generate_request

    if all(isinstance(argument, str) for argument in arguments):
        return tuple(arguments)
    request = generate_request(*arguments)
    return (request["context"], tuple(request["until"]), request["max_tokens"])


def replay(results):
    """A model of the harness that gives the answers that `march eval` gave."""
    from lm_eval.api.model import LM

    known = {}
    for result in results.values():
        for sample in result["samples"]:
            known.update(sample["answers"])

    class Replay(LM):
        def answer(self, requests, disable_tqdm=False):
            prompts = [prompt_of(request.args) for request in requests]
            unknown = [prompt for prompt in prompts if prompt not in known]
            if unknown:
                sys.exit(f"march eval did not ask {len(unknown)} prompts of the harness, such as {unknown[0]!r}")
            return [known[prompt] for prompt in prompts]

        loglikelihood = generate_until = loglikelihood_rolling = answer

    return Replay()


def harness(model, tasks, limit, bootstraps=0):
    """What the harness finds with this model: by task, values and standard errors of metrics, and samples."""
    import lm_eval

    result = lm_eval.simple_evaluate(model=model, tasks=tasks, limit=limit, bootstrap_iters=bootstraps)
    found = {}
    for task in tasks:
        numbers = {key.split(",")[0]: value for key, value in result["results"][task].items() if "," in key}
        samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
        found[task] = {"metrics": numbers, "samples": samples}
    return found


@contextlib.contextmanager
def server(options):
    """The address of a running `march serve`."""
    command = [options.march, "serve", "--json", "--model", options.model, "--name", "served", "--addr", "127.0.0.1:0"]
    command += ["--threads", options.threads]
    pipe = subprocess.PIPE
    process = subprocess.Popen([str(part) for part in command], stdout=pipe, stderr=pipe, text=True)
    # Keep reading, so that the server never waits for its log.
    said = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
    reader.start()
    try:
        ready = process.stdout.readline()
        if not ready:
            reader.join()
            sys.exit(f"march serve did not start: {''.join(said)}")
        yield json.loads(ready)["url"]
    finally:
        process.terminate()
        if process.wait(timeout=60) != 0:
            sys.exit(f"march serve ended with code {process.returncode}")


def compare_served(options, tasks, ours, differences):
    """Asks the harness's own client (`local-completions`) with one request at a time, and with eight and batches.

    Returns the largest difference of log-likelihoods by task.
    """
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    tasks = [task for task in tasks if task in SERVED]
    largest = dict.fromkeys(tasks, 0.0)
    if not tasks:
        return largest
    with server(options) as address:
        for concurrent, batch in (1, 1), (8, 4):
            model_args = {
                "base_url": f"{address}/v1/completions",
                "model": "served",
                "tokenizer_backend": "remote",
                "max_length": 8192,
                "num_concurrent": concurrent,
            }
            found = harness(LocalCompletionsAPI(batch_size=batch, **model_args), tasks, options.limit)
            for task in tasks:
                samples = compare_answers(task, ours[task]["samples"], found[task]["samples"], differences)
                largest[task] = max(largest[task], samples)
                compare_scores(task, ours[task], found[task], ANSWERS, differences)
    return largest


class Differences:
    """What does not agree."""

    def __init__(self):
        self.messages = []
        self.prompts = 0

    def check(self, holds, message):
        if not holds:
            self.messages.append(message)

    def close(self, ours, theirs, tolerance, what):
        """The difference, relative where the numbers exceed 1 (perplexities)."""
        difference = abs(ours - theirs) / max(1.0, abs(theirs))
        self.check(difference <= tolerance, f"{what}: march {ours!r}, harness {theirs!r}")
        return difference


def compare_answers(task, ours, theirs, differences):
    """Checks that prompts and answers of all samples agree; returns the largest difference of log-likelihoods."""
    largest = 0.0
    numbers = [sample["index"] for sample in ours], [sample["doc_id"] for sample in theirs]
    differences.check(numbers[0] == numbers[1], f"{task}: documents {numbers[0]} and {numbers[1]}")
    for own, other in zip(ours, theirs):
        what = f"{task} {own['index']}"
        prompts = [prompt for prompt, _ in own["answers"]]
        expected = [prompt_of(arguments) for arguments in other["arguments"]]
        differences.check(prompts == expected, f"{what}: prompts {prompts!r} and {expected!r}")
        differences.prompts += prompts != expected
        for (prompt, answer), (response,) in zip(own["answers"], other["resps"]):
            if isinstance(answer, str):
                differences.check(answer == response, f"{what}: texts {answer!r} and {response!r}")
                continue
            if isinstance(answer, tuple):
                differences.check(answer[1] == response[1], f"{what}: {prompt[1]!r} is greedy for one side only")
                answer, response = answer[0], response[0]
            differences.check(abs(answer - response) <= ANSWERS, f"{what}: log-likelihoods {answer} and {response}")
            largest = max(largest, abs(answer - response))
    return largest


def compare_scores(task, ours, theirs, tolerance, differences):
    """Checks all metrics of a task and of its samples; returns the largest difference by metric."""
    largest = {}
    # LongBench names every score twice.
    names = {name for name in theirs["metrics"] if not name.endswith("_stderr")} - {"score"}
    missing = names - set(ours["metrics"])
    differences.check(not missing, f"{task}: march does not report {', '.join(sorted(missing))}")
    for name, metric in ours["metrics"].items():
        if name in ONLY_MARCH:
            continue
        if name not in theirs["metrics"]:
            differences.check(False, f"{task}: the harness has no metric {name}")
            continue
        found = [differences.close(metric["value"], theirs["metrics"][name], tolerance, f"{task} {name}")]
        error = theirs["metrics"].get(f"{name}_stderr")
        # The harness resamples for the error of a perplexity.
        if isinstance(error, float) and name != "perplexity":
            differences.close(metric["standard_error"], error, tolerance, f"{task} {name}, standard error")
        for own, other in zip(ours["samples"], theirs["samples"]):
            what = f"{task} {own['index']} {name}"
            # The harness gives a text's log-likelihood with the number that the perplexity divides by.
            score = other[name][0] if isinstance(other[name], tuple) else other[name]
            found.append(differences.close(own["scores"][name], score, tolerance, what))
        largest[name] = max(found)
    return largest


def compare_needles(options, root, differences):
    """RULER: scores the answers of `march eval` with the harness's function, whose file wants `transformers`."""
    stub = types.ModuleType("transformers")
    stub.AutoTokenizer = None
    sys.modules["transformers"] = stub
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    del sys.modules["transformers"]
    task = "niah_single_1"
    found = native(options, [task], root, min(options.limit, NEEDLES), "--lengths", options.needle_length)[task]
    scores = []
    for sample in found["samples"]:
        [(prompt, text)] = sample["answers"]
        question = prompt[0].rsplit("\n", 1)[1]
        facts = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", prompt[0])
        values = [value for key, value in facts if key in question]
        differences.check(bool(values), f"{task} {sample['index']}: the prompt has no answer to {question!r}")
        if values:
            scores.append(string_match_all(postprocess_pred([text]), [values]))
            [score] = sample["scores"].values()
            differences.close(score, scores[-1], SCORES, f"{task} {sample['index']}")
    [(name, metric)] = found["metrics"].items()
    expected = sum(scores) / max(1, len(scores))
    difference = differences.close(metric["value"], expected, SCORES, task)
    return (task, len(scores), name, expected, metric["value"], difference, 0.0)


def prepare(options, root):
    """Writes the folders: original data where there is some, built-in documents for the other tasks."""
    tasks = options.tasks.split(",") if options.tasks else list(data.SETS)
    documents = {task: rows for task, rows in data.built_in().items() if task in tasks}
    own = set(documents)
    if options.data:
        replaced = {task: rows for task, rows in data.originals(options.data).items() if task in tasks}
        documents.update(replaced)
        own -= set(replaced)
    data.write(root, documents)
    texts = native(options, sorted(own), root, options.limit) if own else {}
    for task, result in texts.items():
        for sample in result["samples"]:
            answer = sample["answers"][0][1]
            if isinstance(answer, str):
                index = sample["index"]
                documents[task][index] = data.echo(documents[task][index], task, answer, index)
    data.write(root, documents)
    return tasks


def compare(options, root, differences):
    """The rows of the table."""
    tasks = prepare(options, root)
    ours = native(options, tasks, root, options.limit)
    # `datasets` finds the folders through the working directory.
    os.chdir(root)
    from march_lm import March

    asked_again = harness(March(options.march, options.model, options.threads), tasks, options.limit)
    largest = {
        task: compare_answers(task, ours[task]["samples"], asked_again[task]["samples"], differences) for task in tasks
    }
    if differences.prompts:
        return []
    # A standard error needs at least one resampling, even where the harness does not resample.
    replayed = harness(replay(ours), tasks, options.limit, bootstraps=2)
    for task, difference in compare_served(options, tasks, ours, differences).items():
        largest[task] = max(largest[task], difference)
    rows = []
    for task in tasks:
        compare_scores(task, ours[task], asked_again[task], ANSWERS, differences)
        scores = compare_scores(task, ours[task], replayed[task], SCORES, differences)
        for name, score in scores.items():
            values = asked_again[task]["metrics"][name], ours[task]["metrics"][name]["value"]
            rows.append((task, len(ours[task]["samples"]), name, *values, score, largest[task]))
    if options.needle_length:
        rows.append(compare_needles(options, root, differences))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--march", required=True, type=lambda path: Path(path).resolve(), help="the program")
    parser.add_argument("--model", required=True, type=lambda path: Path(path).resolve(), help="a model's folder")
    parser.add_argument("--data", help="a folder of original data; without it the built-in documents are used")
    parser.add_argument("--limit", type=int, default=200, help="documents per task")
    parser.add_argument("--tasks", help="only these, separated by commas")
    parser.add_argument("--needle-length", type=int, default=2048, help="tokens of a RULER prompt; 0 leaves RULER out")
    parser.add_argument("--threads", type=int, default=0, help="0 uses all cores")
    options = parser.parse_args()
    differences = Differences()
    with tempfile.TemporaryDirectory() as folder:
        # Read when lm_eval is imported, so it is imported later than this.
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=f"{folder}/cache")
        os.environ.update(DISABLE_MULTIPROC="1", LMEVAL_LOG_LEVEL="ERROR", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
        start = os.getcwd()
        rows = compare(options, f"{folder}/data", differences)
        os.chdir(start)
    print(f"{'task':20} {'items':>5}  {'metric':22} {'harness':>12} {'march':>12}   largest difference of")
    print(f"{'':20} {'':5}  {'':22} {'':12} {'':12}   {'scores':>8} {'log-likelihoods':>16}")
    for task, items, metric, theirs, own, score, answer in rows:
        print(f"{task:20} {items:5}  {metric:22} {theirs:12.6f} {own:12.6f}   {score:8.1e} {answer:16.1e}")
    for message in differences.messages[:20]:
        print(message if len(message) < 1000 else f"{message[:1000]} …", file=sys.stderr)
    if differences.messages:
        sys.exit(f"march and the harness disagree: {len(differences.messages)} differences")
    print("march and the harness agree")


if __name__ == "__main__":
    main()

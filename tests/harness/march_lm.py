"""A model of lm-evaluation-harness that answers through `march eval requests`."""

import json
import subprocess
import tempfile
from pathlib import Path

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

# The harness's own default for tasks that do not name a number of tokens.
MAX_TOKENS = 256


def is_greedy(options):
    """Whether these options ask for the most probable token each time: `temperature` has no effect without sampling."""
    if options.get("do_sample") is False:
        return True
    return not options.get("do_sample") and not options.get("temperature")


def generate_request(context, options):
    """A `generate_until` request; the command decodes greedily, so any other options are an error."""
    unknown = set(options) - {"until", "max_gen_toks", "do_sample", "temperature"}
    if unknown or not is_greedy(options):
        raise ValueError(f"march answers greedily and knows until and max_gen_toks only; the task asks for {options}")
    until = options.get("until") or []
    return {
        "kind": "generate_until",
        "context": context,
        "until": [until] if isinstance(until, str) else list(until),
        "max_tokens": options.get("max_gen_toks", MAX_TOKENS),
    }


@register_model("march")
class March(LM):
    """Each call writes one file of requests and starts the command once."""

    def __init__(self, march="march", model="", threads=0, batch_size=None, device=None, max_batch_size=None):
        super().__init__()
        # The harness changes the working directory, so paths are made absolute here.
        self.command = [str(Path(march).resolve()) if "/" in str(march) else str(march), "eval", "requests"]
        self.options = ["--model", str(Path(model).resolve()), "--threads", str(threads)]

    def ask(self, requests, kind):
        """The answers to these requests, in their order."""
        with tempfile.TemporaryDirectory() as folder:
            asked, answered = Path(folder, "requests.jsonl"), Path(folder, "answers.jsonl")
            asked.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
            command = [*self.command, str(asked), *self.options, "--output", str(answered)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            with answered.open(encoding="utf-8") as lines:
                answers = [json.loads(line)[kind] for line in lines]
        if len(answers) != len(requests):
            raise ValueError(f"{len(requests)} requests, but {len(answers)} answers")
        return answers

    def loglikelihood(self, requests, disable_tqdm=False):
        # Continuations of one context go into one request, so that the context is read once.
        groups = {}
        for context, continuation in (request.args for request in requests):
            groups.setdefault(context, {})[continuation] = None
        lines = [
            {"kind": "loglikelihood", "context": context, "continuations": list(continuations)}
            for context, continuations in groups.items()
        ]
        for line, scores in zip(lines, self.ask(lines, "loglikelihood"), strict=True):
            groups[line["context"]] = dict(zip(line["continuations"], scores, strict=True))
        scores = (groups[context][continuation] for context, continuation in (r.args for r in requests))
        return [(score["loglikelihood"], score["is_greedy"]) for score in scores]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        lines = [{"kind": "loglikelihood_rolling", "text": request.args[0]} for request in requests]
        return [score["loglikelihood"] for score in self.ask(lines, "loglikelihood_rolling")]

    def generate_until(self, requests, disable_tqdm=False):
        return self.ask([generate_request(*request.args) for request in requests], "generate_until")

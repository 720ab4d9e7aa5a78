"""lm-evaluation-harness in this process finds what `march eval` finds."""

import json
import os
import sys

import pytest
from conftest import ROOT

TASKS = ["lambada_openai", "piqa", "winogrande"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of data sets, where the harness looks for them."""
    pytest.importorskip("datasets")
    sys.path.append(str(ROOT / "tests/harness"))
    import data

    sys.path.pop()
    folder = tmp_path_factory.mktemp("harness")
    data.write(folder / "data", {task: rows for task, rows in data.built_in().items() if task in TASKS})
    # Read when lm_eval is imported.
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(folder / "cache"))
    os.environ.update(DISABLE_MULTIPROC="1", LMEVAL_LOG_LEVEL="ERROR", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    return folder


def test_scores(folder, program, tiny_folder, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    import march_lm.lm_eval  # noqa: F401, registers the model

    flags = ["--tasks", ",".join(TASKS), "--data-root", folder / "data", "--output", folder / "theirs.json"]
    program("eval", "--model", tiny_folder, *flags, "--samples")
    theirs = {task["task"]: task for task in json.loads((folder / "theirs.json").read_text(encoding="utf-8"))["tasks"]}
    monkeypatch.chdir(folder / "data")
    found = lm_eval.simple_evaluate(
        model="march", model_args=f"path={tiny_folder},threads=2", tasks=TASKS, bootstrap_iters=2
    )
    for task in TASKS:
        for metric in theirs[task]["metrics"]:
            ours = found["results"][task].get(f"{metric['metric']},none")
            if ours is not None:
                assert ours == pytest.approx(metric["value"], rel=1e-6), f"{task} {metric['metric']}"
        samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        for one, other in zip(samples, theirs[task]["samples"], strict=True):
            answers = [score for answer in other["answers"] for score in answer["loglikelihood"]]
            scores = [(score["loglikelihood"], score["is_greedy"]) for score in answers]
            assert [tuple(response[0]) for response in one["resps"]] == scores, f"{task} {one['doc_id']}"
    assert any("acc,none" in found["results"][task] for task in TASKS)


def test_requests_that_it_cannot_answer():
    pytest.importorskip("lm_eval")
    from march_lm.lm_eval import March, generate_request

    assert generate_request("a", {"until": "\n", "do_sample": False, "temperature": 0.7})["until"] == ["\n"]
    assert generate_request("a", {})["max_tokens"] == 256
    for options in ({"temperature": 0.7}, {"do_sample": True}, {"top_k": 3}):
        with pytest.raises(ValueError, match="greedily"):
            generate_request("a", options)
    model = March(interval=4, storage="int8")
    assert model.march.policy == "interval=4 top-k=dense storage=int8"

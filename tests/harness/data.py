"""Data sets as folders ROOT/owner/name, in the shapes of the Hugging Face hub, which the harness and march both read.

`datasets` prefers a folder owner/name of the working directory to the hub, so the harness's own tasks run on them.
"""

import json
from pathlib import Path

# Task: data set, its configuration, the split that is asked, and the other splits that the harness wants to exist.
SETS = {
    "lambada_openai": ("EleutherAI/lambada_openai", "default", "test", []),
    "piqa": ("baber/piqa", "default", "validation", ["train"]),
    "winogrande": ("allenai/winogrande", "winogrande_xl", "validation", ["train"]),
    "hellaswag": ("Rowan/hellaswag", "default", "validation", ["train"]),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test", ["train", "validation"]),
    "squad_completion": ("hazyresearch/based-squad", "default", "validation", []),
    "longbench_trec": ("Xnhyacinth/LongBench", "trec", "test", []),
    "longbench_hotpotqa": ("Xnhyacinth/LongBench", "hotpotqa", "test", []),
    "longbench_samsum": ("Xnhyacinth/LongBench", "samsum", "test", []),
    "triviaqa": ("mandarjoshi/trivia_qa", "rc.nocontext", "validation", ["train"]),
    "nq_open": ("google-research-datasets/nq_open", "default", "validation", ["train"]),
    "drop": ("EleutherAI/drop", "default", "validation", ["train"]),
    "wikitext": ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test", ["train", "validation"]),
}


def write(root, documents):
    """Writes the documents of each task, with the file that tells `datasets` where the splits are."""
    configurations = {}
    for task, rows in documents.items():
        name, configuration, split, others = SETS[task]
        folder = Path(root, name, configuration)
        folder.mkdir(parents=True, exist_ok=True)
        lines = configurations.setdefault(name, [])
        lines += [f"- config_name: {configuration}", "  data_files:"]
        for part, kept in [(split, rows), *((other, rows[:16]) for other in others)]:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
            Path(folder, f"{part}.jsonl").write_text(text, encoding="utf-8")
            lines += [f"  - split: {part}", f"    path: {configuration}/{part}.jsonl"]
    for name, lines in configurations.items():
        Path(root, name, "README.md").write_text("\n".join(["---", "configs:", *lines, "---", ""]), encoding="utf-8")


def built_in():
    """The documents of documents.json, which holds them without the names of the columns."""
    lists = json.loads(Path(__file__).with_name("documents.json").read_text(encoding="utf-8"))
    return {task: [SHAPES[task](*fields) for fields in documents] for task, documents in lists.items()}


def hellaswag(activity, ctx_a, ctx_b, endings, label):
    ctx = f"{ctx_a} {ctx_b}".strip()
    return {"activity_label": activity, "ctx_a": ctx_a, "ctx_b": ctx_b, "ctx": ctx, "endings": endings, "label": label}


def arc(question, texts, labels, key):
    return {"question": question, "choices": {"text": texts, "label": list(labels)}, "answerKey": key}


def longbench(context, question, answers, classes=None):
    return {"context": context, "question": question, "answers": answers, "all_classes": classes}


def triviaqa(question, aliases):
    return {"question": question, "answer": {"aliases": aliases, "value": aliases[0]}}


def drop_answer(answer):
    """A number or none as a string, spans as a list, a date as an object."""
    date = answer if isinstance(answer, dict) else {"day": "", "month": "", "year": ""}
    return {
        "number": answer if isinstance(answer, str) else "",
        "date": date,
        "spans": answer if isinstance(answer, list) else [],
    }


def drop(passage, question, answers):
    first, *others = map(drop_answer, answers)
    validated = {key: [other[key] for other in others] for key in first}
    identity = {"section_id": "", "query_id": question}
    return {**identity, "passage": passage, "question": question, "answer": first, "validated_answers": validated}


def columns(*names):
    return lambda *fields: dict(zip(names, fields, strict=True))


SHAPES = {
    "lambada_openai": columns("text"),
    "piqa": columns("goal", "sol1", "sol2", "label"),
    "winogrande": columns("sentence", "option1", "option2", "answer"),
    "hellaswag": hellaswag,
    "arc_easy": arc,
    "squad_completion": columns("text", "value"),
    "longbench_trec": longbench,
    "longbench_hotpotqa": longbench,
    "longbench_samsum": longbench,
    "triviaqa": triviaqa,
    "nq_open": columns("question", "answer"),
    "drop": drop,
    "wikitext": columns("page"),
}


def echo(document, task, text, index):
    """The document with right answers made from what the model generated: a small model's scores would all be 0.

    By index: unchanged, the text itself, the text in capitals with punctuation, and one half of its words with others.
    """
    # A passage's answer must occur in the text as it is, so it stays within a line.
    words = (text.strip().split("\n")[0] if task == "squad_completion" else text).split()
    if not words or index % 4 == 0:
        return document
    half = words[: (len(words) + 1) // 2]
    answer = [None, " ".join(words), " ".join(words).upper() + "!", " ".join([*half, "zebra", "the"])][index % 4]
    if task == "squad_completion":
        return {**document, "value": answer.rstrip("!")}
    if task == "longbench_trec":
        # Classes that are parts of one another and of the text: the score then counts how many match.
        classes = [half[0][:1], half[0], " ".join(half), *document["all_classes"]]
        return {**document, "answers": [classes[index % 3]], "all_classes": classes}
    if task.startswith("longbench"):
        return {**document, "answers": [*document["answers"], answer]}
    if task == "triviaqa":
        return {**document, "answer": {**document["answer"], "aliases": [*document["answer"]["aliases"], answer]}}
    if task == "nq_open":
        return {**document, "answer": [*document["answer"], f"the {answer}"]}
    if task == "drop":
        return {**document, "answer": drop_answer([answer])}
    return document


def originals(folder):
    """The documents of those original files that the folder has."""
    readers = {
        "lambada_openai": ("commonsense/lambada_openai_test.jsonl", json_lines),
        "piqa": ("commonsense/piqa_valid.jsonl", original_piqa),
        "winogrande": ("commonsense/winogrande_dev.jsonl", original_winogrande),
        "squad_completion": ("retrieval/xquad.en.json", original_squad),
        "longbench_trec": ("longbench/MiniLongBench_trec.json", original_trec),
        "longbench_hotpotqa": ("longbench/MiniLongBench_hotpotqa.json", original_hotpotqa),
    }
    paths = {task: Path(folder, file) for task, (file, _) in readers.items()}
    found = {task: readers[task][1](path) for task, path in paths.items() if path.exists()}
    if not found:
        raise SystemExit(f"{folder} has none of the files {', '.join(file for file, _ in readers.values())}")
    return found


def json_lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]


def original_piqa(file):
    labels = file.with_name("piqa_valid_labels.lst").read_text().split()
    return [{**row, "label": int(label)} for row, label in zip(json_lines(file), labels, strict=True)]


def original_winogrande(file):
    return [{key: row[key] for key in ("sentence", "option1", "option2", "answer")} for row in json_lines(file)]


def original_squad(file):
    """Passage, question and first answer; the hub's texts are sentences to complete instead of questions."""
    articles = json.loads(file.read_text(encoding="utf-8"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    return [
        {"text": f"{part['context']}\nQuestion: {qa['question']}\nAnswer:", "value": qa["answers"][0]["text"]}
        for part in paragraphs
        for qa in part["qas"]
    ]


def between(text, start, end):
    """What is between a prompt's fixed start and its fixed end."""
    if not (text.startswith(start) and text.endswith(end)):
        raise SystemExit(f"not a prompt of LongBench: {text[:80]!r} … {text[-80:]!r}")
    return text[len(start) : len(text) - len(end)]


def original_trec(file):
    """The prompt's last question is what is asked; the examples before it are the context."""
    start = "Please determine the type of the question below. Here are some examples of questions.\n\n"
    rows = []
    for record in json.loads(file.read_text(encoding="utf-8")).values():
        context, question = between(record["origin_prompt"], start, "").rsplit("\nQuestion: ", 1)
        gold = record["gold"]
        rows.append(longbench(context, f"Question: {question}", gold["answers"], gold["all_classes"]))
    return rows


def original_hotpotqa(file):
    order = "Answer the question based on the given passages. Only give me the answer and do not output any other words"
    start, middle = f"{order}.\n\nThe following are given passages.\n", f"\n\n{order}.\n\nQuestion: "
    rows = []
    for record in json.loads(file.read_text(encoding="utf-8")).values():
        context, question = between(record["origin_prompt"], start, "\nAnswer:").rsplit(middle, 1)
        rows.append(longbench(context, question, record["gold"]))
    return rows

"""Tests the tests of the GPU kernels: deletes each barrier of each shader in turn, and expects a test to fail.

    python tests/gpu/mutants.py [PART_OF_A_PATH ...]

Without a barrier, an invocation can read workgroup memory before another has written it. Software devices run a
workgroup as a loop over groups of four or eight invocations between barriers, so results are then wrong there, if the
inputs of a test make a difference. A test that still passes would not find the same mistake in a kernel.

A barrier with the comment `// redundant: REASON` on its line is listed and not deleted. Arguments select the shaders
whose path contains one of them. Needs software devices (see docs/gpu.md); the tests are built once, with the feature
`mutants` of march-gpu. Ends with status 1 if a mutant survived.
"""

import collections
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CRATE = ROOT / "crates" / "gpu"
BARRIER = "workgroupBarrier();"
SECONDS = 600  # for the tests of a file
Mutant = collections.namedtuple("Mutant", "path number line redundant")


def mutants(selected):
    """Every barrier of every shader, with the reason if it is said to be redundant."""
    for path in sorted((CRATE / "src").rglob("*.wgsl")):
        name = str(path.relative_to(CRATE / "src"))
        if selected and not any(part in name for part in selected):
            continue
        number = 0
        for line, text in enumerate(path.read_text().splitlines(), 1):
            for _ in range(text.count(BARRIER)):
                reason = re.search(r"// redundant: (.+)", text)
                yield Mutant(path, number, line, reason and reason[1])
                number += 1


def build():
    """Builds the tests of the crate: for each file of tests, the command that runs them."""
    command = ["cargo", "test", "--release", "-p", "march-gpu", "--features", "mutants", "--tests", "--no-run"]
    lines = subprocess.run(
        [*command, "--message-format=json"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    messages = [json.loads(line) for line in lines]
    [program] = [m["executable"] for m in messages if m.get("executable") and "test" in m["target"]["kind"]]
    listed = subprocess.run([program, "--list", "--format", "terse"], check=True, stdout=subprocess.PIPE, text=True)
    files = re.findall(r"^(\[gpu\] )?(\w+)::\S+: test$", listed.stdout, re.M)
    return {file: [program, f"{kind}{file}::"] for kind, file in files}


def environment(mutant):
    chosen = {"MARCH_GPU_MUTANT_FILE": str(mutant.path), "MARCH_GPU_MUTANT_BARRIER": str(mutant.number)}
    return {**os.environ, **chosen, "MARCH_GPU": "required"}


def operations(commands, mutant):
    """Operations with a kernel that contains the barrier; the tests `shaders` make all texts, without a device."""
    run = subprocess.run(
        [*commands["shaders"], "--nocapture"], env=environment(mutant), capture_output=True, text=True
    )
    return sorted(set(re.findall(r"^mutant: (\w+)/", run.stderr, re.M)))


def tests_of(commands, operation):
    """The file of tests named as the operation; without one, those whose text names it."""
    if operation in commands:
        return [operation]
    word = re.compile(rf"\b{operation}\b")
    return [
        name
        for name in commands
        if name != "shaders" and word.search((CRATE / "tests" / f"{name}.rs").read_text())
    ]


def outcome(command, mutant):
    """How the tests of a file end: `failed`, `passed` or `hung`. The first failure ends them."""
    process = subprocess.Popen(
        command, env=environment(mutant), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        cwd=CRATE, start_new_session=True,
    )
    hung = threading.Event()

    def stop():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def late():
        hung.set()
        stop()

    timer = threading.Timer(SECONDS, late)
    timer.start()
    failed = False
    for line in process.stdout:
        if line.rstrip().endswith("FAILED"):
            failed = True
            stop()
    failed = process.wait() != 0 or failed
    timer.cancel()
    return "hung" if hung.is_set() else "failed" if failed else "passed"


def main():
    commands = build()
    found = list(mutants(sys.argv[1:]))
    count = collections.Counter()
    print("| shader | line | result | seconds | tests |\n|---|---|---|---|---|")
    for mutant in found:
        start = time.monotonic()
        if mutant.redundant:
            result, ran = f"redundant: {mutant.redundant}", []
            count["redundant"] += 1
        else:
            ran = []
            result = "survived"
            for operation in operations(commands, mutant):
                for test in tests_of(commands, operation):
                    if result == "survived" and test not in ran:
                        ran.append(test)
                        end = outcome(commands[test], mutant)
                        if end != "passed":
                            result = "caught" if end == "failed" else "caught (no end)"
            if not ran:
                result = "survived: no kernel with a test contains it"
            count[result.split()[0].rstrip(":")] += 1
        seconds = time.monotonic() - start
        name = mutant.path.relative_to(CRATE / "src")
        print(f"| {name} | {mutant.line} | {result} | {seconds:.0f} | {' '.join(ran)} |", flush=True)
    print(f"\n{count['caught']} caught, {count['survived']} survived, {count['redundant']} redundant")
    return 1 if count["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())

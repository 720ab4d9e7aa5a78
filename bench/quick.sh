#!/usr/bin/env bash
# Runs every script of bench/ and every bench of cargo once, with small sizes: quick.sh [PROGRAM]
#
# It shows that the documented commands work with the program as it is; the times that they print mean nothing. `.ci/run`
# calls it. PROGRAM is target/release/march unless named, and is not built here; the benches of cargo are, with FEATURES,
# those of a build whose libraries they can use. PEERS_PYTHON names a Python that has peers/requirements.txt; without it,
# one is set up in target/peers-venv (about two minutes and, on Linux, where PyPI's torch brings CUDA's libraries, 5 GB).
# No GPU is needed: peers/gpu.py then runs on the processor.
# Not run: bench/serve.py --llama, which needs llama-cpp-python; bench/peers/models.sh and its models_peers.py,
# models_files.py, models_engines.py and models_node.mjs, which need other engines and models of 4 GB.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/peers"
source "$here/../../tests/common.sh"
find_march "$@"
find_python "${PEERS_PYTHON:-}" peers
export PEERS_PYTHON="$python" PYTHONWARNINGS=ignore
cd "$root"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
run() {
  printf '\n-- %s\n' "$*"
  local start=$SECONDS
  "$@"
  echo "($((SECONDS - start)) s)"
}

# A script that this file does not name would not be run. These are run by others: table.py and engine.py by run.sh,
# train_step.py and models.py by train.py, eval.py and gpu.py; python.py and harness.py by tests/python/run.sh.
for script in bench/*.py bench/*.sh bench/peers/*.py bench/peers/*.sh; do
  if ! grep -q "$(basename "$script")" bench/quick.sh; then
    echo "$script is not run by bench/quick.sh; add it there in a form of seconds" >&2
    exit 1
  fi
done

run bench/peers/run.sh "$march" --quick
run "$python" bench/peers/train_step.py --check crates/cli/golden
run "$python" bench/peers/gpu.py "$march" --quick
run "$python" crates/lab/src/reproduce/efficiency/peers.py --lengths 64,128 --seconds 0.01
run cargo bench -q --workspace --features "${FEATURES:-}" --bench decode -- --only prefill
run cargo bench -q --workspace --features "${FEATURES:-}" --bench eval -- --quick --peer "$work/requests.json"
"$march" init --config tiny/gdn --output "$work/tiny-gdn" > "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
run "$python" bench/peers/eval.py "$work/tiny-gdn" "$work/requests.json" --quick
run "$python" bench/peers/llama_gguf.py "$work/llama.gguf"
run "$python" -c 'import gguf, sys; print(len(gguf.GGUFReader(sys.argv[1]).tensors), "tensors")' "$work/llama.gguf"
run "$python" bench/serve.py --march "$march" --quick --json "$work/serve.json"
run "$python" bench/conversation.py --march "$march" --quick --json "$work/conversation.json"

# The page has the table that the script prints.
printf '\n-- %s\n' "bench/gpu_roofline.py"
"$python" bench/gpu_roofline.py > "$work/roofline.md"
if grep -vxF -f docs/gpu.md "$work/roofline.md"; then
  echo "bench/gpu_roofline.py prints these lines, which docs/gpu.md does not have; put its table there" >&2
  exit 1
fi
printf '\nall scripts of bench/ ran\n'

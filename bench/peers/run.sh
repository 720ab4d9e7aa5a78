#!/usr/bin/env bash
# The engine's operations and training steps, and the same in PyTorch, on this machine, one after the other; prints two
# tables: run.sh [PROGRAM] [--quick]
#
# Without PROGRAM, target/release/march is built and used. PEERS_PYTHON names a Python that has requirements.txt; without
# it, one is set up in target/peers-venv (on Linux, PyPI's torch brings CUDA's libraries: 5 GB). --quick runs everything
# once, with short texts, in about a minute: that shows that it works, and the times mean nothing.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../../tests/common.sh"
# As many as the engine takes by itself.
threads="$(getconf _NPROCESSORS_ONLN)"

if [ $# -eq 0 ] || [ "${1#-}" != "$1" ]; then
  (cd "$root" && cargo build -q --release --workspace)
fi
find_march "$@"
shift "$used"
quick=()
if [ "${1:-}" = --quick ]; then
  quick=(--quick)
  shift
fi
if [ $# -gt 0 ]; then
  echo "$1 is not an option; usage: run.sh [PROGRAM] [--quick]" >&2
  exit 2
fi
find_python "${PEERS_PYTHON:-}" peers

results="$(mktemp -d)"
trap 'rm -rf "$results"' EXIT
(cd "$root" && cargo bench -q --workspace --features "${FEATURES:-}" --bench engine -- "${quick[@]}" --json "$results/march.json" >&2)
"$python" -W ignore "$here/engine.py" --check >&2
"$python" -W ignore "$here/engine.py" --threads "$threads" "${quick[@]}" > "$results/torch.json"
"$python" "$here/table.py" "$results/march.json" "$results/torch.json"
echo
"$python" "$here/train.py" "$march" --threads "$threads" "${quick[@]}"

#!/usr/bin/env bash
# The engine's operations and training steps, and the same in PyTorch, on this machine, one after the other; prints two
# tables.
#
# PEERS_PYTHON names a Python that has torch; without it, one is set up in bench/peers/.venv.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
# As many as the engine takes by itself.
threads="$(getconf _NPROCESSORS_ONLN)"

python="${PEERS_PYTHON:-}"
if [ -z "$python" ]; then
  python="$here/.venv/bin/python"
  if ! "$python" -c 'import torch' 2>/dev/null; then
    python3 -m venv "$here/.venv"
    "$python" -m pip install --quiet torch
  fi
fi

results="$(mktemp -d)"
trap 'rm -rf "$results"' EXIT
(cd "$root" && cargo bench -q --workspace --bench engine -- --json "$results/march.json" >&2)
"$python" -W ignore "$here/engine.py" --check >&2
"$python" -W ignore "$here/engine.py" --threads "$threads" >"$results/torch.json"
"$python" "$here/table.py" "$results/march.json" "$results/torch.json"
echo
(cd "$root" && cargo build -q --release --workspace)
"$python" "$here/train.py" "$root/target/release/march" --threads "$threads"

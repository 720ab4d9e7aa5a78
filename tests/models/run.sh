#!/usr/bin/env bash
# Compares the logits of other tools' models with those of march: run.sh [PROGRAM] [options of compare.py]
#
# PROGRAM is target/release/march unless named; nothing is built here. MODELS_PYTHON names a Python that has
# requirements.txt; without it, one is set up in target/models-venv (about two minutes and, on Linux, where PyPI's torch
# brings CUDA's libraries, 5 GB).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common.sh"
find_march "$@"
shift "$used"
find_python "${MODELS_PYTHON:-}" models
"$python" -W ignore "$here/compare.py" --march "$march" "$@"

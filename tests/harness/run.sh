#!/usr/bin/env bash
# Compares march with lm-evaluation-harness: run.sh [PROGRAM] [options of compare.py]
#
# PROGRAM is target/release/march unless named; nothing is built here. Without --model, a small model of bytes is
# trained for half a minute. HARNESS_PYTHON names a Python that has requirements.txt; without it, one is set up in
# target/harness-venv.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common.sh"
find_march "$@"
shift "$used"
find_python "${HARNESS_PYTHON:-}" harness

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
model=()
case " $* " in
  *" --model "* | *" --model="*) ;;
  *)
    # Trained a little, so that it generates words and not the same byte forever.
    small=(hidden_size=64 num_hidden_layers=2 intermediate_size=128 num_heads=2 head_dim=32 anchor_interval=16)
    "$march" train tiny/march --run "$work/model" --steps 150 "${small[@]/#/--set=model.}" \
      --set=data.sequence_length=256 --set=train.tokens_per_step=2048 --set=train.save_every=0 >&2
    model=(--model "$work/model")
    ;;
esac
"$python" -W ignore "$here/compare.py" --march "$march" "${model[@]}" "$@"

#!/usr/bin/env bash
# Tests of the GPU engine on two software devices: every operation, the golden checkpoints, and the command. Fails if
# neither device is found.
# usage: tests/gpu/run.sh [--mutants]   with --mutants also deletes each barrier in turn (tests/gpu/mutants.py)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/devices.sh
cargo test --release -p march-gpu
cargo test --release -p march-cli --features gpu --test cli units::
cargo test --release -p march-cli --features gpu --test cli gpu
if [ "${1:-}" = --mutants ]; then
  python3 tests/gpu/mutants.py
fi

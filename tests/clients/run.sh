#!/usr/bin/env bash
# Tests `march serve` from outside, with clients that others wrote: run.sh [PROGRAM] [--long]
#
# PROGRAM is target/release/march unless named; nothing is built here. CLIENTS_PYTHON names a Python that has
# requirements.txt; without it, one is set up in target/clients-venv. The short form takes about two minutes on two
# cores; --long asks more and takes about 20 minutes.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common.sh"
find_march "$@"
shift "$used"
find_python "${CLIENTS_PYTHON:-}" clients

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
failed=()
for test in openai_client schema kill load attacks folder hanging bodies; do
  echo "$test"
  start=$SECONDS
  if "$python" -B "$here/$test.py" --march "$march" --models "$work" "$@"; then
    echo "$test: passed in $((SECONDS - start)) s"
  else
    echo "$test: FAILED in $((SECONDS - start)) s"
    failed+=("$test")
  fi
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi

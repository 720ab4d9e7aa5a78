#!/usr/bin/env bash
# Tests `march serve` from outside, with clients that others wrote: run.sh [PROGRAM] [--long]
#
# PROGRAM is target/release/march unless named; nothing is built here. CLIENTS_PYTHON names a Python that has
# requirements.txt; without it, one is set up in target/clients-venv. The short form takes less than two minutes on two
# cores; --long asks more and takes about a quarter of an hour.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"

march="$root/target/release/march"
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  march="$1"
  shift
fi
if [ ! -x "$march" ]; then
  echo "$march is not a program; build it (cargo build --release) or name another as the first argument" >&2
  exit 1
fi
march="$(cd "$(dirname "$march")" && pwd)/$(basename "$march")"

python="${CLIENTS_PYTHON:-}"
if [ -z "$python" ]; then
  venv="$root/target/clients-venv"
  python="$venv/bin/python"
  # The list of what was installed is written last, so that an interrupted or older installation is repeated.
  if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
    python3 -m venv "$venv"
    "$python" -m pip install --quiet -r "$here/requirements.txt"
    cp "$here/requirements.txt" "$venv/requirements.txt"
  fi
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
failed=()
for test in openai_client schema kill load; do
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

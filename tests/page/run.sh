#!/usr/bin/env bash
# Drives the web page of `march serve` in a headless Chromium: run.sh [PROGRAM] [options of drive.py]
#
# PROGRAM is target/release/march unless named; nothing is built here. Needs the Debian packages chromium and
# chromium-driver, which belong together. PAGE_PYTHON names a Python that has selenium; without it, one is set up in
# target/page-venv.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
needed="selenium==4.44.0"

march="$root/target/release/march"
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  march="$1"
  shift
fi
if [ ! -x "$march" ]; then
  echo "$march is not a program; build it (cargo build --release) or name another as the first argument" >&2
  exit 1
fi
for program in chromium chromedriver; do
  if ! command -v "$program" > /dev/null; then
    echo "$program is missing; install the packages chromium and chromium-driver" >&2
    exit 1
  fi
done

python="${PAGE_PYTHON:-}"
if [ -z "$python" ]; then
  venv="$root/target/page-venv"
  python="$venv/bin/python"
  # The list of what was installed is written last, so that an interrupted or older installation is repeated.
  if [ "$(cat "$venv/installed" 2> /dev/null)" != "$needed" ]; then
    python3 -m venv "$venv"
    "$python" -m pip install --quiet "$needed"
    echo "$needed" > "$venv/installed"
  fi
fi
"$python" "$here/drive.py" --march "$march" --configs "$root/configs" "$@"

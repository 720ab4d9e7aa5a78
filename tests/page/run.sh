#!/usr/bin/env bash
# Drives the web page of `march serve` in a headless Chromium: run.sh [PROGRAM] [options of drive.py]
#
# PROGRAM is target/release/march unless named; nothing is built here. Needs the Debian packages chromium and
# chromium-driver, which belong together. PAGE_PYTHON names a Python that has requirements.txt; without it, one is set up
# in target/page-venv.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common.sh"
find_march "$@"
shift "$used"
for program in chromium chromedriver; do
  if ! command -v "$program" > /dev/null; then
    echo "$program is missing; install the packages chromium and chromium-driver" >&2
    exit 1
  fi
done
find_python "${PAGE_PYTHON:-}" page
"$python" "$here/drive.py" --march "$march" --configs "$root/configs" "$@"

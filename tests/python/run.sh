#!/usr/bin/env bash
# Installs the Python package into a new virtual environment and tests it there: run.sh [PROGRAM] [--long]
#
# PROGRAM is target/release/march unless named: results must be those of it. TORCH_PYTHON and LM_EVAL_PYTHON name Pythons
# of the same version that have PyTorch and lm-evaluation-harness, whose packages are used; without one, what it has is
# installed (PyPI's torch brings CUDA's libraries, 5 GB). --long executes the notebooks, too.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common.sh"
find_march "$@"
shift "$used"
package="$root/crates/python"
export CARGO_TARGET_DIR="$root/target/python" PIP_DISABLE_PIP_VERSION_CHECK=1
step() { printf '\n-- %s\n' "$*"; "$@"; }

cd "$package"
step cargo fmt --check
step cargo clippy --release --locked --quiet -- -D warnings

# What a user does: nothing but this in a new environment.
venv="$root/target/python-venv"
rm -rf "$venv"
python3 -m venv "$venv"
python="$venv/bin/python"
step "$python" -m pip install --quiet "$package"
(cd / && "$python" -c 'import march_lm; print(march_lm.load())')

step "$python" -m pip install --quiet -r "$here/requirements.txt"
# A wheel for other machines: its tag says which systems have the libraries that it needs.
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
step "$venv/bin/maturin" build --release --locked --quiet --out "$work"
case "$(ls "$work")" in
march_lm-*-cp310-abi3-manylinux*.whl | march_lm-*-cp310-abi3-macosx*.whl) ls "$work" ;;
*) ls "$work" >&2 && echo "this is not a wheel for Python 3.10 and later on other machines" >&2 && exit 1 ;;
esac

# packages PYTHON NAME: makes the packages of another Python importable, or installs NAME.
packages() {
  if [ -z "$1" ]; then
    step "$python" -m pip install --quiet "$2"
    return
  fi
  local own other
  own="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  other="$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  echo "$other" >> "$own/others.pth"
}
packages "${TORCH_PYTHON:-}" torch==2.15.0
packages "${LM_EVAL_PYTHON:-}" lm_eval==0.4.13

MARCH="$march" step "$python" -m pytest -q tests
step "$venv/bin/mypy" --strict examples/*.py
step "$python" -m mypy.stubtest march_lm._march --ignore-positional-only
for example in examples/*.py; do
  step "$python" "$example" > "$work/shown" || { cat "$work/shown" >&2 && exit 1; }
done
step "$python" "$root/bench/peers/python.py" --quick
step "$python" "$root/bench/peers/harness.py" --march "$march" --limit 4 --quick
if [ "${1:-}" = --long ]; then
  step "$python" -m pip install --quiet -r "$here/notebooks.txt"
  step "$python" "$here/notebooks.py"
fi

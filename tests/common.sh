# What the scripts that test `march` from outside begin with; they read this file with `source`.
#
# Before that they set `here`, their own folder. This file sets `root`, and its functions set `march` and `python`.
root="$(cd "$here/../.." && pwd)"

# find_march ARGUMENTS...: sets `march` to the first argument if that is not an option, else to target/release/march, and
# `used` to the number of arguments that it took. Nothing is built.
find_march() {
  march="$root/target/release/march"
  used=0
  if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    march="$1"
    used=1
  fi
  if [ ! -x "$march" ]; then
    echo "$march is not a program; build it (cargo build --release) or name another as the first argument" >&2
    exit 1
  fi
  march="$(cd "$(dirname "$march")" && pwd)/$(basename "$march")"
}

# find_python GIVEN NAME: sets `python` to GIVEN; if that is empty, to one in target/NAME-venv, which gets the packages
# of the folder's requirements.txt.
find_python() {
  python="$1"
  if [ -n "$python" ]; then
    return
  fi
  local venv="$root/target/$2-venv"
  python="$venv/bin/python"
  # The list of what was installed is written last, so that an interrupted or older installation is repeated.
  if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
    python3 -m venv "$venv"
    "$python" -m pip install --quiet -r "$here/requirements.txt"
    cp "$here/requirements.txt" "$venv/requirements.txt"
  fi
}

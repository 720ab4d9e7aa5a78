#!/usr/bin/env bash
# Runs the examples on a small model that the first of them trains: examples.sh [FOLDER]
#
# FOLDER has the programs, target/release/examples unless named; `cargo test --release --workspace` builds them there.
# Each must end well and print what its first lines promise, and its source must have at most 30 lines.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
programs="$(cd "${1:-$root/target/release/examples}" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

fail() {
  echo "$*" >&2
  exit 1
}

# run NAME PATTERN TIMES ARGUMENTS...: the example's output must have PATTERN in at least TIMES lines.
ran=" "
run() {
  local name="$1" pattern="$2" times="$3" status=0
  shift 3
  printf '\n-- %s\n' "$name"
  (cd "$work" && "$programs/$name" "$@") > "$work/output" || status=$?
  head -n 5 "$work/output"
  [ "$status" = 0 ] || fail "$name ended with $status"
  [ "$(grep -a -c -e "$pattern" "$work/output")" -ge "$times" ] || fail "$name did not print $pattern $times times"
  ran+="$name "
}

cat > "$work/small.toml" <<'END'
extends = "tiny/march"
[data]
sequence_length = 256
[train]
steps = 20
tokens_per_step = 1024
micro_batch = 4
validate_every = 0
validation_sequences = 2
sample_tokens = 8
save_every = 0
END
run train '^step 20: loss' 1 "$work/small.toml" "$work/run"
run generate '^Alice was' 1 "$work/run"
run losses 'nats per token$' 1 "$work/run"
run bank '^loaded: [0-9]* tokens$' 1 "$work/run"
printf 'Who are you?\nAnd where is the White Rabbit?\n' > "$work/lines"
run chat '^\[[0-9]* tokens, [0-9]* bytes of memory\]$' 2 "$work/run" < "$work/lines"

for source in "$root"/crates/*/examples/*.rs; do
  name="$(basename "$source" .rs)"
  [[ "$ran" == *" $name "* ]] || fail "$source is not run by tests/examples.sh; add it there"
  [ "$(wc -l < "$source")" -le 30 ] || fail "$source has more than 30 lines"
done
printf '\nall examples ran\n'

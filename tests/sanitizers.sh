#!/usr/bin/env bash
# The engine under tools that see more than its tests: sanitizers.sh
#
# loom runs the models of the thread pool (crates/engine/tests/loom.rs) with every order of the threads' steps, and with
# every value that the memory orderings allow. AddressSanitizer watches every access to memory in the engine's tests.
# `.ci/run --long` calls this. Each builds the engine and its dependencies with flags of its own, in target/loom and
# target/asan.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
host="$(rustc -vV | sed -n 's/^host: //p')"

# Without optimization: of the engine only the thread pool runs.
echo "-- loom"
CARGO_TARGET_DIR=target/loom RUSTFLAGS="--cfg loom" \
  cargo test -p march-engine --test loom --config profile.dev.package.loom.opt-level=3

# The sanitizer is unstable in rustc, not in LLVM. With --target, build scripts are not built with it.
echo "-- AddressSanitizer"
CARGO_TARGET_DIR=target/asan RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" \
  cargo test --release -p march-engine --tests --target "$host"

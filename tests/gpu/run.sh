#!/usr/bin/env bash
# Tests of the GPU engine on two software devices, lavapipe and SwiftShader: every operation, the golden checkpoints,
# and the command. Fails if either device is missing.
# usage: tests/gpu/run.sh [--mutants]   with --mutants also deletes each barrier in turn (tests/gpu/mutants.py)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
packages="mesa-vulkan-drivers libvulkan1 chromium" # chromium brings SwiftShader
if ! dpkg -s $packages > /dev/null 2>&1; then
  root=$([ "$(id -u)" = 0 ] || echo sudo)
  $root apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends $packages
fi
lavapipe=$(ls /usr/share/vulkan/icd.d/lvp_icd.*.json | head -n 1)
swiftshader=$(dpkg -L chromium chromium-common | grep 'vk_swiftshader_icd.json$' | head -n 1)
# lavapipe complains if this is not set.
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-$(mktemp -d)}
export VK_DRIVER_FILES="$lavapipe:$swiftshader" MARCH_GPU=required
cargo test --release -p march-gpu
cargo test --release -p march-cli --features gpu --test gpu --test gpu_golden
if [ "${1:-}" = --mutants ]; then
  python3 tests/gpu/mutants.py
fi

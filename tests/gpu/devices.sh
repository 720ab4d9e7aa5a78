# Two software devices for tests of the GPU engine, lavapipe and SwiftShader: installs them from Debian's packages and
# selects them. Source this file. Tests then fail if no device is found.
gpu_packages="mesa-vulkan-drivers libvulkan1 chromium" # chromium brings SwiftShader
if ! dpkg -s $gpu_packages > /dev/null 2>&1; then
  root=$([ "$(id -u)" = 0 ] || echo sudo)
  $root apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq --no-install-recommends $gpu_packages
fi
lavapipe=$(ls /usr/share/vulkan/icd.d/lvp_icd.*.json | head -n 1)
swiftshader=$(dpkg -L chromium chromium-common | grep 'vk_swiftshader_icd.json$' | head -n 1)
export VK_DRIVER_FILES="$lavapipe:$swiftshader" MARCH_GPU=required
# lavapipe complains if this is not set.
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-$(mktemp -d)}

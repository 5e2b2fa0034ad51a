#!/bin/bash
# A run on CPUs loads no CUDA library except the two small ones that libtorch_cpu.so links. libdistrain_cuda.so, if it
# was built, links no NVIDIA library and exports one function.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

# List the libraries that the dynamic loader opened in all processes of the job.
LD_DEBUG=files LD_DEBUG_OUTPUT=$tmp/loader run hybrid --epochs 1 --trainers 1
expect 0 "hybrid on the CPU"
sed -nE 's|.*calling init: .*/(lib[^/ ]+)$|\1|p' "$tmp"/loader.* | sort -u >"$tmp/libraries"
grep -q '^libtorch_cpu\.so' "$tmp/libraries" || fail "the loader's log has no libtorch_cpu.so"
loaded=$(grep -E '^lib(cud|nv|nccl|cu[a-z]+\.|c10_cuda|torch_cuda|distrain)' "$tmp/libraries" |
  grep -vE '^lib(cudart|cupti)\.' | tr '\n' ' ')
[[ -z $loaded ]] || fail "a CPU run loads $loaded"

plugin=$(dirname "$distrain")/libdistrain_cuda.so
if [[ -e $plugin ]]; then
  readelf -d "$plugin" >"$tmp/dynamic" || fail "readelf"
  needed=$(sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p' "$tmp/dynamic")
  grep -qx 'libtorch_cpu\.so' <<<"$needed" || fail "the plugin needs no libtorch_cpu.so: $needed"
  ! grep -E '^lib(cu|nv|nccl|torch_cuda|c10_cuda)' <<<"$needed" || fail "it names NVIDIA's libraries"
  exported=$(nm -D --defined-only "$plugin" | awk '{print $3}')
  [[ $exported == distrain_cuda_plugin ]] || fail "the plugin exports: $exported"
  for function in cudaGetDeviceCount ncclAllReduce ncclCommAbort; do
    nm -D --undefined-only "$plugin" | grep -qw "$function" || fail "$function is not left open"
  done
else
  echo "libdistrain_cuda.so was not built: no CUDA Toolkit here"
fi
finish

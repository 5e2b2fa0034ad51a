#!/usr/bin/env bash
# cmake/Cuda.cmake takes only a CUDA Toolkit of the major version that LibTorch was built for.
set -euo pipefail
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

toolkit() { # toolkit <folder> <version>
  mkdir -p "$work/$1/include"
  echo "#define CUDART_VERSION  $2" >"$work/$1/include/cuda_runtime_api.h"
  touch "$work/$1/include/nccl.h"
}
toolkit cuda12 12040
toolkit cuda13 13010
toolkit cuda99 99000
mkdir -p "$work"/{wheel,archive,other}/torch "$work"/{wheel,other}/nvidia/cu/lib
touch "$work/wheel/nvidia/cu/lib/libcudart.so.13" "$work/other/nvidia/cu/lib/libcudart.so.98"
echo 2.11.0+cu130 >"$work/archive/torch/build-version"
cat >"$work/find.cmake" <<END
cmake_minimum_required(VERSION 3.22)
include($here/../../cmake/Cuda.cmake)
distrain_find_cuda(lacking)
message("found=\${DISTRAIN_CUDA_RUNTIME_INCLUDE} lacking=\${lacking}")
END

# find <expected> <LibTorch> <CMake option>...: checks the chosen Toolkit if a wrong one comes first.
find() {
  local expected=$1 torch=$2 told
  shift 2
  told=$(CUDA_HOME=$work/cuda12 CUDA_PATH=$work/cuda13 cmake -Dtorch_root="$work/$torch/torch" "$@" \
    -P "$work/find.cmake" 2>&1)
  [[ $told == *"$expected"* ]] || {
    printf 'expected: %s\n%s\n' "$expected" "$told" >&2
    exit 1
  }
}
find "found=$work/cuda13/include lacking=" wheel
find "found=$work/cuda13/include lacking=" archive
find "Skipped the CUDA 12 Toolkit in $work/cuda12/include: LibTorch was built for CUDA 13" wheel
find "Skipped the CUDA 99 Toolkit in $work/cuda99/include" wheel \
  -DDISTRAIN_CUDA_RUNTIME_INCLUDE="$work/cuda99/include"
find "found= lacking=no CUDA 98 Toolkit" other

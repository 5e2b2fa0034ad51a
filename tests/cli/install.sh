#!/bin/bash
# ctest: timeout=300
# Uses the installed binary, and the installed library from an independent project (tests/package).
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"
build=$(dirname "$distrain")/..

install_build || finish
libraries=$prefix/$(sed -n 's/^CMAKE_INSTALL_LIBDIR:[A-Z]*=//p' "$build/CMakeCache.txt")
plugin=$(dirname "$distrain")/libdistrain_cuda.so
without="built without CUDA"

case_files_and_binary() {
  local file spins seen
  for file in bin/distrain{,-get-libtorch} libexec/distrain/distrain share/doc/distrain/copyright include/distrain/{base/error,rpc/agent,app/main,distrain}.h \
    share/man/man1/distrain{,-hybrid,-predict}.1 share/bash-completion/completions/distrain \
    share/zsh/site-functions/_distrain share/fish/vendor_completions.d/distrain.fish share/doc/distrain/examples/launch/{slurm.sbatch,k8s-indexed-job.yaml}; do
    [[ -f $prefix/$file ]] || fail "$file is not installed"
  done
  [[ ! -e $prefix/include/distrain/scenario ]] || fail "the five jobs' headers are installed"

  # The binary finds LibTorch, and libdistrain_cuda.so if it was built.
  distrain=$prefix/bin/distrain
  run hybrid --epochs 1 --trainers 1
  expect 0 "the installed binary"
  spins=$(OMP_DISPLAY_ENV=verbose "$distrain" --version 2>&1 | grep GOMP_SPINCOUNT)
  [[ $spins == *"'3000'" ]] || fail "the idle threads of OpenMP spin as long as by default: $spins"
  spins=$(OMP_DISPLAY_ENV=verbose OMP_WAIT_POLICY=passive "$distrain" --version 2>&1 | grep GOMP_SPINCOUNT)
  [[ $spins == *"'0'" ]] || fail "OMP_WAIT_POLICY is not heeded: $spins"
  run hybrid --local --epochs 1 --device cuda
  if [[ -f $plugin ]]; then
    ! grep -q "$without" "$tmp/err" || fail "the binary does not find $(ls "$libraries")"
  else
    grep -q "$without" "$tmp/err" || fail "no CUDA, and not a word of it"
  fi

  # The library does not export symbols of the libraries that are linked into it.
  nm -D --defined-only "$libraries/libdistrain.so" >"$tmp/symbols" || fail "nm"
  seen=$(awk '$3 ~ /^(uv_|XXH|distrain_uv)|3CLI|3fmt/ { print $3 }' "$tmp/symbols" | head -n 3)
  [[ -z $seen ]] || fail "libdistrain.so exports $seen"
  grep -q 'T _ZN8distrain3app4mainEiPPc' "$tmp/symbols" || fail "libdistrain.so has no app::main"
}

case_package() { # ctest: labels=ci
  local package uv spins port clang
  PATH=$build/bin:$PATH cmake -S "$root/tests/package" -B "$tmp/build" \
    -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF >"$tmp/log" 2>&1 && fail "the build tree is found by PATH"
  tr -s ' \n' ' ' <"$tmp/log" | grep -q 'configuration file provided by "distrain"' ||
    fail "the build tree in PATH: $(tail -n 3 "$tmp/log")"
  rm -rf "$tmp/build"
  configure "$root/tests/package" -DLIBTORCH=/nowhere && fail "configured without a LibTorch"
  tr -s ' \n' ' ' <"$tmp/log" | grep -q 'No LibTorch in /nowhere: there is no .*Set LIBTORCH=' ||
    fail "not said: that there is no LibTorch"
  rm -rf "$tmp/build"
  # Use Clang if it is installed: it takes a third of GCC's time, and the library is GCC's. soak/examples.sh uses GCC.
  clang=$(command -v clang++)
  build_outside "$root/tests/package" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O0 \
    ${clang:+-DCMAKE_CXX_COMPILER=$clang} || finish
  package=$tmp/build/my_job
  uv=$("$package" symbols)
  spins=$(OMP_DISPLAY_ENV=verbose "$package" symbols 2>&1 | grep GOMP_SPINCOUNT)
  [[ $spins == *"'3000'" ]] || fail "the package: idle threads spin as long as by default: $spins"
  [[ $uv == */libtorch_cpu.so ]] || fail "uv_run is in $uv"
  if [[ -f $plugin ]] && "$package" cuda 2>&1 | grep -q "$without"; then
    fail "the library does not find libdistrain_cuda.so"
  fi
  port=$(free_port)
  timeout "$limit" "$package" 0 "$port" &
  timeout "$limit" "$package" 1 "$port" || fail "rank 1 of the package: exit code $?"
  wait $! || fail "rank 0 of the package: exit code $?"
}

run_cases

#!/bin/bash
# ctest: timeout=1800
# The .deb in a bare Debian 12: one command installs it, jobs run with the LibTorch in LIBTORCH and with the one of
# distrain-get-libtorch, a project of somebody else's builds and runs, and nothing remains after removal. Takes root and a
# mirror of Debian, which is the one that this machine's apt uses.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2317
if [[ -z ${DISTRAIN_MOUNTS:-} ]]; then
  ((EUID == 0)) && command -v debootstrap >/dev/null || exit 77
  # In a mount namespace of its own, so that the mounts end with this process, however it ends.
  DISTRAIN_MOUNTS=own exec unshare --mount --propagation private bash "$0" "$@"
fi
source "$(dirname "$0")/../cli/lib.bash"
build=$(realpath "$(dirname "$distrain")/..")
torch=$(sed -n 's/^LIBTORCH:[A-Z]*=//p' "$build/CMakeCache.txt")
torch=$(realpath "${torch:-$root/.deps/site/torch}")
version=$(sed -n 's/^CMAKE_PROJECT_VERSION:[A-Z]*=//p' "$build/CMakeCache.txt")
bare=$(mktemp -d) && chmod 755 "$bare" # not in $tmp, which `finish` searches for lines of jobs

# Removes the root only if no mount is left in it, so that no file of a mounted folder is removed.
leave() {
  cleanup
  awk -v bare="$bare/" 'index($2, bare) == 1 { print $2 }' /proc/self/mounts | sort -r | xargs -r umount -l
  if grep -qF " $bare/" /proc/self/mounts; then echo "mounts are left in $bare"; else rm -rf "$bare"; fi
}
trap leave EXIT

# inside [NAME=VALUE...] <command>...: runs the command in the bare Debian, with pip's settings of this machine.
mapfile -t settings < <(env | grep -E '^(PIP_|(https?|no)_proxy=)' | grep -v ^PIP_FIND_LINKS)
inside() {
  timeout -k 5 900 chroot "$bare" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    LC_ALL=C DEBIAN_FRONTEND=noninteractive "DISTRAIN_TEST_ID=$DISTRAIN_TEST_ID" "${settings[@]}" "$@" </dev/null
}
# step <words> <command>...: runs the command and prints how long it took. The test ends if the command fails.
step() {
  local start=$SECONDS
  if ! "${@:2}" >"$tmp/log" 2>&1; then
    fail "$1: $(tail -n 5 "$tmp/log")"
    finish
  fi
  echo "$1: $((SECONDS - start)) s"
}
# trains <words> [NAME=VALUE...] <command>...: the command trains, and its last line says so.
trains() {
  inside "${@:2}" hybrid --data teacher --epochs 2 >"$tmp/out" 2>"$tmp/err"
  code=$?
  expect 0 "$1"
  expect_jq '.[-1].event == "end" and .[-1].status == "ok" and .[-1].steps > 0' "$1"
  [[ ! -s $tmp/err ]] || fail "$1: $(cat "$tmp/err")"
}
# Prints all files but those in which apt, dpkg and ld.so keep their own state.
files_inside() {
  (cd "$bare" && find . -xdev \( -path ./proc -o -path ./tmp -o -path ./var/log -o -path ./var/cache -o -path ./var/lib/apt \
    -o -path ./var/lib/dpkg -o -path ./etc/ld.so.cache -o -path './etc/*-' \) -prune -o -print) | sort
}

step "cpack" cpack --config "$build/CPackConfig.cmake" -B "$tmp/packages" -G DEB
deb=distrain_${version}_$(dpkg --print-architecture).deb
# shellcheck disable=SC2016  # apt-get replaces the names
mirror=$(apt-get indextargets --format '$(ORIGIN) $(SITE)' "Created-By: Packages" | sed -n 's/^Debian //p' | head -n 1)
[[ $mirror ]] || { fail "this machine's apt names no mirror of Debian"; finish; }
step "debootstrap" debootstrap --variant=minbase bookworm "$bare" "$mirror"
cp /etc/resolv.conf /etc/hosts "$bare/etc/"
apt-config dump | grep -E '^Acquire::(http|Check|Retries)' >"$bare/etc/apt/apt.conf.d/99machine"
mkdir "$bare/libtorch"
if ! mount -t proc proc "$bare/proc" || ! mount --bind "$(dirname "$torch")" "$bare/libtorch" ||
  ! mount -o remount,bind,ro "$bare/libtorch"; then
  fail "mount"
  finish
fi
torch=/libtorch/$(basename "$torch")
step "apt-get update" inside apt-get update
cp "$tmp/packages/$deb" "$bare/tmp/"

# Alone: removal leaves exactly the files of before, and removes a LibTorch of distrain-get-libtorch, too.
files_inside >"$tmp/before"
step "apt-get install --no-install-recommends ./$deb" inside apt-get install -y --no-install-recommends "/tmp/$deb"
inside distrain --version >"$tmp/out" 2>"$tmp/err"
code=$?
expect 9 "no LibTorch"
[[ $(cat "$tmp/err") == *"run distrain-get-libtorch, or set LIBTORCH="* && $(wc -l <"$tmp/err") == 1 ]] ||
  fail "no LibTorch: $(cat "$tmp/err")"
inside distrain-get-libtorch >"$tmp/out" 2>"$tmp/err"
code=$?
expect 9 "no pip"
[[ $(cat "$tmp/err") == *"apt-get install python3-pip"* && $(wc -l <"$tmp/err") == 1 ]] || fail "no pip: $(cat "$tmp/err")"
trains "LIBTORCH" "LIBTORCH=$torch" distrain
mkdir -p "$bare/usr/local/lib/distrain/libtorch/torch/lib"
touch "$bare/usr/local/lib/distrain/libtorch/torch/lib/libtorch_cpu.so"
step "apt-get remove distrain" inside apt-get autoremove --purge -y distrain
files_inside >"$tmp/after"
seen=$(diff "$tmp/before" "$tmp/after")
[[ -z $seen ]] || fail "not the files of before: $(head -n 20 <<<"$seen")"

# As a user installs it, with what the package recommends.
step "apt-get install ./$deb" inside apt-get install -y "/tmp/$deb"
for file in /etc/pip.conf "${PIP_CERT:-$(python3 -m pip config get global.cert 2>/dev/null)}"; do
  [[ ! -f $file ]] || install -D -m 644 "$file" "$bare$file"
done
fetched=
if inside python3 -m pip download -q --no-deps -d /tmp/pip pip >"$tmp/log" 2>&1; then
  step "distrain-get-libtorch" inside distrain-get-libtorch
  cat "$tmp/log"
  step "distrain-get-libtorch, again" inside distrain-get-libtorch
  step "apt-get install --reinstall, which keeps LibTorch" inside apt-get install -y --reinstall "/tmp/$deb"
  fetched=1
  trains "distrain-get-libtorch" distrain
  # Another user finds that LibTorch, and a LibTorch of this user's.
  inside useradd -m somebody || fail "useradd"
  trains "another user" setpriv --reuid somebody --clear-groups distrain
  mkdir -p "$bare/home/somebody/.local/share/distrain"
  mv "$bare/usr/local/lib/distrain/libtorch" "$bare/home/somebody/.local/share/distrain/"
  trains "a user's LibTorch" setpriv --reuid somebody --clear-groups env HOME=/home/somebody distrain
  mv "$bare/home/somebody/.local/share/distrain/libtorch" "$bare/usr/local/lib/distrain/"
  rm -r "$bare/home/somebody"
else
  echo "distrain-get-libtorch is not tried: pip downloads nothing here: $(tail -n 1 "$tmp/log")"
fi

step "apt-get install cmake g++" inside apt-get install -y --no-install-recommends cmake g++ make
work=tmp/work # from the root folder, in which `inside` runs commands
mkdir "$bare/$work"
cp -r "$root/tests/package" "$bare/$work/"
flags=(-DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O0)
project=(cmake -S "$work/package" -B "$work/build" --fresh "${flags[@]}")
step "another project, LIBTORCH" inside "LIBTORCH=$torch" "${project[@]}"
[[ ! $fetched ]] || step "another project, distrain-get-libtorch" inside "${project[@]}"
step "build another project" inside cmake --build "$work/build"
uv=$(inside "$work/build/my_job" symbols)
[[ $uv == */libtorch_cpu.so ]] || fail "uv_run is in '$uv'"
port=$(free_port)
inside "$work/build/my_job" 0 "$port" &
inside "$work/build/my_job" 1 "$port" || fail "rank 1: exit code $?"
wait $! || fail "rank 0: exit code $?"

step "apt-get remove distrain" inside apt-get remove -y distrain
seen=$(files_inside | grep distrain)
[[ -z $seen ]] || fail "files are left: $(head -n 20 <<<"$seen")"
finish

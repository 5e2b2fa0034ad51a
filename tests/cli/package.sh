#!/bin/bash
# ctest: timeout=240
# The packages that cpack makes: their files and fields, the start of their program with and without a LibTorch, versions,
# notices of third parties, and distrain-get-libtorch with packages of this test. soak/bare_debian.sh installs the .deb.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"
build=$(realpath "$(dirname "$distrain")/..")

cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
version=$(cached CMAKE_PROJECT_VERSION)
torch=$(cached LIBTORCH)
torch=${torch:-$root/.deps/site/torch}

# make_packages <option>...: makes the packages, with a umask that they must not depend on, and unpacks the .tar.gz.
make_packages() {
  local tar
  tar=$tmp/packages/distrain-$version-linux-$(uname -m).tar.gz
  (umask 077 && cpack --config "$build/CPackConfig.cmake" -B "$tmp/packages" "$@") >"$tmp/log" 2>&1 &&
    mkdir "$tmp/opt" && tar -xzf "$tar" -C "$tmp/opt" --strip-components=1 && return
  fail "cpack: $(tail -n 3 "$tmp/log")"
  finish
}

files=(bin/distrain bin/distrain-get-libtorch libexec/distrain/distrain include/distrain/{distrain,rpc/agent}.h
  share/distrain/{fetch.py,libtorch.txt} share/man/man1/distrain{,-hybrid,-get-libtorch}.1
  share/bash-completion/completions/distrain share/zsh/site-functions/_distrain
  share/fish/vendor_completions.d/distrain.fish share/doc/distrain/{copyright,README.md,docs/jobs.md,examples/xor.cpp})

case_contents() { # ctest: labels=ci
  local file program list seen deb
  make_packages
  for file in "${files[@]}"; do [[ -f $tmp/opt/$file ]] || fail "the .tar.gz has no $file"; done
  # Packages are for other machines: no path of this build, no debugging information.
  seen=$(grep -rIlF -e "$root/" -e "$build/" -e "$torch" "$tmp/opt")
  [[ -z $seen ]] || fail "the .tar.gz has paths of this build: $seen"
  while read -r program; do
    seen=$(readelf -dS "$program" | grep -E 'R(UN)?PATH|\.debug_info')
    [[ -z $seen ]] || fail "$program has $seen"
  done < <(find "$tmp/opt/libexec" "$tmp/opt" -name '*.so.*' -type f -o -path '*/libexec/distrain/*' -type f)
  # The files are for everybody to read.
  seen=$(find "$tmp/opt" ! -perm -444 -o -type d ! -perm -555 -o -path '*/bin/*' ! -perm -555)
  [[ -z $seen ]] || fail "not readable by everybody: $seen"

  command -v dpkg-shlibdeps >/dev/null || return
  deb=$tmp/packages/distrain_${version}_$(dpkg --print-architecture).deb
  dpkg-deb -c "$deb" >"$tmp/list" || fail "dpkg-deb -c"
  list=$(awk '{ print $6 }' "$tmp/list")
  for file in "${files[@]}"; do
    case $file in
      *.1) file=$file.gz ;;
      */_distrain) file=share/zsh/vendor-completions/_distrain ;;
    esac
    grep -qxF "./usr/$file" <<<"$list" || fail "the .deb has no $file"
  done
  seen=$(awk '$6 !~ "^\\./usr/" || $2 != "root/root" || $1 !~ /^(-rw-r--r--|[d-]rwxr-xr-x|l)/' "$tmp/list")
  [[ -z $seen ]] || fail "wrong places, owners or rights in the .deb: $seen"
  dpkg-deb -f "$deb" >"$tmp/fields"
  for seen in "Package: distrain" "Version: $version" "Section: science" "Maintainer: .+" \
    "Depends: .*libc6 .*libssl3.* .*libstdc\+\+6.* .*zlib1g.*" "Recommends: .*python3-pip.*" \
    "Description: Train PyTorch .*"; do
    grep -qxE "$seen" "$tmp/fields" || fail "the .deb has no field '$seen': $(cat "$tmp/fields")"
  done
  ! grep -E '^Depends:.*(torch|python)' "$tmp/fields" || fail "the .deb depends on more than small libraries"
}

case_start() { # ctest: labels=ci
  local program
  make_packages -G TGZ
  program=$tmp/opt/bin/distrain
  unset LIBTORCH
  export HOME=$tmp/home XDG_DATA_HOME=
  says() { # says <words of the error>
    "$program" --version >"$tmp/out" 2>"$tmp/err"
    code=$?
    expect 9 "$1"
    [[ ! -s $tmp/out && $(cat "$tmp/err") == "distrain: "*"$1"* && $(wc -l <"$tmp/err") == 1 ]] ||
      fail "not one line with '$1': $(cat "$tmp/out" "$tmp/err")"
  }
  if [[ ! -e /usr/local/lib/distrain/libtorch ]]; then
    says "is missing: run distrain-get-libtorch, or set LIBTORCH=<its folder>"
  fi
  LIBTORCH=/nowhere says "LIBTORCH=/nowhere has no lib/libtorch_cpu.so"
  mkdir -p "$tmp"/{outer,a:b,old/include/torch/csrc/api/include/torch}
  ln -s "$torch" "$tmp/outer/torch"
  LIBTORCH=$tmp/outer says "set LIBTORCH=$tmp/outer/torch"
  ln -s "$torch/lib" "$torch/include" "$tmp/a:b/"
  LIBTORCH=$tmp/a:b says "must not contain ':' or ';'"
  ln -s "$torch/lib" "$tmp/old/"
  echo '#define TORCH_VERSION "2.1.0"' >"$tmp/old/include/torch/csrc/api/include/torch/version.h"
  LIBTORCH=$tmp/old says "LIBTORCH=$tmp/old is another version of LibTorch than"

  # The program starts with LIBTORCH, also if it is relative, and with a user's LibTorch, through a link, and its ranks do.
  distrain=$program
  LIBTORCH=$torch run hybrid --epochs 1 --trainers 1
  expect 0 "LIBTORCH"
  expect_log "LIBTORCH"
  (cd "$tmp/outer" && LIBTORCH=torch run --version && expect 0 "a relative LIBTORCH" && exit "$failures") || fail "relative"
  mkdir -p "$HOME/.local/share/distrain/libtorch"
  ln -s "$torch" "$HOME/.local/share/distrain/libtorch/torch"
  ln -s "$program" "$tmp/distrain"
  distrain=$tmp/distrain
  run hybrid --epochs 1 --trainers 1
  expect 0 "a user's LibTorch"
  run hybrid --epochs 1 --no-such-option
  expect_error 2 invalid "--no-such-option" "a wrong option"
  # The installed program finds the plugin for CUDA, if there is one.
  run hybrid --local --epochs 1 --device cuda
  if [[ -f $tmp/opt/$(cached CMAKE_INSTALL_LIBDIR)/libdistrain_cuda.so ]] && grep -q "built without CUDA" "$tmp/err"; then
    fail "the program does not find libdistrain_cuda.so"
  fi
}

case_versions() {
  local page libtorch
  run --version
  libtorch=$(sed -n 's/^torch==\([^ ]*\) .*/\1/p' "$root/cmake/libtorch.txt")
  [[ $(head -n 1 "$tmp/out") == "distrain $version (LibTorch $libtorch)" || $torch != */.deps/* ]] ||
    fail "distrain --version: $(head -n 1 "$tmp/out"), not $version and LibTorch $libtorch"
  grep -q "^torch==$libtorch " "$root/cmake/libtorch-cuda.txt" || fail "cmake/libtorch-cuda.txt has another LibTorch"
  for page in "$root"/man/*.1; do
    [[ $(head -n 1 "$page") =~ ' "" "distrain'(" $version")?'" ' ]] || fail "$page: $(head -n 1 "$page")"
  done
  grep -qF "\"distrain $version\"" "$root/man/distrain.1" || fail "man/distrain.1 is not of version $version"
  page=$(sed -n 's/^## \[\([0-9.]*\)\].*/\1/p' "$root/CHANGELOG.md" | head -n 1)
  [[ $page == "$version" ]] || fail "the newest version in CHANGELOG.md is $page, not $version"
  grep -qF "version $version" "$root/README.md" || fail "README.md does not name version $version"
  grep -qF "distrain_${version}_amd64.deb" "$root/docs/install.md" || fail "docs/install.md does not name version $version"
  install_build || finish
  page=$(find "$prefix" -name distrainConfigVersion.cmake)
  grep -qF "set(PACKAGE_VERSION \"$version\")" "$page" || fail "find_package(distrain) finds another version"
  grep -qF "LibTorch $libtorch " "$prefix/bin/distrain-get-libtorch" || [[ $torch != */.deps/* ]] ||
    fail "distrain-get-libtorch fetches another LibTorch than $libtorch"
}

# Each file of other projects that the compiler or the linker reads for the packages' programs is named in NOTICES, but those
# of the C and C++ libraries and of the kernel, and each folder of third_party is.
case_notices() {
  local targets=(bin/distrain bin/libdistrain.so) toolchain='^(lib(c6|stdc\+\+|gcc|asan|clang)-?.*|linux-libc-dev)$' known
  command -v dpkg-query >/dev/null || exit 77
  known=$(ninja -C "$build" -t query bin/libdistrain_cuda.so 2>&1)
  [[ $known == *error* ]] || targets+=(bin/libdistrain_cuda.so)
  ninja -C "$build" -t inputs "${targets[@]}" | grep -E '\.(o|gch)$' >"$tmp/objects" || fail "ninja -t inputs"
  { xargs ninja -C "$build" -t deps <"$tmp/objects" | sed -n 's/^ \+//p'
    ninja -C "$build" -t commands "${targets[@]}" | grep -E ' -o bin/[^ ]+ ' | grep -oE '(^| )[^- ][^ ]*\.(a|so[.0-9]*)( |$)'
  } | sort -u | (cd "$build" && xargs -r realpath -s) | grep -vE "^($root/(src|include|cmd|cmake)|$build/(CMakeFiles|bin|embedded|lib))" |
    sort -u >"$tmp/inputs"
  for known in libuv_a.a CLI/App.hpp nlohmann/json.hpp xxhash.h fmt/format.h ATen/core/Tensor libcrypto.so; do
    grep -qF "$known" "$tmp/inputs" || fail "this test does not see that the build reads $known"
  done
  xargs dpkg-query -S <"$tmp/inputs" 2>/dev/null | sed -E 's/(:[a-z0-9]+)?: / /' |
    awk -v toolchain="$toolchain" '$1 ~ toolchain { print $2 }' | sort -u >"$tmp/toolchain"
  (($(wc -l <"$tmp/toolchain") > 100)) || fail "this test does not see the C library: $(wc -l <"$tmp/toolchain")"
  { comm -23 "$tmp/inputs" "$tmp/toolchain"
    find "$root/third_party" -mindepth 1 -maxdepth 1 -printf 'third_party/%f/\n' 2>/dev/null; } >"$tmp/others"
  python3 -IS - "$root/NOTICES" "$tmp/others" "$root/" <<'END' || fail "NOTICES does not name all"
import fnmatch, pathlib, re, sys
notices, others, root = sys.argv[1:]
paragraphs = [dict(re.findall(r"^([A-Z][\w-]*):(.*\n(?: .*\n)*)", each + "\n", re.M))
              for each in pathlib.Path(notices).read_text().split("\n\n")]
patterns = [name for each in paragraphs if each.get("Copyright", "").strip() for name in each.get("Files", "").split()]
licences = {each["License"].split("\n")[0].strip() for each in paragraphs if "License" in each and "\n " in each["License"]}
bad = [each["License"].strip() for each in paragraphs[1:] if each["License"].split("\n")[0].strip() not in licences]
bad += [name for name in pathlib.Path(others).read_text().split()
        if not any(fnmatch.fnmatchcase(name.removeprefix(root), each) for each in patterns if each != "*")]
print("".join(f"{each}\n" for each in bad[:20]), end="")
sys.exit(bool(bad))
END
}

# make_wheel <distribution> <version> <file>...: writes a wheel into $tmp/wheels, and its line into the list of packages.
make_wheel() {
  python3 -IS - "$tmp/wheels" "$list" "$@" <<'END'
import hashlib, pathlib, sys, zipfile
folder, list_of, name, version, *files = sys.argv[1:]
path = pathlib.Path(folder) / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
info = f"{name.replace('-', '_')}-{version}.dist-info/"
with zipfile.ZipFile(path, "w") as wheel:
    wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(info + "RECORD", "")
    for file in files:
        wheel.writestr(file, file)
with open(list_of, "a") as lines:
    lines.write(f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n")
END
}

case_get_libtorch() { # ctest: labels=ci
  local get list out=$tmp/target/libtorch
  python3 -m pip --version >/dev/null 2>&1 || exit 77
  install_build || finish
  get=$prefix/bin/distrain-get-libtorch
  list=$prefix/share/distrain/libtorch.txt
  mkdir "$tmp/wheels"
  : >"$list"
  make_wheel torch 2.0.0 torch/lib/libtorch_cpu.so torch/lib/libtorch_cuda.so torch/include/ATen/ATen.h torch/nn.py
  make_wheel nvidia-cuda-runtime 1.0.0 nvidia/cu1/lib/libcudart.so.1
  fetch() { # fetch <exit code> <words of stdout, or of the one line on stderr> <argument>...
    timeout -k 2 "$limit" "$get" "${@:3}" >"$tmp/out" 2>"$tmp/err"
    code=$?
    expect "$1" "distrain-get-libtorch ${*:3}"
    if (($1 == 0)); then
      [[ $(cat "$tmp/out") == *"$2"* && ! -s $tmp/err ]] || fail "not '$2': $(cat "$tmp/out" "$tmp/err")"
    else
      [[ $(cat "$tmp/err") == "distrain-get-libtorch: "*"$2"* && $(wc -l <"$tmp/err") == 1 ]] ||
        fail "not one line with '$2': $(cat "$tmp/err")"
    fi
    [[ ! -e $out.part ]] || fail "$out.part is left"
  }
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$tmp/wheels
  fetch 0 "Usage: distrain-get-libtorch [FOLDER]" --help
  fetch 2 "unknown option '--force'" --force
  fetch 2 "unexpected argument 'b'" a b
  fetch 2 "the folder has no name" ""
  fetch 0 "for LIBTORCH=$out/torch" "$out"
  [[ $(cd "$out" && find . -type f ! -name METADATA | sort | tr '\n' ' ') == \
    "./fetched.txt ./nvidia/cu1/lib/libcudart.so.1 ./torch/include/ATen/ATen.h ./torch/lib/libtorch_cpu.so " ]] ||
    fail "$(find "$out")"
  PIP_FIND_LINKS=/nowhere fetch 0 "for LIBTORCH=$out/torch" "$out" # is complete, so nothing is downloaded
  # Another version replaces the folder, but not if its packages are not those of the list, or cannot be had.
  sed -i '/^torch/d' "$list"
  make_wheel torch 3.0.0 torch/lib/libtorch_cpu.so
  cp "$tmp/wheels/torch-3.0.0-py3-none-any.whl" "$tmp/right.whl"
  echo >>"$tmp/wheels/torch-3.0.0-py3-none-any.whl"
  fetch 9 "could not be fetched: " "$out"
  rm "$tmp"/wheels/torch-3*
  fetch 9 "No matching distribution found for torch==3.0.0" "$out"
  PIP_NO_INDEX='' PIP_INDEX_URL=http://127.0.0.1:1/ fetch 9 "could not be fetched: no network? " "$out"
  touch "$tmp/file"
  fetch 9 "$tmp/file" "$tmp/file/libtorch"
  [[ -f $out/torch/include/ATen/ATen.h ]] || fail "a failed fetch has changed the folder"
  mv "$tmp/right.whl" "$tmp/wheels/torch-3.0.0-py3-none-any.whl"
  fetch 0 "for LIBTORCH=$out/torch" "$out"
  [[ ! -e $out/torch/include ]] || fail "the folder keeps files of the older version"
  # Without pip.
  mkdir "$tmp/bin"
  printf '#!/bin/sh\nexit 1\n' >"$tmp/bin/python3"
  chmod +x "$tmp/bin/python3"
  PATH=$tmp/bin:$PATH fetch 9 "Python 3 with pip is missing" "$tmp/other"
}

run_cases

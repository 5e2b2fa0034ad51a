#!/bin/bash
# ctest: timeout=1800
# Builds the examples outside of this repository with an installed distrain, and runs all cases of tests/cli/examples.sh
# with these programs.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"

install_build || finish
cp -r "$root/examples" "$tmp/examples"
build_outside "$tmp/examples" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O0 || finish
DISTRAIN_EXAMPLES=$tmp/build bash "$here/examples.sh" "$distrain" || fail "tests/cli/examples.sh"
finish

#!/bin/bash
# ctest: timeout=900
# Checks that the recorded episodes of unit_scenario.cart_pole are those that Gymnasium plays now.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

"$python" "$root/tests/python/cart_pole.py" >"$tmp/recorded" || fail cart_pole.py
diff "$root/tests/unit/scenario/cart_pole_trajectories.h" "$tmp/recorded" >"$tmp/difference" ||
  { fail "Gymnasium plays otherwise"; head -n 5 "$tmp/difference"; }
finish

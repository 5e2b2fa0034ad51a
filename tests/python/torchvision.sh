#!/bin/bash
# ctest: timeout=900
# With random ResNet50 weights that torchvision saved as safetensors, distrain computes torchvision's outputs,
# gradients and running statistics.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

oracle=$(dirname "$distrain")/oracle
"$python" "$root/tests/python/resnet.py" export "$tmp" || fail "resnet.py export"
DISTRAIN_TORCHVISION=$tmp timeout "$limit" "$oracle" "[.torchvision]" >"$tmp/out" 2>&1 ||
  fail "$(cat "$tmp/out")"
grep -q "All tests passed" "$tmp/out" || fail "no test ran: $(cat "$tmp/out")"
# The numbers that were recorded for the tests without Python are still right.
"$python" "$root/tests/python/resnet.py" record >"$tmp/recorded.h" || fail "resnet.py record"
compare() { tr -d ' \n' <"$1" | sed 's/-\?[0-9]\+\.[0-9e+-]*//g'; }
[[ $(compare "$tmp/recorded.h") == "$(compare "$root/tests/oracle/torchvision_recorded.h")" ]] ||
  fail "torchvision_recorded.h is not what resnet.py record prints"
finish

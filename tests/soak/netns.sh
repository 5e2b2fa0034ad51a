#!/bin/bash
# ctest: timeout=600
# All cases of tests/fault/netns.sh.
export DISTRAIN_SOAK=1
exec bash "$(dirname "$0")/../fault/netns.sh" "$1"

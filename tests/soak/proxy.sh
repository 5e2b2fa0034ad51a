#!/bin/bash
# ctest: timeout=1800
# All cases of tests/fault/proxy.sh, and flips of random bits that DISTRAIN_SEED chooses.
export DISTRAIN_SOAK=1
exec bash "$(dirname "$0")/../fault/proxy.sh" "$1"

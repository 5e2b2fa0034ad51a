#!/bin/bash
# ctest: timeout=1800
# All of tests/fault/proxy.sh, and flips of random bits. DISTRAIN_SEED says which.
export DISTRAIN_SOAK=1
exec bash "$(dirname "$0")/../fault/proxy.sh" "$1"

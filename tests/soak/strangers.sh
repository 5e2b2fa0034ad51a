#!/bin/bash
# ctest: timeout=900
# tests/fault/strangers.sh with 10,000 of them. DISTRAIN_SEED says what they say.
export DISTRAIN_SOAK=1
exec bash "$(dirname "$0")/../fault/strangers.sh" "$1"

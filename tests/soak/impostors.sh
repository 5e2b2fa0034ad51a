#!/bin/bash
# ctest: timeout=1800
# tests/fault/impostors.sh with 20,000 of them for each of the five jobs. DISTRAIN_SEED says what they say.
export DISTRAIN_SOAK=1
exec bash "$(dirname "$0")/../fault/impostors.sh" "$1"

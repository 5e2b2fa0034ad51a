#!/bin/bash
# ctest: timeout=1800
# tests/fault/impostors.sh with 20,000 impostors for each of the five jobs. DISTRAIN_SEED chooses their messages.
export DISTRAIN_SOAK=1
exec bash "$(dirname "$0")/../fault/impostors.sh" "$1"

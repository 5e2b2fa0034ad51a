#!/bin/bash
# ctest: timeout=900
# tests/fault/strangers.sh with 10,000 strangers. DISTRAIN_SEED chooses their messages.
export DISTRAIN_SOAK=1
exec bash "$(dirname "$0")/../fault/strangers.sh" "$1"

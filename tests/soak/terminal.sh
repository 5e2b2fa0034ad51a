#!/bin/bash
# ctest: timeout=1200
# The display of each job in each mode on terminals of 80 and 40 columns. Takes about a minute on two CPUs.
export DISTRAIN_SOAK=1
exec bash "$(dirname "$0")/../cli/terminal.sh" "$1"

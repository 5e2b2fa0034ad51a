#!/bin/bash
# ctest: timeout=1200
# What people see of each job, run in each way, on terminals of 80 and 40 columns: about a minute on two CPUs.
export DISTRAIN_SOAK=1
exec bash "$(dirname "$0")/../cli/terminal.sh" "$1"

#!/bin/bash
# ctest: timeout=240
# What people see on terminals of 80 and 40 columns is as recorded in terminal/.
command -v tmux >/dev/null || { echo "no tmux"; exit 77; }
exec python3 "$(dirname "$0")/terminal/record.py" "$1"

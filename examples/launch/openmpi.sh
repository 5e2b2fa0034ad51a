#!/bin/bash
# Trains under Open MPI: `bash openmpi.sh`. Ctrl-C or SIGTERM to this script saves; started again, it resumes.
hosts=localhost:4                       # host:ranks,host:ranks; rank 0 runs on the first one, where this script runs
ranks=4                                 # number of ranks
job=(hybrid --data teacher --epochs 20) # the command without its options for ranks
folder=run-openmpi                      # folder on a file system that all hosts share

set -u
log=$folder/log-$(date +%Y%m%dT%H%M%S.%3N)
mkdir -p "$folder"
[[ -s $folder/token ]] || (umask 077 && head -c 32 /dev/urandom | base64 >"$folder/token")

# All mpiruns of a user share a folder in TMPDIR. If two start at the same time, one can fail to create that folder, so
# each gets a TMPDIR of its own.
session=$(mktemp -d) || exit
trap 'rm -rf "$session"' EXIT

# Each rank writes to files of its own under $log, because mpirun can truncate and mix lines of several ranks. With
# --bind-to none, distrain divides a host's cores among its ranks. set -m keeps Ctrl-C from mpirun.
set -m
TMPDIR=$session mpirun --host "$hosts" -n "$ranks" --bind-to none --output-filename "$log" \
  distrain "${job[@]}" --master-addr "${hosts%%:*}" --token-file "$folder/token" \
  --checkpoint "$folder/checkpoints" --resume auto >/dev/null &
mpirun=$!

# Signal a rank, which stops the whole job: if mpirun gets the signal, it kills the ranks two seconds later.
trap 'pkill -TERM -P "$mpirun" -x distrain || kill "$mpirun"' INT TERM
while kill -0 "$mpirun" 2>/dev/null; do wait "$mpirun"; done # a signal interrupts wait
wait "$mpirun"; code=$? # bash keeps the exit code
exit $code

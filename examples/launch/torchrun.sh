#!/bin/bash
# Trains under torchrun: `bash torchrun.sh`, on each host. If a rank fails, torchrun starts all ranks again, and the
# job resumes from its newest checkpoint. Ctrl-C or SIGTERM to torchrun saves; torchrun waits 30 s, then kills.
hosts=1                                 # number of hosts
ranks=4                                 # ranks on each host
head=localhost                          # a host that all hosts reach by this name; torchrun's agents meet there
port=29400                              # a port of $head; two jobs need two ports
job=(hybrid --data teacher --epochs 20) # the command without its options for ranks
folder=run-torchrun                     # folder on a file system that all hosts share

set -eu
mkdir -p "$folder"
# The token appears with its final content, because several hosts may make it at the same time.
(umask 077 && head -c 32 /dev/urandom | base64 >"$folder/token.$HOSTNAME.$$")
ln "$folder/token.$HOSTNAME.$$" "$folder/token" 2>/dev/null || true
rm "$folder/token.$HOSTNAME.$$"

# Each rank writes to files of its own under log, because torchrun can mix lines of several ranks. --rdzv-id tells
# the job apart from other jobs.
exec torchrun --no-python --nnodes "$hosts" --nproc-per-node "$ranks" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "${folder//\//-}" --redirects 3 --log-dir "$folder/log" \
  distrain "${job[@]}" --token-file "$folder/token" --checkpoint "$folder/checkpoints" --resume auto

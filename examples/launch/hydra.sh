#!/bin/bash
# Trains under Hydra, the launcher of MPICH and of Intel MPI: `bash hydra.sh`. Ctrl-C, or SIGTERM to mpiexec.hydra,
# saves; started again, the script resumes.
hosts=localhost:4                       # host:ranks,host:ranks; rank 0 runs on the first one
ranks=4                                 # number of ranks
job=(hybrid --data teacher --epochs 20) # the command without its options for ranks
folder=run-hydra                        # folder on a file system that all hosts share

set -eu
log=$folder/log-$(date +%Y%m%dT%H%M%S.%3N)
mkdir -p "$log"
[[ -s $folder/token ]] || (umask 077 && head -c 32 /dev/urandom | base64 >"$folder/token")

# Each rank writes to files of its own under $log. Hydra gives a job no id, so --job-id tells it apart from others.
# bash stands between Hydra and each rank, because Hydra kills all ranks, before they can report, if one is killed.
exec mpiexec.hydra -hosts "$hosts" -n "$ranks" \
  -outfile-pattern "$log/rank%r.jsonl" -errfile-pattern "$log/rank%r.err" \
  bash -c 'trap : INT TERM; distrain "$@"; exit' rank "${job[@]}" --master-addr "${hosts%%:*}" \
  --job-id "$(id -u):$(realpath "$folder")" --token-file "$folder/token" --join-timeout 60 \
  --checkpoint "$folder/checkpoints" --resume auto

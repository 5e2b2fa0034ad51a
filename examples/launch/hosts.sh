#!/bin/bash
# Trains on several hosts that ssh reaches without a password: `bash hosts.sh`. Ctrl-C or SIGTERM saves, and the loss
# of a host ends the job; started again, the script resumes. No rank outlives the script.
# shellcheck disable=SC2029  # commands are expanded here
hosts=(localhost)                       # rank 0 runs on the first one, which the others must reach by this name
ranks=4                                 # ranks on each host
job=(hybrid --data teacher --epochs 20) # the command without its options for ranks
folder=run-hosts                        # folder here and, in the home directory, on each host

set -um # -m keeps Ctrl-C from ssh
mkdir -p "$folder"
[[ -e $folder/token ]] || (umask 077 && head -c 32 /dev/urandom | base64 >"$folder/token")

# Pipe 8 is the standard input of each ssh. When this script ends or closes pipe 9, the hosts stop their ranks.
mkfifo "$folder/pipe.$$"
exec 9<>"$folder/pipe.$$"
exec 8<"$folder/pipe.$$"
rm "$folder/pipe.$$"
trap 'exec 9>&-' INT TERM
failed=0
trap failed=1 USR1

host() { # host <number>: runs the ranks of a host
  local command code
  printf -v command '%q ' distrain "${job[@]}" --ranks "$(($1 * ranks))-$((($1 + 1) * ranks - 1))" \
    --world-size $((ranks * ${#hosts[@]})) --master-addr "${hosts[0]}" --token-file "$folder/token" \
    --checkpoint "$folder/checkpoints" --resume auto
  command="exec 3<&0; $command & ranks=\$!; { read line <&3; kill \$ranks; } >/dev/null 2>&1 &
    wait \$ranks; code=\$?; kill \$! 2>/dev/null; exit \$code"
  ssh "${hosts[$1]}" "$command" <&8 >>"$folder/host$1.jsonl" 2>>"$folder/host$1.err"
  code=$?
  (($1)) || echo $code >"$folder/code" # of rank 0
  ((code)) || return 0
  echo "${hosts[$1]}: exit code $code, see $folder/host$1.err" >&2
  kill -USR1 $$
}

receive="umask 077; mkdir -p $folder; cat >$folder/token.new && mv $folder/token.new $folder/token"
for i in "${!hosts[@]}"; do
  ssh "${hosts[i]}" "$receive" <"$folder/token" || exit
  host "$i" 9>&- &
done
until wait; do # a signal interrupts wait
  # If a host has failed, the ranks on the others have 10 s to notice and end by themselves.
  for ((i = 0; failed && i < 50; ++i)); do
    [[ $(jobs -rp) ]] || break
    sleep 0.2
  done
  ((failed)) && exec 9>&-
done
exit "$(cat "$folder/code")"

#!/bin/bash
# Trains on several hosts that ssh reaches without a password: `bash hosts.sh`. Ctrl-C or SIGTERM saves, and the loss
# of a host ends the job; started again, the script resumes. If the script is killed, the ranks save and end.
# shellcheck disable=SC2029  # commands are expanded here
hosts=(localhost)                       # rank 0 runs on the first one, which the other hosts reach by this name
ranks=4                                 # ranks on each host
job=(hybrid --data teacher --epochs 20) # the command without its options for ranks
folder=run-hosts                        # folder here and, in the home directory, on each host

set -um # -m keeps Ctrl-C from ssh
mkdir -p "$folder"
[[ -s $folder/token ]] || (umask 077 && head -c 32 /dev/urandom | base64 >"$folder/token")

# Pipe 8 is the standard input of each ssh. When this script ends or closes pipe 9, the hosts stop their ranks.
mkfifo "$folder/pipe.$$"
exec 9<>"$folder/pipe.$$"
exec 8<"$folder/pipe.$$"
rm "$folder/pipe.$$"
trap 'exec 9>&-' INT TERM

# Pipe 7 has the exit code of each host whose ranks have ended.
mkfifo "$folder/ended.$$"
exec 7<>"$folder/ended.$$"
rm "$folder/ended.$$"

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
  ((code == 0)) || echo "${hosts[$1]}: exit code $code, see $folder/host$1.err" >&2
  echo $code >&7
}

printf -v receive 'umask 077; mkdir -p %q; cd %q && cat >token.new && mv token.new token' "$folder" "$folder"
for i in "${!hosts[@]}"; do
  ssh "${hosts[i]}" "$receive" <"$folder/token" || exit
  host "$i" 9>&- &
done
# If a host has failed, the ranks on the others have 10 s to notice and end by themselves.
limit=()
for ((ended = 0; ended < ${#hosts[@]}; )); do
  if read -r "${limit[@]}" -u 7 code; then
    ((++ended))
    ((code == 0)) || limit=(-t 10)
  else # a signal or the limit
    exec 9>&-
    limit=()
  fi
done
exit "$(cat "$folder/code")"

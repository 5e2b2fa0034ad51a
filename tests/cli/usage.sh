#!/bin/bash
# ctest: timeout=300
# Wrong usage: exit code 2, one clear error; both spellings of options.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

wrong() { # wrong <words> <args>...
  local words=$1
  shift
  run "$@"
  expect_error 2 invalid "$words" "$*"
}

wrong "no command"
wrong "unknown command 'foo'" foo
wrong "did you mean hybrid?" hybird
wrong "did you mean rnn?" rrnn
wrong "unknown command 'foo'" help foo
wrong "unknown option '--bogus'" --bogus
wrong "unexpected argument 'x'" hybrid x
wrong "did you mean --trainers?" hybrid --trainer 3
wrong "did you mean --batch-size?" hybrid --batch_sise=3
wrong "unknown option -x" hybrid -x
for option in --token-file --config; do
  wrong "unknown option $option" hybrid $option x
done
wrong "--trainers must be a whole number from 1 to 1022, not 0" hybrid --trainers 0
wrong "--trainers must be a whole number" hybrid --trainers 2.5
wrong "--trainers must be a whole number" hybrid --trainers 99999999999999999999
wrong "--epochs must be a whole number" hybrid --epochs 1e3
wrong "--epochs must be a whole number" hybrid "--epochs= 3"
wrong "--lr must be a finite number" hybrid --lr nan
wrong "--lr must be a finite number" hybrid --lr inf
wrong "--lr must be a finite number" hybrid --lr 0.1x
wrong "--lr must be a number from 0" hybrid --lr -0.1
wrong "--seed must be" hybrid --seed -1
wrong "--rpc-timeout must be a number above 0" hybrid --rpc-timeout 0
wrong "--master-port must be" hybrid --master-port 65536
wrong "--lr needs a value" hybrid --lr
wrong "--lr needs a value" hybrid --lr=
wrong "--data needs a value" hybrid --data --local
wrong "--local takes no value" rl --local=maybe
wrong "--quiet takes no value" rl --quiet=
wrong "--help takes no value" rl --help=3
wrong "--explain takes no value" pipeline --explain=false
wrong "write -q without '='" rl -q=1
wrong "unexpected argument 'pipeline'" help rl pipeline
wrong "did you mean adagrad?" hybrid --optimizer adgrad
wrong "must be one of async, sync" hybrid --mode both
wrong "must be one of auto, tcp, unix" hybrid --transport ib
wrong "--test-data needs --data" hybrid --test-data "$0"
wrong "a world of 5 ranks, --world-size says 4" hybrid --trainers 3 --world-size 4
wrong "--world-size 2 is too small" hybrid --world_size 2
wrong "there is no rank 4 in a world of 4 ranks" hybrid --rank 4 --world-size 4
wrong "--ranks names rank 1 twice" hybrid --ranks 0-1,1
wrong "--ranks must be a list" hybrid --ranks 3-1
wrong "there is no rank 9" hybrid --ranks 0-9
wrong "--rank excludes --ranks" hybrid --rank 0 --ranks 0-1
wrong "--rank excludes --spawn" hybrid --rank 0 --spawn
wrong "--local excludes --rank" hybrid --local --rank 0

# ps and rnn.
wrong "unknown option --embedding-dim" ps --embedding-dim 3
wrong "unknown option --valid-data" ps --valid-data x
wrong "must be one of async, sync, ssp" ps --mode both
wrong "must be one of async, sync, not 'ssp'" rnn --mode ssp
wrong "must be one of on, off" ps --dropout 0.5
wrong "--std must be a number above 0" ps --std 0
wrong "--mean must be a finite number" ps --mean inf
wrong "--dropout must be a number from 0 to below 1, not 1" rnn --dropout 1
wrong "--vocab-size must be a whole number from 2" rnn --vocab-size 1
wrong "--steps must be a whole number from 0" ps --steps -1
wrong "a world of 4 ranks, --world-size says 3" ps --trainers 3 --world-size 3
wrong "--world-size 1 is too small" rnn --world-size 1
wrong "--valid-data needs --data" rnn --valid-data "$0"
wrong "--prompt needs --generate" rnn --prompt "in the"

for command in hybrid ps rnn; do
  where=()
  [[ $command == ps ]] && where=(--data "$tmp")
  wrong "--checkpoint-every needs --checkpoint" "$command" "${where[@]}" --checkpoint-every 5
  wrong "--resume auto needs --checkpoint" "$command" "${where[@]}" --resume auto
  wrong "--checkpoint needs a value" "$command" --checkpoint
  wrong "unknown fault 'slow'" "$command" "${where[@]}" --inject slow=1
  wrong "--inject delay: a fault is KIND=VALUE" "$command" "${where[@]}" --inject delay
  wrong "--inject : a fault is KIND=VALUE" "$command" "${where[@]}" --inject delay=1s,
  wrong "in us, ms or s (50ms), not '50'" "$command" "${where[@]}" --inject delay=50
  wrong "the delay must be a number above 0" "$command" "${where[@]}" --inject delay=0ms
  wrong "the delay must be a finite number, not 'x'" "$command" "${where[@]}" --inject delay=xms
  wrong "--inject delay=1ms@rank=4: there is no rank 4" "$command" "${where[@]}" --inject delay=1ms@rank=4
  wrong "the rank must be a whole number" "$command" "${where[@]}" --inject delay=1ms@rank=x
  wrong "what follows the @ must be rank=N" "$command" "${where[@]}" --inject delay=1ms@2
  wrong "must be checkpoint.N, not 'save.1'" "$command" "${where[@]}" --inject fail=save.1
  wrong "what fails must be a whole number from 1" "$command" "${where[@]}" --inject fail=checkpoint.0
  wrong "rank 0 alone saves" "$command" "${where[@]}" --inject delay=1ms,fail=checkpoint.1@rank=1
done

# A placement that fails shows an option's value without starting anything.
same() { # same <jq filter> <args>...
  local filter=$1
  shift
  run hybrid --dump-placement "$@"
  expect 0 "$*"
  expect_jq ".[0] | $filter" "$*"
}
same '.world_size == 5' --world-size 5
same '.world_size == 5' --world_size 5
same '.world_size == 5' --world_size=5
same '.world_size == 6 and .trainers == 4' --trainers 3 --trainers=4
run ps --dump-placement
expect_jq '.[0] | .ranks == [0,1,2] and .trainers == 2' "ps: ranks"
run rnn --dump-placement --world-size 4
expect_jq '.[0] | .ranks == [0,1,2,3] and .trainers == 3' "rnn: ranks"
same '.master_addr == "h" and .master_port == 5' --rank 0 --master_addr h --master_port=5
finish

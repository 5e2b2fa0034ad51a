#!/bin/bash
# ctest: timeout=120
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
wrong "unknown command 'rnn'" rnn
wrong "unknown command 'foo'" help foo
wrong "unknown option '--bogus'" --bogus
wrong "unexpected argument 'x'" hybrid x
wrong "did you mean --trainers?" hybrid --trainer 3
wrong "did you mean --batch-size?" hybrid --batch_sise=3
wrong "unknown option -x" hybrid -x
for option in --device --checkpoint --trace --token-file --inject --config; do
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
same '.master_addr == "h" and .master_port == 5' --rank 0 --master_addr h --master_port=5
finish

#!/bin/bash
# ctest: timeout=120
# Wrong usage gives exit code 2 and one clear error; both spellings of options work. Errors of single jobs are in
# tests/unit/scenario/test_usage.cpp.
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
wrong "unknown option --bogus; see distrain hybrid --help" hybrid --bogus
wrong "unknown option --micro-batches: it is an option of pipeline; see distrain ps --help" ps --micro-batches=3
wrong "unknown option --trainer; did you mean --trainers?" ps --trainer 3
wrong "--lr must be a number from 0 to 1000000, not 'nan'" hybrid --lr nan
wrong "unexpected argument 'pipeline'" help rl pipeline
wrong "--lr must follow the command: distrain hybrid --lr" --lr=3 hybrid

run hybrid --data teachr
expect_error 7 bad_data "--data teachr: No such file or directory; did you mean teacher?" "--data teachr"

mkdir "$tmp/gone"
pushd "$tmp/gone" >/dev/null || exit 1
rmdir "$tmp/gone"
wrong "the working directory has been deleted: change to one that exists" hybrid --epochs 1
wrong "the working directory has been deleted" predict x
popd >/dev/null || exit 1

: >"$tmp/file"
for resume in "" auto; do
  run hybrid --checkpoint "$tmp/file" ${resume:+--resume} $resume
  expect_error 7 bad_data "--checkpoint $tmp/file: is a file, a folder is needed" "--checkpoint FILE $resume"
done

# A terminal shows each error once, in one line; without a command it shows the usage.
if command -v script >/dev/null; then
  for words in "--bogus" "hybrid --bogus" "hybrid --data '$tmp/nowhere'" "predict '$tmp/nowhere'"; do
    on_terminal "'$distrain' $words; echo \"code \$?\""
    [[ $(wc -l <"$tmp/tty") == 2 && $(head -n 1 "$tmp/tty") == distrain:* ]] ||
      fail "$words, on a terminal: $(head -c 300 "$tmp/tty")"
  done
  on_terminal "'$distrain'; echo \"code \$?\""
  "$distrain" --help >"$tmp/out"
  diff <(cat "$tmp/out" && echo "code 2") "$tmp/tty" >/dev/null || fail "no command, on a terminal: $(cat "$tmp/tty")"
fi

# --dry-run and --print-config show the values of options without starting ranks.
same() { # same <jq filter> <args>...
  local filter=$1
  shift
  run hybrid --dry-run --print-config "$@"
  expect 0 "$*"
  expect_jq ".[0] * .[1] | $filter" "$*"
}
same '.world_size == 5' --world-size 5
same '.world_size == 5' --world_size 5
same '.world_size == 5' --world_size=5
same '.world_size == 6 and .config.trainers == 4' --trainers 3 --trainers=4
make_images "$tmp/images" 60 20
run ps --dry-run --print-config --data "$tmp/images"
expect_jq 'map(.rank) == [null,0,1,2,null] and .[0].config.trainers == 2' "ps: ranks"
run rnn --dry-run --print-config --world-size 4
expect_jq 'map(.rank) == [null,0,1,2,3,null] and .[0].config.trainers == 3' "rnn: ranks"
same '.master_addr == "h" and .master_port == 5' --rank 0 --master_addr h --master_port=5
finish

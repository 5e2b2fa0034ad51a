#!/bin/bash
# The files in man/ and completions/ are those that the program prints, and man and the shells can read them.
# Not under asan, because unit_app makes the same texts under asan.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

complete_words() ( # complete_words <words>...: prints the words that bash offers after them
  # shellcheck source=/dev/null
  source "$root/completions/distrain.bash"
  compopt() { :; }
  COMP_WORDS=("$@")
  COMP_CWORD=$(($# - 1))
  _distrain
  printf '%s\n' "${COMPREPLY[@]}"
)
offers() { # offers <expected words> <words>...
  local answer
  answer=$(complete_words "${@:2}" | tr '\n' ' ')
  [[ $answer == "$1 " ]] || fail "bash offers '$answer', not '$1', after ${*:2}"
}
same() { # same <file> <args>...: the program prints the content of the file
  run "${@:2}"
  expect 0 "${*:2}"
  cmp -s "$tmp/out" "$root/$1" || fail "$1 is not what 'distrain ${*:2}' prints: ./run docs writes it"
}

find_jobs() { # sets `jobs`
  mapfile -t jobs < <("$distrain" schema end | jq -r '.oneOf[].properties.cmd.enum[] | values')
  ((${#jobs[@]} == 5)) || fail "distrain schema end names ${#jobs[@]} jobs"
}

case_files() {
  local command others page warnings file text says
  find_jobs
  same man/distrain.1 man
  for command in "${jobs[@]}" predict report; do same "man/distrain-$command.1" man "$command"; done
  same completions/distrain.bash completion bash
  same completions/_distrain completion zsh
  same completions/distrain.fish completion fish
  others=$(cd "$root" && echo man/* completions/* | wc -w)
  ((others == ${#jobs[@]} + 7)) || fail "man/ and completions/ hold $others files"

  for page in "$root"/man/*.1; do
    if command -v groff >/dev/null; then
      warnings=$(groff -man -ww -Tutf8 "$page" 2>&1 >/dev/null)
      [[ -z $warnings ]] || fail "$page: $warnings"
    fi
    if command -v mandoc >/dev/null; then
      # The pages have a version instead of a date.
      warnings=$(mandoc -Tlint -Wwarning "$page" 2>&1 | grep -v "missing date")
      [[ -z $warnings ]] || fail "$page: $warnings"
    fi
  done
  # docs/gpu.md and the man page both say, outside of headings, what computes where, what a missing GPU does, and on how
  # many GPUs the CUDA code was tested.
  for file in docs/gpu.md man/distrain.1; do
    text=$(sed -n '/^\.SH/d; /^#/d; /^- \[/d; s/\\f[BR]//g; s/\\-/-/g; s/`//g; p' "$root/$file" | tr -s '[:space:]' ' ')
    for says in 'Without --device,? (a job|all ranks) computes? on the CPU,? and (loads )?no CUDA library' \
      'missing, the job ends with exit (code|status) 9' 'tested on one GPU'; do
      [[ $text =~ $says ]] || fail "$file does not say: $says"
    done
  done
}

case_completions() {
  local job words
  find_jobs
  bash -n "$root/completions/distrain.bash" || fail "distrain.bash does not parse"
  command -v zsh >/dev/null && { zsh -n "$root/completions/_distrain" || fail "_distrain does not parse"; }
  command -v fish >/dev/null &&
    { fish -n "$root/completions/distrain.fish" || fail "distrain.fish does not parse"; }

  for job in "${jobs[@]}"; do offers "$job" distrain "${job:0:2}"; done
  offers sync distrain hybrid --mode s
  offers async distrain hybrid --mode = a
  offers ssp distrain ps --mode ss
  offers --embedding-dim distrain hybrid --embe
  offers "cpu cuda" distrain rl --device ""
  offers auto distrain rl --resume aut
  mkdir "$tmp/run1" && : >"$tmp/run1.txt"
  for words in predict "hybrid --resume" "ps --checkpoint" "rl --resume ="; do
    # shellcheck disable=SC2086
    offers "$tmp/run1" distrain $words "$tmp/ru"
  done
  offers "$tmp/run1 $tmp/run1.txt" distrain predict "$tmp/run1" "$tmp/ru"
  offers "--generate" distrain predict "$tmp/run1" --g
  offers "" distrain predict "$tmp/run1" --lr
  offers "cpu cuda" distrain predict "$tmp/run1" --device ""
  offers "$tmp/run1 $tmp/run1.txt" distrain report "$tmp/ru"
  offers "$tmp/run1 $tmp/run1.txt" distrain report "$tmp/run1.txt" -o "$tmp/ru"
  offers "--output --trace" distrain report --
  offers predict distrain help pre
  offers help distrain man he
  offers "$root/README.md" distrain hybrid --test_data "$root/READ"
  offers "$root/tests" distrain ps --data "$root/tes"
  offers --verify-grads distrain ps --local --verif
  offers rnn distrain help rn
  offers pipeline distrain man pip
  offers zsh distrain completion z
  offers episode distrain schema epi
}

# A command that prints a text takes one argument, which must be known.
case_refused() {
  local command
  refuse() { # refuse <words> <args>...
    run "${@:2}"
    expect_error 2 invalid "$1" "${*:2}"
  }
  refuse "completion needs a shell: bash, zsh, fish" completion
  refuse "unknown shell 'tcsh': must be one of bash, zsh, fish" completion tcsh
  refuse "unknown event 'foo': must be one of start, " schema foo
  refuse "unknown event 'eval2'; did you mean eval?" schema eval2
  refuse "unknown command 'rrnn'; did you mean rnn?" man rrnn
  refuse "unexpected argument 'rl'" man rnn rl

  "$root/run" hlep >"$tmp/out" 2>"$tmp/err"
  code=$?
  expect 2 "./run hlep"
  [[ ! -s $tmp/out && $(cat "$tmp/err") == "run: unknown command 'hlep': must be one of demo, "* ]] ||
    fail "./run hlep: $(head -n 3 "$tmp/err")"
  for command in man completion schema; do
    run "$command" --help
    expect 0 "$command --help"
    grep -q "^Usage: distrain $command" "$tmp/out" || fail "$command --help: no usage"
  done
}

run_cases

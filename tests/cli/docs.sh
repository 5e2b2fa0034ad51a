#!/bin/bash
# Man pages and completions name every option of the table, and none that it has not.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

complete_words() ( # complete_words <words>...: what bash offers after them
  # shellcheck source=/dev/null
  source "$root/completions/distrain.bash"
  # shellcheck disable=SC2317  # called by _distrain
  compopt() { :; }
  COMP_WORDS=("$@")
  COMP_CWORD=$(($# - 1))
  _distrain
  printf '%s\n' "${COMPREPLY[@]}"
)
names() { # names <pattern with one group>: what the text calls options, sorted
  grep -oP -- "$1" | sort -u
}
compare() { # compare <what> <names found>
  local missing extra
  missing=$(comm -23 <(printf '%s\n' "${options[@]}" | sort -u) <(echo "$2"))
  extra=$(comm -13 <(printf '%s\n' "${options[@]}" | sort -u) <(echo "$2"))
  [[ -z $missing ]] || fail "$1 lacks: ${missing//$'\n'/ }"
  [[ -z $extra ]] || fail "$1 names what is no option: ${extra//$'\n'/ }"
}
zsh_rows() { # zsh_rows <command>: its own and those that all have
  sed -n "/^\($1\|common\)_options=(/,/^)/p" "$root/completions/_distrain"
}
fish_rows() {
  grep -E "^__distrain_option ('([a-z]+ )*$1( [a-z]+)*'|$1) |-l help" "$root/completions/distrain.fish"
}
has_choices() { # has_choices <option> <choices with |> <what>: the text has them in the option's row
  grep -E -- "(--|-l )$1[[ ]" | grep -qF -- "$2" || fail "$3 lacks the choices of --$1: $2"
}

check_command() {
  local command=$1 man=$tmp/man name default choices row
  run "$command" --dump-options
  expect 0 "$command --dump-options"
  mapfile -t options < <(jq -r '.options[] | select(.hidden | not) | .name' "$tmp/out")
  ((${#options[@]} > 25)) || fail "only ${#options[@]} options in the table of $command"

  sed 's/\\-/-/g' "$root/man/distrain-$command.1" >"$man"
  # In an option's own entry: ".BI --name", ".BR -q ", " --name", ".B --name".
  grep -A1 '^\.TP' "$man" >"$tmp/entries"
  compare "man/distrain-$command.1" "$(names '^\.B.*--\K[a-z][a-z-]*' <"$tmp/entries")"
  compare "distrain.bash ($command)" "$(complete_words distrain "$command" -- | names '^--\K[a-z-]+')"
  compare "_distrain ($command)" "$(zsh_rows "$command" | names "['{,]--\K[a-z][a-z-]+(?=[\[}])")"
  compare "distrain.fish ($command)" "$(fish_rows "$command" | names ' -l \K[a-z][a-z-]+')"

  while read -r name choices; do
    has_choices "$name" "${choices// /|}" "the man page of $command" <"$man"
    zsh_rows "$command" | has_choices "$name" "($choices)" "_distrain ($command)"
    fish_rows "$command" | has_choices "$name" "'$choices'" "distrain.fish ($command)"
    row=$(complete_words distrain "$command" "--$name" "" | tr '\n' ' ')
    [[ $row == "$choices " ]] || fail "bash offers '$row' for $command --$name"
  done < <(jq -r '.options[] | select(.choices) | "\(.name) \(.choices | join(" "))"' "$tmp/out")

  # The defaults of the table stand in the man page.
  while read -r name default; do
    awk -v name="--$name" '/^\.TP/ { on = 0 } on { print } index($0, name " ") || index($0, name "\"") { on = 1 }' \
      "$man" | grep -qF -- "Default $default" || fail "man/distrain-$command.1 lacks: $name: Default $default"
  done < <(jq -r '.options[] | select(.hidden or .default == null or .default == false | not)
    | "\(.name) \(.default | if type == "array" then map(tostring) | join(",") else . end)"' "$tmp/out")

  grep -q "^distrain.-$command\|distrain.-$command (1)" "$root/man/distrain.1" || fail "man/distrain.1 lacks $command"
  [[ $(complete_words distrain "${command:0:2}") == "$command" ]] || fail "bash: distrain ${command:0:2}"
  grep -q "$command)" "$root/completions/_distrain" || fail "_distrain lacks $command"
  grep -q -- "-n __fish_use_subcommand -a $command " "$root/completions/distrain.fish" || fail "distrain.fish lacks $command"
}

mapfile -t commands < <("$distrain" --help | sed -n '/^Commands:/,/^$/p' | awk 'NF && !/:$/ && $1 != "help" { print $1 }')
((${#commands[@]} >= 3)) || fail "distrain --help names ${#commands[@]} commands"
for command in "${commands[@]}"; do check_command "$command"; done

for page in "$root"/man/*.1; do
  if command -v groff >/dev/null; then
    warnings=$(groff -man -ww -Tutf8 "$page" 2>&1 >/dev/null)
    [[ -z $warnings ]] || fail "$page: $warnings"
  fi
  if command -v mandoc >/dev/null; then
    warnings=$(mandoc -Tlint -Wwarning "$page" 2>&1)
    [[ -z $warnings ]] || fail "$page: $warnings"
  fi
done
# README and man page say which devices there are: with --device CUDA, too, without it the CPU only.
devices_of() { sed -n "/$1/,/$2/p" "$3"; }
for text in "$(devices_of '^## CPU and GPU' '^## The' "$root/README.md")" \
  "$(devices_of '^\.SH DEVICES' '^\.SH CHECKPOINTS' "$root/man/distrain.1")"; do
  grep -q 'CPU' <<<"$text" || fail "README or man/distrain.1 does not say what computes on the CPU"
  if "$distrain" hybrid --dump-options | jq -e 'any(.options[]; .name == "device")' >/dev/null; then
    grep -q 'CUDA' <<<"$text" || fail "README or man/distrain.1 says nothing of CUDA"
  else
    grep -q 'CPU only' <<<"$text" || fail "README or man/distrain.1 does not say 'CPU only'"
  fi
done

version=$("$distrain" --version | sed -n 1p | cut -d' ' -f2)
for name in "" "${commands[@]/#/-}"; do
  grep -q "^\.TH DISTRAIN${name^^} 1 .*distrain $version" "$root/man/distrain$name.1" ||
    fail "man page distrain$name is not of $version"
done

bash -n "$root/completions/distrain.bash" || fail "distrain.bash does not parse"
command -v zsh >/dev/null && { zsh -n "$root/completions/_distrain" || fail "_distrain does not parse"; }
command -v fish >/dev/null &&
  { fish -n "$root/completions/distrain.fish" || fail "distrain.fish does not parse"; }

[[ $(complete_words distrain hybrid --mode s) == sync ]] || fail "bash: --mode s"
[[ $(complete_words distrain hybrid --mode = a) == async ]] || fail "bash: --mode=a"
[[ $(complete_words distrain hybrid --embe) == --embedding-dim ]] || fail "bash: --embe"
[[ $(complete_words distrain ps --mode ss) == ssp ]] || fail "bash: ps --mode ss"
[[ $(complete_words distrain help rn) == rnn ]] || fail "bash: help rn"
finish

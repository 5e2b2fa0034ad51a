#!/bin/bash
# Man pages and completions name every option of the table, and none that it has not.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

run hybrid --dump-options
expect 0 "--dump-options"
mapfile -t options < <(jq -r '.options[] | select(.hidden | not) | .name' "$tmp/out")
((${#options[@]} > 25)) || fail "only ${#options[@]} options in the table"

names() { # names <file> <pattern with one group>: what the file calls options, sorted
  grep -oP -- "$2" "$1" | sort -u
}
compare() { # compare <file> <names found>
  local missing extra
  missing=$(comm -23 <(printf '%s\n' "${options[@]}" | sort -u) <(echo "$2"))
  extra=$(comm -13 <(printf '%s\n' "${options[@]}" version | sort -u) <(echo "$2"))
  [[ -z $missing ]] || fail "$1 lacks: ${missing//$'\n'/ }"
  [[ -z $extra ]] || fail "$1 names what is no option: ${extra//$'\n'/ }"
}

sed 's/\\-/-/g' "$root/man/distrain-hybrid.1" >"$tmp/man"
# In an option's own entry: ".BI --name", ".BR -q ", " --name", ".B --name".
grep -A1 '^\.TP' "$tmp/man" >"$tmp/entries"
compare man/distrain-hybrid.1 "$(names "$tmp/entries" '--\K[a-z][a-z-]*')"
compare completions/distrain.bash "$(names "$root/completions/distrain.bash" '(?<=[ (])--\K[a-z][a-z-]+')"
compare completions/_distrain "$(names "$root/completions/_distrain" "['{,]--\K[a-z][a-z-]+(?=[\[}])" |
  sort -u)"
compare completions/distrain.fish "$(names "$root/completions/distrain.fish" ' -l \K[a-z][a-z-]+')"

jq -r '.options[] | select(.choices) | .choices | join("|")' "$tmp/out" | while read -r choices; do
  for file in man/distrain-hybrid.1 completions/distrain.bash completions/_distrain completions/distrain.fish; do
    case $file in
      man/*) wanted=$choices ;;
      *) wanted=${choices//|/ } ;;
    esac
    grep -qF -- "$wanted" "$root/$file" || echo "$file lacks the choices $wanted"
  done
done >"$tmp/choices"
[[ -s $tmp/choices ]] && fail "$(cat "$tmp/choices")"

# The defaults of the table stand in the man page.
jq -r '.options[] | select(.hidden or .default == null or .default == false | not)
       | "\(.name) \(.default)"' "$tmp/out" | while read -r name default; do
  awk -v name="--$name" '/^\.TP/ { on = 0 } on { print } index($0, name " ") || index($0, name "\"") { on = 1 }' \
    "$tmp/man" | grep -qF -- "Default $default" || echo "$name: Default $default"
done >"$tmp/defaults"
[[ -s $tmp/defaults ]] && fail "man/distrain-hybrid.1 lacks: $(cat "$tmp/defaults")"

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
grep -q 'hybrid' "$root/man/distrain.1" || fail "man/distrain.1 lacks hybrid"
for name in DISTRAIN DISTRAIN-HYBRID; do
  version=$("$distrain" --version | cut -d' ' -f2)
  grep -hq "^\.TH $name 1 .*distrain $version" "$root"/man/*.1 || fail "man page $name is not of $version"
done

bash -n "$root/completions/distrain.bash" || fail "distrain.bash does not parse"
command -v zsh >/dev/null && { zsh -n "$root/completions/_distrain" || fail "_distrain does not parse"; }
command -v fish >/dev/null &&
  { fish -n "$root/completions/distrain.fish" || fail "distrain.fish does not parse"; }

complete_words() ( # complete_words <words>...: what bash offers after them
  # shellcheck source=/dev/null
  source "$root/completions/distrain.bash"
  # shellcheck disable=SC2317  # called by _distrain
  compopt() { :; }
  COMP_WORDS=("$@")
  COMP_CWORD=$(($# - 1))
  _distrain
  echo "${COMPREPLY[*]}"
)
[[ $(complete_words distrain hy) == hybrid ]] || fail "bash: distrain hy"
[[ $(complete_words distrain hybrid --mode s) == sync ]] || fail "bash: --mode s"
[[ $(complete_words distrain hybrid --mode = a) == async ]] || fail "bash: --mode=a"
[[ $(complete_words distrain hybrid --embe) == --embedding-dim ]] || fail "bash: --embe"
finish

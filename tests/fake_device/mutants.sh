#!/usr/bin/env bash
# Omits each wait of the runtime for a device's stream in turn, and checks that a test fails.
#
# A site is a line of src/ or include/ that marks a point in a stream, makes a stream or a thread wait for a point,
# or records that a stream uses memory. In the first run of all tests the fake device lists the call stacks of all
# such requests. In each further run it ignores the requests of one site.
#
# Sites that only query whether a point is reached are not tested, nor are requests that a test itself makes, even
# within a call of the runtime.
#
# usage: mutants.sh TEST_PROGRAM SOURCE_FOLDER [PATTERN of file:line]
set -uo pipefail
program=$1 source=$2 pattern=${3:-.}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TORCH_SHOW_CPP_STACKTRACES=0

DISTRAIN_FAKE_DEVICE_SITES=$work/callers timeout 900 "$program" >"$work/log" 2>&1 || {
  tail -n 40 "$work/log"
  echo "the tests fail without any mutant" >&2
  exit 1
}

# Finds the source line of each caller. The site of a request is its nearest caller in the runtime, except in the file
# that implements all requests. A request whose nearest caller is a test has no site.
tr ' ' '\n' <"$work/callers" | grep . | sort -u >"$work/addresses"
# Subtracts 1 from each return address, which may belong to the line after the call.
while read -r address; do printf '%x\n' $((16#$address - 1)); done <"$work/addresses" |
  addr2line -e "$program" >"$work/lines"
sed "s#^.*/\(src\|include\|tests\)/#\1/#; s# (.*##" "$work/lines" >"$work/short"
paste "$work/addresses" "$work/short" >"$work/places"
awk 'NR == FNR { place[$1] = $2; next }
  { for (i = 1; i <= NF; ++i) {
      if (place[$i] ~ /^tests\// && place[$i] !~ /^tests\/support\/fake_device/) break
      if (place[$i] ~ /^(src|include\/distrain)\// && place[$i] !~ /^src\/rpc\/device\/device.cpp/) {
        print place[$i], $i; break } } }' "$work/places" "$work/callers" | sort -u >"$work/sites"

sites=0 survivors=()
while read -r place address; do
  [[ $place =~ $pattern ]] || continue
  line=$(sed -n "${place##*:}p" "$source/${place%:*}")
  [[ $line != *reached\(\)* ]] || continue # a query, not a wait
  sites=$((sites + 1))
  if DISTRAIN_FAKE_DEVICE_DROP=$address timeout 900 "$program" --abort >"$work/log" 2>&1; then
    survivors+=("$place")
    printf 'NOT NOTICED  %s %s\n%s\n' "$place" "$address" "$line"
  else
    echo "noticed      $place: $(grep -m 1 -A 1 -E '^(-{20,})$' "$work/log" | tail -n 1)"
  fi
done <"$work/sites"
((sites > 0)) || {
  echo "no site matches" >&2
  exit 1
}
echo "$sites sites, ${#survivors[@]} not noticed"
((${#survivors[@]} == 0))

# Three network namespaces that stand for the hosts h0, h1 and h2, and a stand-in for ssh to them.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2034,SC2154
source "$(dirname "${BASH_SOURCE[0]}")/lib.bash"
own_hosts "10.81.0.10 h0" "10.81.0.11 h1" "10.81.0.12 h2"
# shellcheck source=../support/hosts.bash
source "$here/../support/hosts.bash"
make_hosts 10.81.0 || skip "no right to make network namespaces here, no ip command, or no bridges"

# Makes an ssh that runs a command in the namespace of its host, in a home directory of its own, and adds it to PATH.
use_ssh() {
  mkdir bin
  cat >bin/ssh <<END
#!/bin/bash
case \$1 in
  localhost) enter=() ;;
  h0) enter=(ip netns exec ${hosts[0]}) ;;
  h1) enter=(ip netns exec ${hosts[1]}) ;;
  h2) enter=(ip netns exec ${hosts[2]}) ;;
  *) echo "ssh: Could not resolve hostname \$1" >&2; exit 255 ;;
esac
mkdir -p "$PWD/\$1" && cd "$PWD/\$1" && exec "\${enter[@]}" /bin/sh -c "\$2"
END
  chmod +x bin/ssh
  PATH=$PWD/bin:$PATH
}

# three_hosts <job option>...: makes a folder with hosts.sh for these options, and two ranks on each of three hosts.
three_hosts() {
  local IFS=' '
  example hosts.sh "hosts=(h0 h1 h2)" "ranks=2" "job=($*)"
  use_ssh
  files=(run-hosts/host{0..2}.jsonl)
}

# Starts the script in a process group of its own, with new output files. Sets $launcher.
start_hosts() {
  rm -f run-hosts/host*
  set -m
  bash hosts.sh >out 2>err &
  launcher=$!
  set +m
}
trains() {
  local file
  for file in "${files[@]}"; do
    wait_for_lines 2 ready "$file"
    has_lines 2 ready "$file" || grep -h '"event":"waiting"' "${files[@]}" | tail -n 3 | cut -c1-500
  done
  wait_for "$limit" grep -qE '"event":"(step|epoch|episode|split)"' "${files[@]}" || fail "no rank makes a step"
}

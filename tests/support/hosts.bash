# Network namespaces that stand for three hosts with a switch between them. Source this file after cli/lib.bash.
switch=dts$$
hosts=("dt0-$$" "dt1-$$" "dt2-$$")

# shellcheck disable=SC2317  # called by trap
remove_hosts() {
  local host
  for host in "${hosts[@]}" "$switch"; do ip netns del "$host" 2>/dev/null; done
  cleanup
}

# make_hosts <network>: gives host N the address <network>.1N and the MAC address 02:00:00:00:00:1N. Fails if there is no
# right to make network namespaces, no ip command, or no bridge. The hosts are removed when the script ends.
make_hosts() {
  local number host
  trap remove_hosts EXIT
  ip netns add "$switch" 2>/dev/null && ip -n "$switch" link add bridge type bridge 2>/dev/null || return
  ip -n "$switch" link set bridge up
  for number in 0 1 2; do
    host=${hosts[number]}
    ip netns add "$host"
    ip -n "$switch" link add "port$number" type veth peer name eth0 netns "$host" || fail "no veth pair"
    ip -n "$switch" link set "port$number" master bridge up
    ip -n "$host" link set lo up
    ip -n "$host" addr add "$1.1$number/24" dev eth0
    ip -n "$host" link set eth0 address "02:00:00:00:00:1$number" up
  done
}

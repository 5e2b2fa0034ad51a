#include <array>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "distrain/net/socket.h"

namespace distrain::net {

namespace {

// An address and port in the format of /proc/net/tcp: hexadecimal words in memory order.
struct Place {
  std::string v6;
  std::string v4;  // empty if the address is neither IPv4 nor an IPv4-mapped IPv6 address
};

Place place_of(const sockaddr_storage& address) {
  std::array<uint32_t, 4> words{0, 0, htonl(0xffff), 0};  // ::ffff:a.b.c.d
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  if (address.ss_family == AF_INET) {
    std::memcpy(&words[3], &v4.sin_addr, sizeof v4.sin_addr);
  } else {
    std::memcpy(words.data(), &v6.sin6_addr, sizeof v6.sin6_addr);
  }
  // Both families have the port at the same offset.
  const std::string v4_text = fmt::format("{:08X}:{:04X}", words[3], ntohs(v4.sin_port));
  const bool is_v4 = words[0] == 0 && words[1] == 0 && words[2] == htonl(0xffff);
  return {fmt::format("{:08X}{:08X}{:08X}", words[0], words[1], words[2]) + v4_text,
          is_v4 ? v4_text : ""};
}

// Returns the user who owns the connected socket with these two ends, if it is open on this host.
std::optional<uint32_t> owner_in(const char* table, const std::string& own,
                                 const std::string& other) {
  const std::string row = ' ' + own + ' ' + other + " 01 ";  // 01: established
  std::ifstream in(table);
  for (std::string line; std::getline(in, line);) {
    const size_t at = line.find(row);
    if (at == std::string::npos) continue;
    std::string queues, timer, retransmits;
    uint32_t user = 0;
    std::istringstream rest(line.substr(at + row.size()));
    if (rest >> queues >> timer >> retransmits >> user) return user;
  }
  return std::nullopt;
}

std::optional<uint32_t> owner_of_unix_peer(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer.uid;
}

std::optional<uint32_t> owner_of_tcp_peer(int fd, const sockaddr_storage& local) {
  // If the two addresses differ, the peer is on this host only if its address is loopback.
  const std::string other_host = remote_name(fd).host;
  if (other_host != local_name(fd).host && !is_loopback(other_host)) return std::nullopt;
  sockaddr_storage remote{};
  socklen_t size = sizeof remote;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &size) != 0) return std::nullopt;
  const Place here = place_of(local), there = place_of(remote);
  // Either end may be an IPv6 socket with an IPv4-mapped address.
  if (const auto user = owner_in("/proc/self/net/tcp6", there.v6, here.v6)) return user;
  if (here.v4.empty()) return std::nullopt;
  return owner_in("/proc/self/net/tcp", there.v4, here.v4);
}

// Returns true if `user` is the overflow uid, which stands for all users outside this namespace.
bool is_of_outside(uint32_t user) {
  uint32_t overflow = 0, first = 0, outside = 0, count = 0;
  std::ifstream("/proc/sys/kernel/overflowuid") >> overflow;
  std::ifstream("/proc/self/uid_map") >> first >> outside >> count;
  return user == overflow && count != UINT32_MAX;
}

}  // namespace

std::optional<uint32_t> peer_user(int fd) {
  sockaddr_storage local{};
  socklen_t size = sizeof local;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) != 0) return std::nullopt;
  const std::optional<uint32_t> user =
      local.ss_family == AF_UNIX ? owner_of_unix_peer(fd) : owner_of_tcp_peer(fd, local);
  return user && is_of_outside(*user) ? std::nullopt : user;
}

}  // namespace distrain::net

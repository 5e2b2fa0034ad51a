#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include <netinet/in.h>
#include <sys/socket.h>

#include "distrain/net/socket.h"

namespace distrain::net {

namespace {

// An address and port as /proc/net/tcp and tcp6 print them: words in memory order.
struct Place {
  std::array<uint32_t, 4> words{};
  uint16_t port = 0;
  bool operator==(const Place&) const = default;
};

Place place_of(const sockaddr_storage& address) {
  Place place;
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    std::memcpy(place.words.data(), &v4.sin_addr, sizeof v4.sin_addr);
    place.port = ntohs(v4.sin_port);
  } else {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    std::memcpy(place.words.data(), &v6.sin6_addr, sizeof v6.sin6_addr);
    place.port = ntohs(v6.sin6_port);
  }
  return place;
}

// The same as a v6 socket sees it: ::ffff:a.b.c.d.
Place mapped(Place place) { return {{0, 0, htonl(0xffff), place.words[0]}, place.port}; }

bool is_mapped(const Place& place) {
  return place.words[0] == 0 && place.words[1] == 0 && place.words[2] == htonl(0xffff);
}

bool read_place(const char* text, Place& place) {
  uint32_t port = 0;
  auto& w = place.words;
  const bool is_v6 =
      std::sscanf(text, "%8" SCNx32 "%8" SCNx32 "%8" SCNx32 "%8" SCNx32 ":%4" SCNx32,  // NOLINT
                  &w[0], &w[1], &w[2], &w[3], &port) == 5;
  if (!is_v6) w = {};
  if (!is_v6 && std::sscanf(text, "%8" SCNx32 ":%4" SCNx32, &w[0], &port) != 2) {  // NOLINT
    return false;
  }
  place.port = static_cast<uint16_t>(port);
  return true;
}

// Whose the connected socket is that has these two ends. One that is closed is nobody's. Of a
// process on another host there is none in the tables of this one.
std::optional<uint32_t> owner_in(const char* table, const Place& own, const Place& other) {
  constexpr unsigned kEstablished = 1;
  std::ifstream in(table);
  std::string line;
  std::getline(in, line);  // the names of the columns
  while (std::getline(in, line)) {
    char local[64], remote[64];
    unsigned state = 0;
    uint32_t user = 0;
    if (std::sscanf(line.c_str(), " %*d: %63s %63s %x %*s %*s %*s %" SCNu32, local,  // NOLINT
                    remote, &state, &user) != 4) {
      continue;
    }
    Place here, there;
    if (state != kEstablished || !read_place(local, here) || !read_place(remote, there)) continue;
    if (here == own && there == other) return user;
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
  // From one address of this host to another one of it only over loopback.
  const std::string other_host = remote_name(fd).host;
  if (other_host != local_name(fd).host && !is_loopback(other_host)) return std::nullopt;
  sockaddr_storage remote{};
  socklen_t size = sizeof remote;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &size) != 0) return std::nullopt;
  const bool is_v4 = local.ss_family == AF_INET;
  const Place here = is_v4 ? mapped(place_of(local)) : place_of(local);
  const Place there = is_v4 ? mapped(place_of(remote)) : place_of(remote);
  // Either end may be a v6 socket that is used for v4.
  if (const auto user = owner_in("/proc/self/net/tcp6", there, here)) return user;
  if (!is_mapped(here)) return std::nullopt;
  const auto plain = [](const Place& place) { return Place{{place.words[3]}, place.port}; };
  return owner_in("/proc/self/net/tcp", plain(there), plain(here));
}

// In a user namespace all users who are not in it have this one number.
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

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "distrain/base/clock.h"
#include "distrain/net/socket.h"
#include "distrain/net/stream.h"
#include "distrain/wire/handshake.h"

namespace distrain::rpc::control {

/// Where connections to this rank come in. Each begins with a hello; who says none in time, or
/// something else, is shown the door, and so is the one that has waited longest when too many stand
/// there. It admits on the loop; listen() and close() are for any thread.
class Doorway : public std::enable_shared_from_this<Doorway> {
 public:
  /// Takes the connection, with a handler of its own, or gives back why it is refused.
  using Admit =
      std::function<std::optional<base::Error>(const net::StreamPtr& stream, wire::Hello hello)>;

  /// `patience`: for the hello of one connection.
  Doorway(net::Loop& loop, base::Duration patience, Admit admit);

  void listen(net::Fd socket);
  /// Nobody comes in any more. Connections that stand there are cut off.
  void close();

 private:
  struct Stranger {
    net::StreamPtr stream;
    uint64_t timer = 0;
  };

  void on_connection_on_loop(net::Fd socket);
  void on_hello_on_loop(uint64_t number, const net::InFrame& frame);
  void look_once_more_on_loop(uint64_t number);
  void show_the_door_on_loop(uint64_t number);
  /// Null if it stands here no more: a stream may still say something after that.
  net::StreamPtr take_on_loop(uint64_t number);

  net::Loop& loop_;
  const base::Duration patience_;
  const Admit admit_;
  const size_t most_;                       // may stand there
  std::map<uint64_t, Stranger> strangers_;  // by number, as they came; loop thread only
  uint64_t newest_ = 0;                     // loop thread only
  std::mutex mutex_;
  bool is_closed_ = false;                                 // by mutex_
  std::vector<std::unique_ptr<net::Listener>> listeners_;  // by mutex_
};

/// A name for a unix socket that nobody else has; it ends with its socket.
std::string new_unix_name();
/// 16 bytes that nobody can guess.
std::string new_secret();

}  // namespace distrain::rpc::control

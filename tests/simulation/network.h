#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "control/party.h"
#include "distrain/base/random.h"
#include "virtual_time.h"

namespace distrain::simulation {

using rpc::control::Message;

class Host;

/// One of the two ends of a connection.
struct End {
  size_t connection = 0;
  int side = 0;

  End other() const { return {connection, 1 - side}; }
  auto operator<=>(const End&) const = default;
};

/// A process as the network knows it.
class Host {
 public:
  virtual ~Host() = default;
  /// Where it is: a cut is between two places.
  virtual int place() const = 0;
  /// Not while it is stopped, nor once it is dead: its kernel keeps what comes, or throws it away.
  virtual bool is_reading() const = 0;
  /// Its kernel answers who connects.
  virtual bool is_listening() const = 0;
  virtual bool is_stopped() const = 0;
  virtual void on_connection(End end) = 0;
  virtual void on_message(End end, const Message& message) = 0;
  virtual void on_end(End end, const base::Error& error) = 0;
};

/// Connections that keep the order of what is sent in each direction, as TCP does, and nothing
/// else: what goes over two of them comes in any order.
class Network {
 public:
  using OnConnected = std::function<void(std::optional<End> end)>;

  Network(VirtualTime& time, uint64_t seed, Duration longest_delay)
      : time_(time), random_({seed, 0x6e6574}), longest_delay_(longest_delay) {}

  /// `on_connected` is told by whom it is made, or without an end: nobody listens there, or nobody
  /// has answered until `deadline`.
  void connect(Host& from, Host& to, TimePoint deadline, OnConnected on_connected);
  void send(End from, Message message);
  /// The end is its process's no more. What was sent comes first; unless `flush` it may be lost
  /// where it cannot get through.
  void close(End end, bool flush);
  /// Both ends are told that the connection is broken.
  void reset(size_t connection);
  /// All connections of a process that is no more.
  void close_all_of(Host& host);

  /// What goes from one place to another waits until as many heal() have come.
  void cut(int from, int to) { ++cuts_[{from, to}]; }
  void heal(int from, int to);
  /// It reads again.
  void resume(Host& host);

  Host& host_of(End end) { return *side(end).host; }
  bool is_open(End end) { return side(end).is_open; }
  TimePoint last_heard(End end) { return side(end).heard; }
  /// That their processes have not closed, in the order in which they were made.
  std::vector<End> open_ends() const;

 private:
  struct Item {
    TimePoint due;
    std::optional<Message> message;  // without: the end
  };
  struct Side {
    Host* host = nullptr;
    bool is_open = true;
    TimePoint heard;
    std::deque<Item> coming;
    TimePoint last_due{};
    bool is_scheduled = false;
  };
  struct Connection {
    Side sides[2];
  };

  Side& side(End end) { return connections_[end.connection].sides[end.side]; }
  bool gets_through(End from);
  void try_to_connect(Host& from, Host& to, TimePoint deadline, Duration retry,
                      OnConnected on_connected);
  void push(End from, std::optional<Message> message);
  void schedule(End to);
  void deliver(End to);
  Duration delay();

  VirtualTime& time_;
  base::Random random_;
  const Duration longest_delay_;
  std::deque<Connection> connections_;
  std::map<const Host*, std::vector<End>> ends_;  // for look-ups: never gone through
  std::map<std::pair<int, int>, int> cuts_;
};

}  // namespace distrain::simulation

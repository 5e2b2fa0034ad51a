#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "control_protocol.h"
#include "distrain/base/random.h"
#include "virtual_time.h"

namespace distrain::fake_network {

using membership::Message;

class Host;

/// One of the two ends of a connection.
struct End {
  size_t connection = 0;
  int side = 0;

  End other() const { return {connection, 1 - side}; }
  auto operator<=>(const End&) const = default;
};

/// A process that has connections in the simulated network.
class Host {
 public:
  virtual ~Host() = default;
  /// Returns the number of this process in the network. A replacement has another one than the lost
  /// process. cut() and heal() take these numbers.
  virtual int place() const = 0;
  /// Returns false if the process is stopped or dead. resume() delivers messages to a stopped one.
  virtual bool is_reading() const = 0;
  /// Returns true if the process accepts connections.
  virtual bool is_listening() const = 0;
  virtual bool is_stopped() const = 0;
  virtual void on_connection(End end) = 0;
  virtual void on_message(End end, const Message& message) = 0;
  virtual void on_end(End end, const base::Error& error) = 0;
};

/// Connections that keep the order of messages in each direction, as TCP does. Messages on
/// different connections arrive in any order.
class Network {
 public:
  using OnConnected = std::function<void(std::optional<End> end)>;

  Network(VirtualTime& time, uint64_t seed, Duration longest_delay)
      : time_(time), random_({seed, 0x6e6574}), longest_delay_(longest_delay) {}

  /// Connects two processes and calls `on_connected` with the end of `from`, or with nullopt if
  /// `to` does not listen or cannot be reached until `deadline`.
  void connect(Host& from, Host& to, TimePoint deadline, OnConnected on_connected);
  void send(End from, Message message);
  /// Closes an end after its sent messages. If not `flush`, messages that a cut blocks may be lost.
  void close(End end, bool flush);
  /// Breaks the connection and notifies both ends.
  void reset(size_t connection);
  /// Closes all connections of a dead process.
  void close_all_of(Host& host);

  /// Blocks messages from place `from` to place `to` until heal() is called once for each cut().
  void cut(int from, int to) { ++cuts_[{from, to}]; }
  void heal(int from, int to);
  /// Delivers the messages that arrived while `host` was stopped.
  void resume(Host& host);

  Host& host_of(End end) { return *side(end).host; }
  bool is_open(End end) { return side(end).is_open; }
  TimePoint last_heard(End end) { return side(end).heard; }
  /// Returns all open ends in the order of their creation.
  std::vector<End> open_ends() const;

 private:
  struct Item {
    TimePoint due;
    std::optional<Message> message;  // nullopt: the sender has closed the connection
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
  std::map<const Host*, std::vector<End>> ends_;  // never iterated: its order differs between runs
  std::map<std::pair<int, int>, int> cuts_;
};

}  // namespace distrain::fake_network

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "control_plane.h"
#include "device/device_transfer.h"
#include "distrain/net/socket.h"
#include "distrain/rpc/channel.h"

namespace distrain::rpc {

/// One object for the newest process of each rank. Objects of earlier processes (some hundred bytes
/// each) are kept until the end, because threads may still use them. Only one thread may add or
/// replace objects. Any thread may read the objects that were added.
template <class T>
class PerRank {
 public:
  void add(std::unique_ptr<T> object) {
    current_.push_back(std::make_unique<std::atomic<T*>>(object.get()));
    all_.push_back(std::move(object));
  }
  /// Replaces the object of `rank` by `object`, which is for the rank's next process.
  void replace(int rank, std::unique_ptr<T> object) {
    T* const next = object.get();
    all_.push_back(std::move(object));
    current_[static_cast<size_t>(rank)]->store(next, std::memory_order_release);
  }
  T& at(int rank) const {
    return *current_[static_cast<size_t>(rank)]->load(std::memory_order_acquire);
  }
  int size() const { return static_cast<int>(current_.size()); }

 private:
  std::vector<std::unique_ptr<std::atomic<T*>>> current_;
  std::vector<std::unique_ptr<T>> all_;
};

/// The connections to the other ranks, which are made when there is first something to send.
///
/// A peer is unconnected → connecting (frames to it are queued) → connected. From each of these
/// states it becomes left (after its leave message) or lost. If a connection breaks without a
/// message, the peer is connecting until rank 0 has decided whether it is lost. A new process of a
/// lost rank is a new peer: Note [Incarnations].
///
/// If both ranks connect at once, each sends on the connection that it made and receives on both,
/// so the messages from one rank to another keep their order. A rank opens its bulk connection to
/// another rank when the stream for sending asks for it.
class Peers {
 public:
  /// The functions that Peers calls on the loop thread.
  struct Callbacks {
    std::function<void(int rank, net::InFrame frame)> on_frame;
    /// Allocates a frame's buffer, as net::Stream::Handler::allocate does. `rank` is the sender.
    std::function<base::BufferPtr(int rank, const wire::FrameHeader& header)> allocate;
    std::function<void(int rank)> on_open;    ///< called when a connection is ready
    std::function<uint64_t()> shared_memory;  ///< the bytes for Stream::share_memory_on_loop()
  };

  Peers(net::Loop& loop, int rank, membership::ControlPlane& control, Callbacks callbacks)
      : loop_(loop), rank_(rank), control_(control), callbacks_(std::move(callbacks)) {}

  /// Sets the ranks and their addresses. Called once, before all other functions.
  void learn_on_loop(const wire::Directory& directory) {
    for (const wire::Directory::Entry& entry : directory.ranks) {
      ranks_.emplace(entry.name, peers_.size());
      peers_.add(std::make_unique<Peer>(entry));
    }
    size_ = peers_.size();
  }
  /// Returns the number of ranks; 0 before learn_on_loop(). Thread-safe.
  int size() const { return size_; }
  const std::string& name(int rank) const { return at(rank).entry.name; }
  const std::string& host_of(int rank) const { return at(rank).entry.endpoint.host_key; }
  int find_rank(const std::string& name) const {
    const auto found = ranks_.find(name);
    return found == ranks_.end() ? -1 : found->second;
  }
  std::string transport() const {
    bool tcp = false, local = false;
    for (int rank = 0; rank < size(); ++rank) {
      if (rank != rank_) (at(rank).entry.endpoint.unix_name.empty() ? tcp : local) = true;
    }
    return tcp && local ? "mixed" : tcp ? "tcp" : local ? "unix" : "none";
  }
  /// Writes or queues a frame. Returns a lost rank's error, or `peer_lost` if the rank has left.
  base::Status send(int to, net::OutFrame frame);
  bool is_lost(int rank) const { return at(rank).state == State::kLost; }
  /// Returns the incarnation of the newest process of `rank` that this rank knows.
  uint32_t incarnation(int rank) const { return at(rank).entry.incarnation; }
  ProcessNumber process(int rank) const { return process_number(rank, incarnation(rank)); }
  /// Returns true if `process` is the newest process of its rank and is not lost.
  bool is_here(ProcessNumber process) const {
    const Peer& peer = at(rank_of(process));
    return peer.entry.incarnation == incarnation_of(process) && peer.state != State::kLost;
  }
  /// Takes a connection that `rank` has opened for `purpose`. Returns an error to refuse it.
  std::optional<base::Error> accept_on_loop(int rank, wire::HelloPurpose purpose,
                                            const net::StreamPtr& stream);
  /// Marks a rank as lost and drops the frames that are queued for it.
  void lose_on_loop(const Loss& loss);
  bool is_done_without(int rank) const {
    return at(rank).state == State::kLost && at(rank).is_done_without;
  }
  /// Replaces the lost process of `rank` by a new one.
  void renew_on_loop(int rank, const wire::Directory::Entry& entry) {
    peers_.replace(rank, std::make_unique<Peer>(entry));
  }
  /// Returns the device transfers of `rank` that no message has taken yet. Must run on the loop.
  std::shared_ptr<DeviceReceive>& device_receive_on_loop(int rank) {
    return at(rank).device_receive;
  }

 private:
  enum class State { kUnconnected, kConnecting, kConnected, kLeft, kLost };
  struct Peer {
    explicit Peer(const wire::Directory::Entry& its_entry) : entry(its_entry) {}
    const wire::Directory::Entry entry;
    std::atomic<State> state{State::kUnconnected};
    std::atomic<bool> is_done_without{false};  // written before the state is kLost
    net::StreamPtr stream;  // for sending; written before kConnected, read after it
    mutable std::mutex mutex;
    std::deque<net::OutFrame> waiting;  // while connecting; guarded by mutex
    base::Error loss;                   // why the peer was lost; guarded by mutex
    // Used only on the loop thread:
    net::StreamPtr accepted;  // the connection that the peer opened
    net::Fd early_bulk;       // the peer's bulk connection, until the connection for calls is ready
    std::shared_ptr<DeviceReceive> device_receive;
  };

  Peer& at(int rank) const { return peers_.at(rank); }
  base::Error loss_of(int rank, const Peer& peer) const {
    std::lock_guard lock(peer.mutex);
    if (peer.state == State::kLost) return peer.loss;
    return {base::ErrorKind::kPeerLost, membership::rank_text(rank, peer.entry.name) + " has left",
            rank};
  }
  base::Status send_unconnected(int to, Peer& peer, net::OutFrame frame);
  /// A connection that this rank opens to a peer.
  struct Dial {
    int rank;
    Peer& peer;
    wire::HelloPurpose purpose;
    base::TimePoint deadline;
  };
  /// Returns true if the peer is its rank's newest process and still needs the connection.
  bool is_wanted_on_loop(const Dial& dial) const {
    if (&at(dial.rank) != &dial.peer) return false;
    const State state = dial.peer.state;
    return state == State::kConnecting ||
           (dial.purpose == wire::HelloPurpose::kBulk && state == State::kConnected);
  }
  void connect_on_loop(const Dial& dial);
  void on_unreachable_on_loop(const Dial& dial, const base::Error& error);
  void on_connected_on_loop(const Dial& dial, net::Fd socket);
  /// Prepares an authenticated stream for calls.
  void open_on_loop(int rank, const net::StreamPtr& stream);
  /// Ends the stream for which the connection was meant.
  void give_up_on_loop(const Dial& dial) {
    const bool is_bulk = dial.purpose == wire::HelloPurpose::kBulk;
    if (is_bulk && dial.peer.stream) dial.peer.stream->close(false);
  }
  /// Starts the loop of bulk connections. If that fails, reports that this rank cannot reach
  /// `rank`.
  bool start_bulk_loop_on_loop(int rank);
  void begin_to_send_on_loop(int rank, net::StreamPtr stream);
  /// Queues later frames while rank 0 may still report the rank as lost; else the rank has left.
  void on_closed_on_loop(int rank, Peer& peer) {
    std::lock_guard lock(peer.mutex);
    if (peer.state == State::kLost) return;
    peer.state = control_.is_suspected_on_loop(rank) ? State::kConnecting : State::kLeft;
  }

  net::Loop& loop_;
  const int rank_;
  membership::ControlPlane& control_;
  const Callbacks callbacks_;
  std::unordered_map<std::string, int> ranks_;  // by name; filled with peers_
  PerRank<Peer> peers_;       // filled on the loop when the ranks are known, before join() returns
  std::atomic<int> size_{0};  // size of peers_ once it is filled
  /// Serves all bulk connections; destroys what was sent, which may call user code.
  std::optional<net::Loop> bulk_loop_;
};

}  // namespace distrain::rpc

#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "arrivals.h"
#include "control/control_plane.h"
#include "distrain/net/stream.h"
#include "distrain/rpc/incarnation.h"
#include "per_rank.h"

namespace distrain::rpc {

/// The other ranks, with connections that are made when there is first something to send.
///
/// States of a peer: unconnected → connecting (what is sent is kept until the connection stands) →
/// connected; from each of them left (it said that it leaves) or lost. When a connection breaks
/// without a word, back to connecting, until rank 0 has said what that means. A new process of a
/// rank that was lost is a new peer: Note [Incarnations].
///
/// Both ranks may begin at the same moment. Then there are two connections: each rank sends on the
/// one that it made, and hears both. So what one rank sends to another keeps its order.
class Peers {
 public:
  /// On the loop.
  using OnFrame = std::function<void(int rank, net::InFrame frame)>;
  /// net::Stream::Handler::allocate, with the rank that sends.
  using Allocate = std::function<base::BufferPtr(int rank, const wire::FrameHeader& header)>;

  Peers(net::Loop& loop, int rank, ControlPlane& control, OnFrame on_frame, Allocate allocate,
        std::function<void(int rank)> on_open)
      : loop_(loop),
        rank_(rank),
        control_(control),
        on_frame_(std::move(on_frame)),
        allocate_(std::move(allocate)),
        on_open_(std::move(on_open)) {}

  /// Once, before anything else: who they are, and how they are reached.
  void learn_on_loop(const wire::Directory& directory, std::vector<Way> ways);

  /// Zero before learn_on_loop(). For any thread.
  int size() const { return size_; }
  const std::string& name(int rank) const { return at(rank).name; }
  /// Returns the rank of that name, or -1 if no rank has it.
  int find_rank(const std::string& name) const {
    const auto found = ranks_.find(name);
    return found == ranks_.end() ? -1 : found->second;
  }
  /// "unix", "tcp", "mixed" or "none": how they are reached.
  std::string transport() const;

  /// Returns when the frame is written or queued. `peer_lost`, or what the peer said when it left.
  base::Status send(int to, net::OutFrame frame);
  bool is_lost(int rank) const { return at(rank).state == State::kLost; }
  /// Of its newest process that this rank knows of.
  uint32_t incarnation(int rank) const { return at(rank).incarnation; }
  ProcessNumber process(int rank) const { return process_number(rank, incarnation(rank)); }
  /// That process is not lost.
  bool is_here(ProcessNumber process) const {
    const Peer& peer = at(rank_of(process));
    return peer.incarnation == incarnation_of(process) && peer.state != State::kLost;
  }

  /// A connection that another rank has made. Gives back why it is not wanted.
  std::optional<base::Error> accept_on_loop(int rank, const net::StreamPtr& stream);
  /// It is lost: what waits to be sent to it is dropped.
  void lose_on_loop(const Loss& loss);
  /// It is lost, and the job goes on without it.
  bool is_done_without(int rank) const {
    return at(rank).state == State::kLost && at(rank).is_done_without;
  }
  /// A new process has its place, and is reached by `way`.
  void renew_on_loop(int rank, uint32_t incarnation, Way way);

  /// Of chunks from it that are yet to be whole. Loop thread only.
  std::shared_ptr<Arrivals>& arrivals_on_loop(int rank) { return at(rank).arrivals; }

 private:
  enum class State { kUnconnected, kConnecting, kConnected, kLeft, kLost };
  struct Peer {
    Peer(std::string its_name, uint32_t its_incarnation, Way its_way)
        : name(std::move(its_name)), incarnation(its_incarnation), way(std::move(its_way)) {}
    const std::string name;
    const uint32_t incarnation;
    const Way way;
    std::atomic<State> state{State::kUnconnected};
    std::atomic<bool> is_done_without{false};  // written before kLost
    net::StreamPtr stream;  // that this rank sends on; written before kConnected, read after
    mutable std::mutex mutex;
    std::deque<net::OutFrame> waiting;  // by mutex, while connecting
    base::Error loss;                   // by mutex, once lost
    // Loop thread only.
    net::StreamPtr accepted;  // that the peer made
    std::shared_ptr<Arrivals> arrivals;
  };

  Peer& at(int rank) const { return peers_.at(rank); }
  base::Error loss_of(int rank, const Peer& peer) const;
  base::Status send_unconnected(int to, Peer& peer, net::OutFrame frame);
  bool is_connecting_on_loop(int rank, const Peer& peer) const;
  void connect_until_on_loop(int rank, Peer& peer, base::TimePoint deadline);
  void on_unreachable_on_loop(int rank, Peer& peer, const base::Error& error);
  void on_connected_on_loop(int rank, Peer& peer, net::Fd socket, base::TimePoint deadline);
  void on_not_believed_on_loop(int rank, Peer& peer, const base::Error& error,
                               base::TimePoint deadline);
  void begin_to_send_on_loop(int rank, net::StreamPtr stream);
  net::Stream::Handler handler_on_loop(int rank, const net::StreamPtr& stream);
  void on_closed_on_loop(int rank, Peer& peer);

  net::Loop& loop_;
  const int rank_;
  ControlPlane& control_;
  const OnFrame on_frame_;
  const Allocate allocate_;
  const std::function<void(int rank)> on_open_;  // a connection stands; on the loop
  std::unordered_map<std::string, int> ranks_;   // by name; as peers_
  PerRank<Peer> peers_;       // filled on the loop when the ranks are known, before join() returns
  std::atomic<int> size_{0};  // of peers_, once that stays as it is
};

}  // namespace distrain::rpc

#include "peers.h"

#include <fmt/format.h>
#include <sched.h>

namespace distrain::rpc {

using base::Error;
using base::ErrorKind;

// All ranks listen before they learn each other's addresses, and the kernel accepts connections
// even if a process is busy. So if connecting takes longer, something on the path drops packets.
constexpr auto kLongestReach = std::chrono::seconds(20);
// A rank that refuses connections has probably ended, and rank 0 will report why within this time.
constexpr auto kRank0Grace = std::chrono::seconds(1);
constexpr auto kRetry = std::chrono::milliseconds(20);

// ---- sending ----

base::Status Peers::send(int to, net::OutFrame frame) {
  Peer& peer = at(to);
  if (peer.state.load(std::memory_order_acquire) != State::kConnected) {
    return send_unconnected(to, peer, std::move(frame));
  }
  base::Status sent = peer.stream->send(std::move(frame));
  if (sent.ok() || sent.error().kind != ErrorKind::kPeerLost) return sent;
  // If the connection has just broken, rank 0 may not have reported a loss yet. Ignores the error
  // then, because calls to rank `to` fail when rank 0 reports its loss.
  const State state = peer.state;
  if (state == State::kConnected || state == State::kConnecting) return base::Unit{};
  return loss_of(to, peer);
}

base::Status Peers::send_unconnected(int to, Peer& peer, net::OutFrame frame) {
  // Checks the frame now, because an error of a queued frame could not be returned later.
  if (const base::Status fits = net::check_limits(frame); !fits.ok()) return fits;
  State state = State::kUnconnected;
  {
    std::lock_guard lock(peer.mutex);
    state = peer.state;
    if (state == State::kUnconnected) peer.state = State::kConnecting;
    if (state == State::kUnconnected || state == State::kConnecting) {
      peer.waiting.push_back(std::move(frame));
    }
  }
  if (state == State::kUnconnected) {
    loop_.post([this, to, &peer] {
      connect_on_loop({to, peer, wire::HelloPurpose::kPeer, base::deadline_after(kLongestReach)});
    });
  }
  if (state == State::kUnconnected || state == State::kConnecting) return base::Unit{};
  return state == State::kConnected ? send(to, std::move(frame)) : loss_of(to, peer);
}

// ---- connecting, on the loop ----

void Peers::connect_on_loop(const Dial& dial) {
  if (!is_wanted_on_loop(dial)) return give_up_on_loop(dial);
  Peer& peer = dial.peer;
  if (dial.purpose == wire::HelloPurpose::kPeer && peer.accepted) {
    return begin_to_send_on_loop(dial.rank, peer.accepted);
  }
  const auto on_socket = [this, dial](base::Result<net::Fd> socket) {
    if (!socket.ok()) return on_unreachable_on_loop(dial, socket.error());
    on_connected_on_loop(dial, std::move(socket.unchecked()));
  };
  const wire::Endpoint& address = peer.entry.endpoint;
  const auto connect_by_tcp = [this, &address, deadline = dial.deadline, on_socket] {
    net::connect_tcp_on_loop(loop_, address.host, address.port, deadline, on_socket);
  };
  if (address.unix_name.empty()) return connect_by_tcp();
  net::connect_unix_on_loop(loop_, address.unix_name, dial.deadline,
                            [&address, on_socket, connect_by_tcp](base::Result<net::Fd> socket) {
                              if (socket.ok() || address.host.empty()) {
                                on_socket(std::move(socket));
                              } else {
                                connect_by_tcp();
                              }
                            });
}

void Peers::on_unreachable_on_loop(const Dial& dial, const Error& error) {
  const bool is_own = error.kind == ErrorKind::kResources;
  const Error reported{
      is_own ? error.kind : ErrorKind::kPeerLost,
      fmt::format("{} cannot reach {}: {}", membership::rank_text(rank_),
                  membership::rank_text(dial.rank, name(dial.rank)), error.message),
      is_own ? rank_ : dial.rank, error.op};
  loop_.call_at(base::deadline_after(kRank0Grace), [this, dial, reported] {
    if (!is_wanted_on_loop(dial)) return give_up_on_loop(dial);
    if (dial.purpose == wire::HelloPurpose::kPeer && dial.peer.accepted) {
      return begin_to_send_on_loop(dial.rank, dial.peer.accepted);
    }
    control_.report_on_loop(dial.rank, reported);
  });
}

void Peers::on_connected_on_loop(const Dial& dial, net::Fd socket) {
  if (!is_wanted_on_loop(dial)) return give_up_on_loop(dial);  // the rank was lost meanwhile
  const net::StreamPtr stream = net::adopt_socket(loop_, socket.release());
  control_.authenticate_on_loop(
      dial.rank, dial.purpose, stream, [this, dial, stream](base::Status is) {
        if (!is.ok()) {
          // A peer that closes without a message is busy (retry) or lost (rank 0 will report it).
          const base::TimePoint next = base::deadline_after(kRetry);
          const bool may_retry = is.error().kind == ErrorKind::kPeerLost && next < dial.deadline;
          if (!may_retry) return on_unreachable_on_loop(dial, is.error());
          loop_.call_at(next, [this, dial] { connect_on_loop(dial); });
          return;
        }
        if (!is_wanted_on_loop(dial)) {
          stream->close(false);
          return give_up_on_loop(dial);
        }
        if (dial.purpose == wire::HelloPurpose::kBulk) {
          return dial.peer.stream->send_bulk_on_loop(*bulk_loop_, stream->take_socket_on_loop());
        }
        open_on_loop(dial.rank, stream);
        begin_to_send_on_loop(dial.rank, stream);
        callbacks_.on_open(dial.rank);
      });
}

void Peers::open_on_loop(int rank, const net::StreamPtr& stream) {
  stream->set_limits_on_loop(wire::Limits{});
  stream->share_memory_on_loop(callbacks_.shared_memory());
  Peer& peer = at(rank);
  stream->use_bulk_on_loop([this, rank, &peer] {
    if (!start_bulk_loop_on_loop(rank)) return;
    connect_on_loop({rank, peer, wire::HelloPurpose::kBulk, base::deadline_after(kLongestReach)});
  });
  if (peer.early_bulk.valid()) {
    stream->receive_bulk_on_loop(*bulk_loop_, std::move(peer.early_bulk));
  }
  stream->set_handler_on_loop(control_.watch_peer_on_loop(
      rank, stream,
      {[this, rank, &peer](net::InFrame frame) {
         // Drops messages of a process that has been replaced.
         if (&at(rank) == &peer) callbacks_.on_frame(rank, std::move(frame));
       },
       [this, rank, &peer](const Error&) { on_closed_on_loop(rank, peer); },
       [this, rank, &peer](const wire::FrameHeader& header) {
         return &at(rank) == &peer ? callbacks_.allocate(rank, header) : nullptr;
       }}));
}

// Sends the queued frames. Until the queue is empty, other threads append their frames to it.
void Peers::begin_to_send_on_loop(int rank, net::StreamPtr stream) {
  Peer& peer = at(rank);
  peer.stream = std::move(stream);
  for (;;) {
    std::deque<net::OutFrame> waiting;
    {
      std::lock_guard lock(peer.mutex);
      if (peer.state != State::kConnecting && peer.state != State::kUnconnected) return;
      if (peer.waiting.empty()) {
        peer.state.store(State::kConnected, std::memory_order_release);
        return;
      }
      waiting.swap(peer.waiting);
    }
    for (net::OutFrame& frame : waiting) {
      static_cast<void>(peer.stream->send(std::move(frame)));  // on_close reports errors
    }
  }
}

std::optional<Error> Peers::accept_on_loop(int rank, wire::HelloPurpose purpose,
                                           const net::StreamPtr& stream) {
  Peer& peer = at(rank);
  const Error twice{ErrorKind::kProtocol,
                    fmt::format("rank {} has connected to this rank already", rank)};
  if (purpose == wire::HelloPurpose::kBulk) {
    if (peer.early_bulk.valid() || !start_bulk_loop_on_loop(rank)) return twice;
    net::Fd socket = stream->take_socket_on_loop();
    const net::StreamPtr& sends = peer.accepted ? peer.accepted : peer.stream;
    if (!sends) {  // this rank has not read the proof on that connection yet
      peer.early_bulk = std::move(socket);
      return std::nullopt;
    }
    if (sends->receive_bulk_on_loop(*bulk_loop_, std::move(socket))) return std::nullopt;
    return twice;
  }
  if (peer.accepted) return twice;
  peer.accepted = stream;
  open_on_loop(rank, stream);
  if (peer.state == State::kUnconnected) begin_to_send_on_loop(rank, stream);
  callbacks_.on_open(rank);
  return std::nullopt;
}

bool Peers::start_bulk_loop_on_loop(int rank) {
  if (bulk_loop_) return true;
  try {
    bulk_loop_.emplace();
    bulk_loop_->post([] {  // a thread that only copies should not preempt those of small calls
      const sched_param none{};
      if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &none);
    });
  } catch (...) {
    Error error = base::current_error(ErrorKind::kResources);
    error.rank = rank_;
    control_.report_on_loop(rank, error);
  }
  return bulk_loop_.has_value();
}

void Peers::lose_on_loop(const Loss& loss) {
  Peer& peer = at(loss.rank);
  peer.accepted = nullptr;
  peer.early_bulk.reset();
  std::deque<net::OutFrame> dropped;
  std::lock_guard lock(peer.mutex);
  peer.loss = loss.error;
  peer.is_done_without = loss.job_goes_on;
  peer.state = State::kLost;
  dropped.swap(peer.waiting);
}

}  // namespace distrain::rpc

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "distrain/net/socket.h"
#include "distrain/net/stream.h"
#include "proof.h"

namespace distrain::membership {

/// For each rank, the reasons for which rank 0 refused processes that claimed to be that rank. A
/// process can claim any number and fail in many ways. To limit memory, all ranks outside the job
/// share the last entry, and an entry keeps at most eight reasons. Not thread-safe.
class Refusals {
 public:
  explicit Refusals(size_t world_size) : world_size_(world_size) {}
  /// Adds a refusal; text() will contain `text`. Returns true if `reason` is new and kept.
  bool add(int rank, const std::string& reason, std::string text) {
    Entry& entry = entries_[key(rank)];
    entry.text = std::move(text);
    return entry.reasons.size() < 8 && entry.reasons.insert(reason).second;
  }
  /// Removes the refusals of `rank`, which has joined. Refusals of ranks outside the job stay,
  /// because they may come from a missing rank that was started with a wrong number.
  void forget(int rank) { entries_.erase(key(rank)); }
  bool has(int rank) const { return entries_.contains(rank); }
  /// Returns the newest refusals of all ranks as one text, truncated to about 1000 characters.
  std::string text() const {
    std::string all;
    for (const auto& [rank, entry] : entries_) {
      if (all.size() > 1000) return all + "; and more";
      all += (all.empty() ? "" : "; ") + entry.text;
    }
    return all;
  }

 private:
  struct Entry {
    std::string text;
    std::set<std::string> reasons;
  };
  size_t key(int rank) const {
    return rank > 0 ? std::min<size_t>(rank, world_size_) : world_size_;
  }

  const size_t world_size_;
  std::map<size_t, Entry> entries_;  // by rank; the last is for ranks outside the job
};

/// Accepts connections to this rank and authenticates the peers: the responder of Note [Identity].
/// An unproved connection may send a hello and a proof, within `proof_timeout`. If too many of them
/// are open, new connections wait in the kernel's backlog, and the oldest unproved one is closed
/// 100 ms after it was accepted. Runs on the loop; listen() and close() are thread-safe.
class Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  /// A process that has proved its identity.
  struct AuthenticatedPeer {
    wire::HelloPurpose purpose = wire::HelloPurpose::kPeer;
    int rank = -1;
    uint32_t incarnation = 0;
    wire::Join join = {};  ///< set if the purpose is to join
  };
  /// The functions that the acceptor calls on the loop thread.
  struct Callbacks {
    /// Returns this rank's credentials for a purpose; nullopt refuses connections for that purpose.
    std::function<std::optional<Credentials>(wire::HelloPurpose)> credentials;
    /// Takes over the stream and sets its handler, or returns the error for which it is refused.
    std::function<std::optional<Error>(const net::StreamPtr& stream, AuthenticatedPeer peer)> admit;
    /// Called if a process that claims to be `rank` is refused before admit() is called.
    std::function<void(int rank, const net::StreamPtr& stream, Error why)> on_refused;
  };
  Acceptor(net::Loop& loop, base::Duration proof_timeout, Callbacks callbacks);

  void listen(net::Fd socket) {
    std::lock_guard lock(mutex_);
    if (is_closed_) return;
    listeners_.push_back(std::make_shared<net::Listener>(
        loop_, std::move(socket), [weak = weak_from_this()](net::Fd fd) {
          if (const auto self = weak.lock()) self->on_connection_on_loop(std::move(fd));
        }));
  }
  /// Stops listening and closes connections that have not been admitted.
  void close();

 private:
  /// The next frame that the peer must send. In kRefused, the peer may only close the connection.
  enum class Stage { kHello, kProof, kJoin, kRefused };
  struct IncomingHandshake {
    net::StreamPtr stream;
    base::TimePoint accepted_at;
    Stage stage = Stage::kHello;
    std::optional<Responder> responder;
    uint64_t timer = 0;
  };

  void on_connection_on_loop(net::Fd socket);
  void on_closed_on_loop(uint64_t number, const Error& error);
  void limit_unproved_on_loop();
  /// Removes the connection `number` and returns its stream, or null if it is already removed.
  /// on_frame_on_loop() ignores the frames of a removed connection.
  net::StreamPtr take_on_loop(uint64_t number) {
    const auto taken = handshakes_.extract(number);
    if (!taken) return nullptr;
    loop_.cancel(taken.mapped().timer);
    limit_unproved_on_loop();
    return taken.mapped().stream;
  }
  uint64_t drop_later_on_loop(uint64_t number, base::Duration timeout);
  void drop_on_loop(uint64_t number) {
    if (const net::StreamPtr stream = take_on_loop(number)) stream->close(false);
  }

  void on_frame_on_loop(uint64_t number, const net::InFrame& frame);
  void on_hello_on_loop(IncomingHandshake& handshake, const net::InFrame& frame);
  void on_proof_on_loop(uint64_t number, IncomingHandshake& handshake, const net::InFrame& frame);
  void on_join_on_loop(uint64_t number, int rank, const net::InFrame& frame);
  void admit_on_loop(const net::StreamPtr& stream, AuthenticatedPeer peer);

  void reject_on_loop(const net::StreamPtr& stream, Error why);
  /// Rejects a connection. The connection stays in `handshakes_`, so it counts toward the limit of
  /// unproved connections until it is closed.
  void refuse_on_loop(IncomingHandshake& handshake, const Error& why) {
    if (why.kind == ErrorKind::kAuth) report_on_loop(handshake, why);
    handshake.stage = Stage::kRefused;
    reject_on_loop(handshake.stream, refusal_without_reason());
  }
  void report_on_loop(const IncomingHandshake& handshake, Error why);

  net::Loop& loop_;
  const base::Duration proof_timeout_;
  const Callbacks callbacks_;
  const size_t max_unproved_;  // maximum number of unproved connections

  // Used only on the loop thread:
  std::map<uint64_t, IncomingHandshake> handshakes_;  // by number, in order of arrival
  uint64_t last_number_ = 0;
  bool is_full_ = false;
  uint64_t full_timer_ = 0;  // closes the oldest unproved connection; 0: not set

  std::mutex mutex_;
  bool is_closed_ = false;                                 // guarded by mutex_
  std::vector<std::shared_ptr<net::Listener>> listeners_;  // guarded by mutex_
};

/// Timeouts for receiving the other side's hello and proof. The second is longer, because the other
/// side admits this rank when it sends its proof, and then takes a closed connection for a loss.
struct HandshakeTimeouts {
  base::Duration hello;
  base::Duration proof;
};

/// Proves this rank's identity on a connection that it has opened, as the initiator of Note
/// [Identity]. Calls `done` once. On success, `done` gets the other side's proved hello and sets
/// the stream's handler. On failure, the stream is already closed. The caller may retry after
/// `peer_lost`: the other side closed the stream without a message or did not answer in time.
void shake_hands_on_loop(net::Loop& loop, const net::StreamPtr& stream,
                         const Credentials& credentials, wire::HelloPurpose purpose,
                         HandshakeTimeouts timeouts,
                         std::function<void(base::Result<wire::Hello> other)> done);

}  // namespace distrain::membership

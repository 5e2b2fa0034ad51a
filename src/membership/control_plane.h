#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control_protocol.h"
#include "distrain/base/future.h"
#include "handshake.h"

namespace distrain::membership {

/// A rank's membership in its job. Lets the rank join, monitors the other ranks, reports losses and
/// ends the job: see Note [Control plane] in control_protocol.h.
///
/// Runs this rank's ControlProtocol: provides its sockets and its timer, and blocks the threads
/// that wait for it. Only the loop uses the ControlProtocol and the connections.
///
/// Threads: run() blocks the joining thread. Functions without `_on_loop` are thread-safe. The loop
/// must be destroyed before the objects that the callbacks use.
class ControlPlane final : public std::enable_shared_from_this<ControlPlane>,
                           private ControlTransport {
 public:
  /// The functions that the control plane calls on the loop thread.
  struct Callbacks {
    /// Called with the endpoint of each rank. This rank connects to the unix socket `unix_name` of
    /// an endpoint if that is set, otherwise by TCP. An endpoint without `host` has no TCP address.
    std::function<void(const wire::Directory& directory)> on_directory;
    /// Called once, when every rank accepts calls. An exception ends the job for all ranks.
    std::function<void(std::vector<std::string> names, std::vector<wire::RankDevices> devices)>
        on_go;
    /// Called if this rank fails to join: instead of on_go(), or after on_go() has thrown.
    std::function<void(const base::Error& error)> on_failed;
    std::function<void(const Loss& loss)> on_lost;
    /// Called before on_returned(), with the devices of the new process of `rank`. Throws if these
    /// devices do not fit those of the other ranks.
    std::function<void(int rank, const wire::RankDevices& devices)> on_new_devices;
    /// Called when a new process has replaced a lost rank. `entry` is its new directory entry.
    std::function<void(int rank, const wire::Directory::Entry& entry)> on_returned;
    /// Called when another rank has connected for `purpose`, kPeer or kBulk. Returns an error to
    /// refuse the connection.
    std::function<std::optional<base::Error>(int rank, wire::HelloPurpose purpose,
                                             const net::StreamPtr& stream)>
        on_peer;
  };
  /// On rank 0, also binds the listening socket.
  ControlPlane(net::Loop& loop, const Options& options, Callbacks callbacks);
  /// Joins the job; returns when every rank accepts calls, or throws. When rank 0's options are
  /// known and before other ranks can call this rank, gets this rank's devices from `prepare`.
  void run(const std::function<wire::RankDevices()>& prepare);
  /// Called instead of run() by a process without a rank. Returns a free rank, which rank 0
  /// reserves until this process has joined or calls close(). Retries until the join timeout.
  int reserve_rank() {
    begin_once();
    began_ = base::Clock::now();
    begin_as_member(base::deadline_after(options_.join_timeout));
    return assigned_rank_;
  }
  /// Returns true if rank 0 has admitted this rank. run() may still wait for other ranks.
  bool is_admitted() const { return assigned_rank_ != wire::kUnassignedRank; }
  uint16_t port() const { return port_; }
  /// Enters the shutdown round `round`, a barrier of all ranks. The result is the sum of all ranks'
  /// `number`. Fails if a rank is lost, or if this rank has not joined or has left.
  base::Future<uint64_t> enter_round(uint64_t round, uint64_t number);
  /// Returns the ranks that this rank waits for, as far as it knows. Blocks until the loop answers.
  std::vector<int> missing();
  /// Returns the join or shutdown that is waiting for other ranks, if any.
  std::optional<Wait> wait();
  /// Sends `error` to all connected ranks as the reason that this rank exits, then disconnects.
  void abort(const base::Error& error);
  /// Notifies all connected ranks that this rank exits because its work is done, then disconnects.
  void leave() {
    loop_.post([self = shared_from_this()] {
      if (self->protocol_) self->protocol_->leave();
    });
  }
  /// Closes all connections and refuses new ones.
  void close();
  /// Called on rank 0. Sets the tolerated losses; the future completes when they are in effect.
  base::Future<void> tolerate(Tolerance tolerance);
  /// Called on rank 0 when the new process of `rank` has done useful work. Until this call, the job
  /// continues after any failure of that process.
  void note_of_use(int rank) {
    loop_.post([self = shared_from_this(), rank] {
      if (self->coordinator_) self->coordinator_->note_of_use(rank);
    });
  }
  /// Waits until all streams are closed, for one second at most, because the loop drops unsent
  /// messages when it ends.
  void wait_until_flushed() {
    std::unique_lock lock(mutex_);
    stream_closed_.wait_for(lock, std::chrono::seconds(1), [this] { return open_streams_ == 0; });
  }

  // The following functions handle connections for calls. They must run on the loop thread.

  /// Monitors the connection to `rank`. Returns the handler to set on `stream`, which passes calls
  /// to `handler`.
  net::Stream::Handler watch_peer_on_loop(int rank, const net::StreamPtr& stream,
                                          net::Stream::Handler handler);
  /// Returns true while this rank suspects that `rank` is lost, until rank 0 has decided.
  bool is_suspected_on_loop(int rank) const { return protocol_ && protocol_->is_suspected(rank); }
  /// Reports to rank 0 that `rank` is unreachable or has sent malformed data.
  void report_on_loop(int rank, Error error) {
    if (protocol_) protocol_->report(rank, std::move(error));
  }
  /// Runs shake_hands_on_loop() with `rank` on a connection that this rank has opened for
  /// `purpose`, kPeer or kBulk, and checks that the newest process of `rank` has answered.
  void authenticate_on_loop(int rank, wire::HelloPurpose purpose, const net::StreamPtr& stream,
                            std::function<void(base::Status believed)> done);

 private:
  // Implements ControlTransport for `protocol_`:
  void send(Link link, Message message) override;
  void close(Link link, bool flush) override {
    if (const auto taken = streams_.extract(link)) taken.mapped()->close(flush);
  }
  void on_joined(int rank) override {
    assigned_rank_ = rank;
    finish_joining_on_loop(base::Unit{});
  }
  void on_directory(const wire::Directory& directory) override;
  void on_go(std::vector<wire::RankDevices> devices) override;
  void on_failed(const Error& error) override;
  void on_lost(const Loss& loss) override {
    callbacks_.on_lost(loss);
    if (!loss.job_goes_on) fail_rounds_on_loop(loss.error);
  }
  void on_returned(int rank, const wire::RankDevices& devices) override;
  void on_round(uint64_t, uint64_t sum) override {
    if (auto round = take_round_on_loop()) round->set(sum);
  }

  Link add_on_loop(const net::StreamPtr& stream) {
    {
      std::lock_guard lock(mutex_);
      ++open_streams_;
    }
    streams_[++last_link_] = stream;
    beat_on_loop();
    return last_link_;
  }
  void note_closed_on_loop() {
    std::lock_guard lock(mutex_);
    --open_streams_;
    stream_closed_.notify_all();
  }
  void begin_once() {
    if (!has_begun_.exchange(true)) return;
    base::invalid(rank_text(options_.rank) +
                  " has begun to join already: make a new agent to retry");
  }
  void begin_as_coordinator();
  void begin_as_member(base::TimePoint deadline);
  void listen_as_member(const net::Fd& to_rank_0);
  base::Status try_to_join(base::TimePoint connected_by, base::TimePoint deadline);
  void meet_rank_0_on_loop(const net::StreamPtr& stream, base::Promise<void> met);
  base::Status join_on_loop(const net::StreamPtr& stream, const wire::Hello& rank_0);
  void finish_joining_on_loop(const base::Status& joined) {
    if (auto joining = std::exchange(joining_, std::nullopt)) joining->complete(joined);
  }
  bool is_put_off_on_loop(const Error& error) const;
  void listen_by_unix_socket() {
    if (unix_name_.empty()) return;
    base::Result<net::Fd> socket = net::listen_unix(unix_name_);
    if (socket.ok()) return acceptor_->listen(std::move(socket.unchecked()));
    if (!options_.rank_0_unix_name.empty()) throw Exception(socket.error());  // otherwise, uses TCP
  }
  /// Returns the name of this host's unix socket for joining; empty if unused.
  std::string meeting_name() const {
    if (host_key_.empty() || !options_.rank_0_unix_name.empty()) return {};
    return options_.meeting_name.empty()
               ? membership::meeting_name(options_.job_id, options_.master_addr,
                                          options_.rank == 0 ? port_ : options_.master_port)
               : options_.meeting_name;
  }
  base::Result<net::Fd> connect_to_rank_0(base::TimePoint connected_by) const;
  void wait_until_ready(base::TimePoint deadline,
                        const std::function<wire::RankDevices()>& prepare);
  ControlSettings settings() const;
  HandshakeTimeouts handshake_timeouts() const;
  Error left_already() const {
    return {ErrorKind::kCancelled, "this rank has left the job already", options_.rank, "shutdown"};
  }
  std::optional<base::Promise<uint64_t>> take_round_on_loop() {
    round_began_ = base::TimePoint{};
    return std::exchange(round_, std::nullopt);
  }
  // Fails the current shutdown round and all later ones.
  void fail_rounds_on_loop(const Error& error) {
    if (!rounds_failed_) rounds_failed_ = error;
    if (auto round = take_round_on_loop()) round->fail(*rounds_failed_);
  }
  std::string why_missing(std::vector<int> ranks);
  std::string rank_0_text() const {
    if (!options_.rank_0_unix_name.empty()) return options_.rank_0_unix_name;
    return net::endpoint_text(options_.master_addr,
                              options_.rank == 0 ? port_ : options_.master_port);
  }
  wire::Directory::Entry reachable(int rank, wire::Directory::Entry entry) const;

  // Sends due heartbeats between handshakes: on a busy machine, one round of the loop with hundreds
  // of handshakes may take seconds.
  void beat_on_loop() {
    if (protocol_) protocol_->beat(base::Clock::now());
  }
  std::optional<Credentials> credentials_on_loop(wire::HelloPurpose purpose) {
    beat_on_loop();
    if (!protocol_) return std::nullopt;
    if (purpose == wire::HelloPurpose::kJoin) return Credentials{identity_, options_.token};
    if (protocol_->secret().empty()) return std::nullopt;
    return Credentials{identity_, protocol_->secret() + options_.token};
  }
  std::optional<Error> admit_on_loop(const net::StreamPtr& stream,
                                     Acceptor::AuthenticatedPeer peer);
  std::optional<Error> admit_member_on_loop(const net::StreamPtr& stream,
                                            Acceptor::AuthenticatedPeer& peer);
  std::optional<Error> reserve_rank_on_loop(const net::StreamPtr& stream, const wire::Join& join);
  void note_refused_on_loop(int rank, const net::StreamPtr& stream, Error why);
  void receive_on_loop(Link link, const net::InFrame& frame) {
    if (!protocol_) return;
    protocol_->receive(link, {frame.header.kind, frame.header.call_id, frame.header.context_id,
                              wire::Bytes(frame.meta.begin(), frame.meta.end())});
  }
  net::Stream::Handler watched(Link link, net::Stream::Handler handler) {
    handler.on_close = [self = shared_from_this(), link,
                        also = std::move(handler.on_close)](const Error& error) {
      self->streams_.erase(link);
      if (self->protocol_) self->protocol_->closed(link, error);
      if (also) also(error);
      self->note_closed_on_loop();
    };
    return handler;
  }
  net::Stream::Handler control_handler(Link link) {
    return watched(link, {[weak = weak_from_this(), link](const net::InFrame& frame) {
                            if (const auto self = weak.lock()) self->receive_on_loop(link, frame);
                          },
                          {}});
  }
  void begin_on_loop(std::unique_ptr<ControlProtocol> protocol) {
    protocol_ = std::move(protocol);
    tick_on_loop(++attempt_);
  }
  void tick_on_loop(uint64_t attempt);

  net::Loop& loop_;
  const Options& options_;
  const Callbacks callbacks_;
  wire::RankDevices own_devices_;  // joining thread only
  const std::string host_key_;
  const std::string unix_name_;
  const std::shared_ptr<Acceptor> acceptor_;
  uint16_t port_ = 0;
  net::Fd rank_0_socket_;    // rank 0's listening socket, until run()
  net::Fd meeting_socket_;   // rank 0's listening socket for ranks of this host, until run()
  std::string hint_;         // on rank 0: why other hosts cannot reach it; may be empty
  std::string rank_0_host_;  // the numeric address at which this rank reaches rank 0
  bool listens_ = false;     // this member has opened its listening sockets
  std::string listen_host_;  // numeric, sent to other ranks; if empty, they use what rank 0 sees

  const Identity initial_identity_;  // this rank's identity before it has met rank 0

  // Used only on the loop thread:
  Identity identity_;  // with rank 0's job id and generation, once rank 0 has proved itself
  std::unique_ptr<ControlProtocol> protocol_;  // null before joining and after close()
  uint64_t attempt_ = 0;                // number of protocol_: each attempt to join makes one
  Coordinator* coordinator_ = nullptr;  // on rank 0: points to *protocol_
  net::StreamPtr joining_stream_;       // stream to rank 0, until rank 0 has proved itself
  std::optional<base::Promise<void>> joining_;  // done when rank 0 admits this rank
  std::map<Link, net::StreamPtr> streams_;
  Link last_link_ = 0;
  bool is_leaving_ = false;                       // abort() or close() was called
  bool is_closed_ = false;                        // joining has failed or close() was called
  std::map<int, std::string> seen_hosts_;         // on rank 0: from where ranks connected
  std::optional<base::Promise<uint64_t>> round_;  // the current shutdown round
  std::optional<Error> rounds_failed_;            // the error of all later rounds

  std::atomic<bool> has_begun_{false};
  std::atomic<int> cpu_sharers_{1};             // number of ranks on this rank's CPUs
  std::atomic<base::TimePoint> began_{};        // when this rank began to wait for others to join
  std::atomic<base::TimePoint> round_began_{};  // when it entered the shutdown round; 0: none
  std::atomic<int> assigned_rank_{wire::kUnassignedRank};  // the rank that rank 0 has assigned
  base::Promise<void> directory_known_;
  base::Promise<void> ready_;

  std::mutex mutex_;
  Refusals refusals_;     // guarded by mutex_
  int open_streams_ = 0;  // guarded by mutex_
  std::condition_variable stream_closed_;
};

}  // namespace distrain::membership

#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "control/doorway.h"
#include "control/hub.h"
#include "control/introduction.h"
#include "distrain/base/future.h"
#include "distrain/net/socket.h"
#include "distrain/net/stream.h"
#include "distrain/rpc/agent.h"

namespace distrain::rpc {

class DeviceTable;

/// How this rank connects to another one.
struct Way {
  std::string unix_name;  ///< if not empty, this unix socket is used first
  std::string host;       ///< numeric; empty: TCP is not used
  uint16_t port = 0;
};

/// Runs this rank's control::Party: provides its sockets, its timer and the threads that wait for
/// it. The protocol is in wire/handshake.h.
///
/// Threads: run() blocks the joining thread; the party and all connections belong to the loop.
/// Functions without `_on_loop` are for any thread.
class ControlPlane final : public std::enable_shared_from_this<ControlPlane>,
                           private control::World {
 public:
  /// Called on the loop.
  struct Callbacks {
    std::function<void(const wire::Directory& directory, std::vector<Way> ways)> on_directory;
    std::function<void(const Loss& loss)> on_lost;
    /// Called when a new process has replaced a lost rank.
    std::function<void(int rank, uint32_t incarnation, Way way)> on_returned;
    /// Called when another rank has connected for calls. Returns an error to refuse it.
    std::function<std::optional<base::Error>(int rank, const net::StreamPtr& stream)> on_peer;
  };

  /// Rank 0 binds its socket here.
  ControlPlane(net::Loop& loop, const AgentOptions& options, DeviceTable& devices,
               Callbacks callbacks);

  /// Returns when every rank can be called, otherwise throws. `prepare` is called when rank 0's
  /// options are known, before any other rank can call this one.
  void run(const std::function<void()>& prepare);
  /// Called instead of run() if options.rank is wire::kAnyRank: returns a free rank, which rank 0
  /// reserves until this process has joined or close() is called. Retries until the join timeout.
  int ask_for_place();
  /// Returns true when rank 0 has admitted this rank, which then waits for the others.
  bool has_place() const { return place_ != wire::kAnyRank; }
  uint16_t port() const { return port_; }

  /// Enters `round` of the end. The result is the sum of all ranks' `number`, once all have
  /// entered. Fails if a rank is lost, or if this rank has not joined or has ended.
  base::Future<uint64_t> enter_round(uint64_t round, uint64_t number);
  /// Returns the ranks that this one waits for, as far as it knows. Not on the loop.
  std::vector<int> missing();
  /// Returns the wait for ranks to join or to end, if there is one.
  std::optional<Wait> wait();

  /// Tells all ranks why this one leaves, then closes the connections.
  void abort(const base::Error& error);
  /// Does the same with no error.
  void leave();
  /// Closes all connections and refuses new ones.
  void close();
  /// Rank 0: sets the tolerated losses. The result is complete when they are in effect.
  base::Future<void> tolerate(control::Tolerance tolerance);
  /// Rank 0: no longer tolerates all failures of the new process of `rank`.
  void note_of_use(int rank);
  /// Waits until the last messages are sent, for a second at most.
  void wait_until_flushed();

  // ---- connections for calls, on the loop ----

  /// Monitors the other end. Returns the stream's new handler, which passes calls to `handler`.
  net::Stream::Handler watch_peer_on_loop(int rank, const net::StreamPtr& stream,
                                          net::Stream::Handler handler);
  /// Returns true if `rank` seems lost and rank 0 has not decided yet.
  bool is_suspected_on_loop(int rank) const { return party_ && party_->is_suspected(rank); }
  /// Reports that `rank` cannot be reached, or that it has sent malformed data.
  void report_on_loop(int rank, base::Error error);
  /// Runs the handshake with `rank` on a connection that this rank has made for calls. `done` is
  /// called as Introduction::Done.
  void introduce_on_loop(int rank, const net::StreamPtr& stream,
                         std::function<void(base::Status believed)> done);

 private:
  // control::World
  void send(control::Link link, control::Message message) override;
  void close(control::Link link, bool flush) override;
  void on_joined(int rank) override;
  void on_directory(const wire::Directory& directory) override;
  void on_go(std::vector<wire::RankDevices> devices) override;
  void on_failed(const base::Error& error) override;
  void on_lost(const Loss& loss) override;
  void on_returned(int rank, const wire::RankDevices& devices) override;
  void on_round(uint64_t round, uint64_t sum) override;

  void begin_once();
  void begin_as_hub();
  /// Returns the promise of the current round of the end, if there is one.
  std::optional<base::Promise<uint64_t>> take_round();
  /// Fails the current round and all later ones.
  void end_rounds(const base::Error& error);
  void begin_as_member(base::TimePoint deadline);
  void listen_as_member(const net::Fd& to_rank_0);
  base::Status try_to_join(base::TimePoint connected_by, base::TimePoint deadline);
  void meet_rank_0_on_loop(const net::StreamPtr& stream, base::Promise<void> met);
  base::Status join_on_loop(const net::StreamPtr& stream, const wire::Hello& rank_0);
  void end_joining_on_loop(const base::Status& joined);
  bool is_put_off_on_loop(const base::Error& error) const;
  void listen_by_unix_socket();
  std::string meeting_name() const;
  base::Result<net::Fd> connect_to_rank_0(base::TimePoint connected_by) const;
  void wait_until_ready(base::TimePoint deadline, const std::function<void()>& prepare);
  control::Settings settings() const;
  control::Introduction::Patience patience() const;
  base::Error left_already() const;
  std::string why_missing(std::vector<int> ranks);
  std::string rank_0_text() const;
  Way way_to(int rank, const wire::Endpoint& endpoint) const;

  std::optional<identity::Credentials> credentials_on_loop(wire::HelloPurpose purpose) const;
  std::optional<base::Error> admit_on_loop(const net::StreamPtr& stream,
                                           control::Doorway::Visitor visitor);
  std::optional<base::Error> admit_member_on_loop(const net::StreamPtr& stream,
                                                  control::Doorway::Visitor& visitor);
  std::optional<base::Error> keep_place_on_loop(const net::StreamPtr& stream,
                                                const wire::Join& join);
  void note_refused_on_loop(int rank, const net::StreamPtr& stream, base::Error why);
  control::Link hold_on_loop(const net::StreamPtr& stream);
  void let_go_on_loop(control::Link link);
  void receive_on_loop(control::Link link, const net::InFrame& frame);
  net::Stream::Handler watched(control::Link link, net::Stream::Handler handler);
  net::Stream::Handler control_handler(control::Link link);
  void begin_on_loop(std::unique_ptr<control::Party> party);
  void tick_on_loop(uint64_t party);

  net::Loop& loop_;
  const AgentOptions& options_;
  DeviceTable& devices_;
  const Callbacks callbacks_;
  const std::string host_key_;
  const std::string unix_name_;
  const std::shared_ptr<control::Doorway> doorway_;
  uint16_t port_ = 0;
  net::Fd rank_0_socket_;    // rank 0, until run()
  net::Fd meeting_socket_;   // likewise, for ranks of this host
  std::string hint_;         // rank 0: why other hosts cannot reach it, if they cannot
  std::string rank_0_host_;  // as this rank reaches it, numeric; set before party_
  bool listens_ = false;     // a member accepts connections
  std::string listen_host_;  // sent to others, numeric; empty: the address that rank 0 sees

  const identity::Self told_;  // this rank's identity before it has met rank 0

  // Loop thread only.
  identity::Self self_;  // with rank 0's job id and generation, once rank 0 has proved itself
  std::unique_ptr<control::Party> party_;  // from joining until the end
  uint64_t parties_ = 0;                   // number of parties so far: joining may take several
  control::Hub* hub_ = nullptr;            // rank 0: party_
  net::StreamPtr meeting_;                 // to rank 0, until it has proved itself
  std::optional<base::Promise<void>> joining_;  // until rank 0 has admitted this rank
  std::map<control::Link, net::StreamPtr> streams_;
  control::Link next_link_ = 1;
  bool is_leaving_ = false;                // abort() was called
  bool is_closed_ = false;                 // no party exists, nor will exist
  std::map<int, std::string> seen_hosts_;  // rank 0: addresses of other ranks

  std::atomic<bool> has_begun_{false};
  std::atomic<int> cpu_sharers_{1};         // ranks with the same CPUs as this one
  std::atomic<base::TimePoint> began_{};    // since when this rank waits for others to join
  std::atomic<int> place_{wire::kAnyRank};  // the rank that rank 0 has assigned
  base::Promise<void> met_;
  base::Promise<void> ready_;

  std::mutex mutex_;
  control::Refusals refusals_;  // guarded by mutex_
  std::condition_variable stream_closed_;
  int open_streams_ = 0;                          // guarded by mutex_
  std::optional<base::Promise<uint64_t>> round_;  // guarded by mutex_: the current one
  base::TimePoint round_began_{};                 // guarded by mutex_
  std::optional<base::Error> failed_;             // guarded by mutex_: fails all rounds
};

}  // namespace distrain::rpc

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

/// How this rank reaches another one.
struct Way {
  std::string unix_name;  ///< not empty: by this unix socket, else by TCP
  std::string host;       ///< numeric; empty: not by TCP
  uint16_t port = 0;
};

/// What carries the events of this rank's control::Party: its sockets, its timer, the threads that
/// wait. The exchange is in wire/handshake.h.
///
/// Threads: run() blocks the joining thread, enter_round() gives back a future; the party and all
/// connections are the loop's. Functions without `_on_loop` are for any thread.
class ControlPlane final : public std::enable_shared_from_this<ControlPlane>,
                           private control::World {
 public:
  /// What is told on the loop.
  struct Callbacks {
    std::function<void(const wire::Directory& directory, std::vector<Way> ways)> on_directory;
    std::function<void(const Loss& loss)> on_lost;
    /// A rank that was lost is there again, in a new process.
    std::function<void(int rank, uint32_t incarnation, Way way)> on_returned;
    /// A connection for calls that another rank has made; gives back why it is not wanted.
    std::function<std::optional<base::Error>(int rank, const net::StreamPtr& stream)> on_peer;
  };

  /// Rank 0 binds its socket here.
  ControlPlane(net::Loop& loop, const AgentOptions& options, DeviceTable& devices,
               Callbacks callbacks);

  /// Returns when every rank can be called. Throws otherwise. `prepare` is called when rank 0's
  /// options are known, before any other rank can call this one.
  void run(const std::function<void()>& prepare);
  /// Instead of run(), where options.rank is wire::kAnyRank: asks rank 0, until the join timeout,
  /// for a rank that nobody else is. It is kept for this process until close(), or until it joins.
  int ask_for_place();
  /// Rank 0 has a place for this rank, which then waits for the others.
  bool has_place() const { return place_ != wire::kAnyRank; }
  uint16_t port() const { return port_; }

  /// This rank comes to `round` of the end; the sum of all ranks' numbers once all have. Fails when
  /// a rank is lost, and when this one is not there, or not any more.
  base::Future<uint64_t> enter_round(uint64_t round, uint64_t number);
  /// Ranks that this one waits for, as far as it knows; not on the loop.
  std::vector<int> missing();
  /// For ranks that are to join, or to end.
  std::optional<Wait> wait();

  /// This rank leaves, and tells all others why. Its connections are closed behind that.
  void abort(const base::Error& error);
  /// The same, as all is done.
  void leave();
  /// Closes what is open, and lets nobody in any more.
  void close();
  /// Rank 0: who may be lost from now on. Done when that holds.
  base::Future<void> tolerate(control::Tolerance tolerance);
  /// Rank 0: one that came in the midst of the job does its part.
  void note_of_use(int rank);
  /// Until what was said last has gone out, for a second at most.
  void wait_until_flushed();

  // ---- connections for calls, on the loop ----

  /// From here on the other end is watched, with what is given back as the stream's handler, which
  /// leaves to `handler` what calls are made of.
  net::Stream::Handler watch_peer_on_loop(int rank, const net::StreamPtr& stream,
                                          net::Stream::Handler handler);
  /// It seems lost, and if it is that is about to be told.
  bool is_suspected_on_loop(int rank) const { return party_ && party_->is_suspected(rank); }
  /// It cannot be reached, or what it says cannot be read.
  void report_on_loop(int rank, base::Error error);
  /// Proves to `rank`, on a connection that this rank has made for calls, who this one is, and has
  /// it proved. `done` as Introduction's.
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
  /// The promise of the round of the end that is under way, if one is.
  std::optional<base::Promise<uint64_t>> take_round();
  /// Fails that one, and all that come.
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
  net::Fd meeting_socket_;   // the same, for ranks of this host
  std::string hint_;         // rank 0: why ranks on other hosts cannot reach it, if so
  std::string rank_0_host_;  // as this rank reaches it, numeric; set before the party is there
  bool listens_ = false;     // a member, to others
  std::string listen_host_;  // to be told to others, numeric; empty: as rank 0 sees it

  const identity::Self told_;  // of this rank, before it has met rank 0

  // Loop thread only.
  identity::Self self_;  // its job's number and generation are rank 0's once that has proved itself
  std::unique_ptr<control::Party> party_;       // from the joining on, until the end
  uint64_t parties_ = 0;                        // there have been: it may take several to join
  control::Hub* hub_ = nullptr;                 // rank 0: the same
  net::StreamPtr meeting_;                      // to rank 0, until that has proved itself
  std::optional<base::Promise<void>> joining_;  // until rank 0 has a place for this rank
  std::map<control::Link, net::StreamPtr> streams_;
  control::Link next_link_ = 1;
  bool is_leaving_ = false;                // it has been told to
  bool is_closed_ = false;                 // there is no party any more, nor will there be
  std::map<int, std::string> seen_hosts_;  // rank 0: where others came from

  std::atomic<bool> has_begun_{false};
  std::atomic<int> cpu_sharers_{1};         // ranks that share this one's CPUs, once all are known
  std::atomic<base::TimePoint> began_{};    // to wait for others to join
  std::atomic<int> place_{wire::kAnyRank};  // the rank that rank 0 has for this one
  base::Promise<void> met_;
  base::Promise<void> ready_;

  std::mutex mutex_;
  control::Refusals refusals_;  // by mutex_
  std::condition_variable stream_closed_;
  int open_streams_ = 0;                          // by mutex_
  std::optional<base::Promise<uint64_t>> round_;  // by mutex_: the one under way
  base::TimePoint round_began_{};                 // by mutex_
  std::optional<base::Error> failed_;             // by mutex_: no round ends any more
};

}  // namespace distrain::rpc

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
#include "distrain/membership/control_plane.h"
#include "handshake.h"

namespace distrain::membership {

/// Runs this rank's ControlProtocol: provides its sockets and its timer, and blocks the threads
/// that wait for it. Only the loop uses the ControlProtocol and the connections.
class ControlPlaneImpl final : public ControlPlane,
                               public std::enable_shared_from_this<ControlPlaneImpl>,
                               private ControlTransport {
 public:
  ControlPlaneImpl(net::Loop& loop, const Options& options, Callbacks callbacks);

  void run(const std::function<wire::RankDevices()>& prepare) override;
  int reserve_rank() override;
  bool is_admitted() const override { return assigned_rank_ != wire::kUnassignedRank; }
  uint16_t port() const override { return port_; }
  base::Future<uint64_t> enter_round(uint64_t round, uint64_t number) override;
  std::vector<int> missing() override;
  std::optional<Wait> wait() override;
  void abort(const Error& error) override;
  void leave() override;
  void close() override;
  base::Future<void> tolerate(Tolerance tolerance) override;
  void note_of_use(int rank) override;
  void wait_until_flushed() override;
  net::Stream::Handler watch_peer_on_loop(int rank, const net::StreamPtr& stream,
                                          net::Stream::Handler handler) override;
  bool is_suspected_on_loop(int rank) const override {
    return protocol_ && protocol_->is_suspected(rank);
  }
  void report_on_loop(int rank, Error error) override {
    if (protocol_) protocol_->report(rank, std::move(error));
  }
  void authenticate_on_loop(int rank, const net::StreamPtr& stream,
                            std::function<void(base::Status believed)> done) override;

 private:
  // Implements ControlTransport for `protocol_`:
  void send(Link link, Message message) override;
  void close(Link link, bool flush) override;
  void on_joined(int rank) override;
  void on_directory(const wire::Directory& directory) override;
  void on_go(std::vector<wire::RankDevices> devices) override;
  void on_failed(const Error& error) override;
  void on_lost(const Loss& loss) override;
  void on_returned(int rank, const wire::RankDevices& devices) override;
  void on_round(uint64_t round, uint64_t sum) override;

  Link add_on_loop(const net::StreamPtr& stream);
  void note_closed_on_loop();
  void begin_once();
  void begin_as_coordinator();
  void begin_as_member(base::TimePoint deadline);
  void listen_as_member(const net::Fd& to_rank_0);
  base::Status try_to_join(base::TimePoint connected_by, base::TimePoint deadline);
  void meet_rank_0_on_loop(const net::StreamPtr& stream, base::Promise<void> met);
  base::Status join_on_loop(const net::StreamPtr& stream, const wire::Hello& rank_0);
  void finish_joining_on_loop(const base::Status& joined);
  bool is_put_off_on_loop(const Error& error) const;
  void listen_by_unix_socket();
  std::string meeting_name() const;
  base::Result<net::Fd> connect_to_rank_0(base::TimePoint connected_by) const;
  void wait_until_ready(base::TimePoint deadline,
                        const std::function<wire::RankDevices()>& prepare);
  ControlSettings settings() const;
  HandshakeTimeouts handshake_timeouts() const;
  Error left_already() const;
  std::optional<base::Promise<uint64_t>> take_round_on_loop();
  void fail_rounds_on_loop(const Error& error);
  std::string why_missing(std::vector<int> ranks);
  std::string rank_0_text() const;
  wire::Directory::Entry reachable(int rank, wire::Directory::Entry entry) const;

  std::optional<Credentials> credentials_on_loop(wire::HelloPurpose purpose) const;
  std::optional<Error> admit_on_loop(const net::StreamPtr& stream,
                                     Acceptor::AuthenticatedPeer peer);
  std::optional<Error> admit_member_on_loop(const net::StreamPtr& stream,
                                            Acceptor::AuthenticatedPeer& peer);
  std::optional<Error> reserve_rank_on_loop(const net::StreamPtr& stream, const wire::Join& join);
  void note_refused_on_loop(int rank, const net::StreamPtr& stream, Error why);
  void receive_on_loop(Link link, const net::InFrame& frame);
  net::Stream::Handler watched(Link link, net::Stream::Handler handler);
  net::Stream::Handler control_handler(Link link);
  void begin_on_loop(std::unique_ptr<ControlProtocol> protocol);
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

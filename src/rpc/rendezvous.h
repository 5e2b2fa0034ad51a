#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/base/temporary_path.h"
#include "distrain/net/socket.h"
#include "distrain/net/stream.h"
#include "distrain/rpc/agent.h"
#include "distrain/wire/handshake.h"

namespace distrain::rpc {

class DeviceTable;

/// Brings the ranks of a job together: the exchange is written down in wire/handshake.h.
///
/// Threads: run() blocks the joining thread; all messages are handled on the loop. What both touch
/// is under one mutex, which is never held while a handler of ours or a stream is called back.
/// States of a rank: meeting (waits for the directory; rank 0: for all to join) → meshing (waits
/// for the streams to all peers; rank 0: for everybody's) → ready, or failed from either.
class Rendezvous : public std::enable_shared_from_this<Rendezvous> {
 public:
  /// Told on the loop thread of the stream to a peer; gives back what handles its frames.
  using InstallPeer = std::function<net::Stream::Handler(int rank, net::StreamPtr stream)>;
  /// Told on the loop thread once the ranks are known, before any InstallPeer.
  using OnDirectory = std::function<void(const wire::Directory&)>;

  /// Rank 0 binds its socket here.
  Rendezvous(net::Loop& loop, const AgentOptions& options, OnDirectory on_directory,
             InstallPeer install_peer, DeviceTable& devices);
  ~Rendezvous();

  /// Returns when every rank is connected to every other one. Throws otherwise. `prepare` is called
  /// when rank 0's options are known, before this rank lets any other begin.
  void run(const std::function<void()>& prepare);
  uint16_t port() const { return port_; }

  /// A peer refused this rank, or its stream broke, before all were ready. On any thread.
  void fail(base::Error error);

  /// Until all ranks are there, for those that are not. On any thread.
  std::optional<Wait> wait() const;

  /// Stops accepting; strangers are cut off. To be called before the loop ends.
  void close();

 private:
  enum class State { kMeeting, kMeshing, kReady, kFailed };
  struct Joined {
    net::StreamPtr stream;
    wire::Hello hello;
    std::optional<wire::RankDevices> mesh_ready;  ///< with its devices
  };

  void listen_unix();
  void listen_for_peers(const std::string& host);
  net::Listener* add_listener(net::Fd socket);
  void join_master(base::TimePoint deadline);
  void wait_until_ready(base::TimePoint deadline, const std::function<void()>& prepare);
  wire::Endpoint own_endpoint() const;
  std::string master_text() const;

  void on_stranger_on_loop(net::Fd socket);
  void on_hello_on_loop(const net::StreamPtr& stream, const net::InFrame& frame);
  std::optional<base::Error> check_hello_locked(const wire::Hello& hello) const;
  void on_join_on_loop(const net::StreamPtr& stream, wire::Hello hello);
  void on_joiner_frame_on_loop(int rank, const net::InFrame& frame);
  void on_joiner_gone_on_loop(int rank, const base::Error& error);
  void on_master_frame_on_loop(const net::InFrame& frame);
  void on_directory_on_loop(wire::Directory directory);
  void connect_to_lower_ranks(base::TimePoint deadline);
  net::Fd connect_to_rank(int rank, const wire::Endpoint& peer, base::TimePoint deadline);
  void accept_peer_on_loop(const net::StreamPtr& stream, int rank);
  void send_directory_on_loop();
  void check_mesh_on_loop();
  std::vector<int> missing() const;
  void on_go_on_loop(std::span<const uint8_t> body);
  void learn_devices_on_loop(std::vector<wire::RankDevices> devices);

  net::Loop& loop_;
  const AgentOptions& options_;
  const OnDirectory on_directory_;
  const InstallPeer install_peer_;
  DeviceTable& devices_;
  const std::string host_key_;
  uint16_t port_ = 0;
  base::TemporaryPath unix_dir_;
  std::string unix_path_;
  net::Fd master_socket_;  // rank 0, until run()

  std::atomic<base::TimePoint> began_{};  // run()
  mutable std::mutex mutex_;
  State state_ = State::kMeeting;                            // by mutex_
  std::map<int, Joined> joined_;                             // rank 0
  std::optional<wire::Directory> directory_;                 // by mutex_
  std::set<int> peers_;                                      // by mutex_: streams that stand
  std::vector<std::pair<net::StreamPtr, int>> early_peers_;  // came before the directory
  net::StreamPtr master_;                                    // rank r's joining connection
  bool mesh_reported_ = false;
  std::vector<std::unique_ptr<net::Listener>> listeners_;
  base::Promise<void> met_;  // rank r: the directory is there
  base::Promise<void> ready_;
};

}  // namespace distrain::rpc

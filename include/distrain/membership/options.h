#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "distrain/net/socket.h"

namespace distrain::membership {

/// How a rank meets the other ranks of its job.
struct Contact {
  int rank = 0;        ///< wire::kUnassignedRank: rank 0 chooses one; not for an Agent
  int world_size = 0;  ///< other ranks: must equal rank 0's; 0: any
  std::string master_addr = "localhost";  ///< where rank 0 listens
  uint16_t master_port = 0;               ///< rank 0 only: 0 takes any free one
  int listen_fd = -1;                     ///< rank 0: a socket that is already listening
  std::string listen_addr;  ///< address to bind; empty: master_addr, or the interface towards it
  /// If not empty, all ranks are on this host and meet at rank 0's unix socket of this name, and no
  /// rank listens on TCP. Rank 0's `listen_fd`, if set, is that socket.
  std::string rank_0_unix_name;
  /// Name of the unix socket at which ranks of the same user on rank 0's host try to join before
  /// they use TCP (see meeting_name()). Unused if `transport` is tcp. If empty, the name is
  /// derived from job_id, master_addr and the port.
  std::string meeting_name;
  net::PortRange ports;            ///< to listen on; rank 0: if master_port is 0
  std::string transport = "auto";  ///< auto (unix on the same host), tcp, unix
  /// A secret of the job's ranks; both sides of a connection prove that they know it. If empty,
  /// ranks trust processes of this user on this host or, with `insecure`, any process.
  std::string token;
  bool insecure = false;
  /// Distinguishes jobs at the same address. If empty, rank 0 chooses one for all ranks.
  std::string job_id;
  /// Number of restarts of the job; ranks of others are refused. If unset: rank 0's or 0.
  std::optional<uint32_t> generation;
  /// Set if the job is being restarted and rank 0 may still see this rank's previous process: while
  /// rank 0 has no place for this rank, join() retries until the join timeout.
  bool rejoins = false;
};

/// How a rank joins its job and is monitored. Errors and warnings name the command's option for a
/// member: `--master-port` for `master_port`, `--listen` for `listen_addr`, `--token-file` (a file
/// with the token) for `token`, and so on.
struct Options : Contact {
  /// Rank 0: the names of all ranks, which also set their number. Other ranks get them from rank 0.
  std::vector<std::string> names;
  std::string job = "distrain";  ///< all ranks must have the same name
  /// Called once for each rank and reason when a process that claims to be rank `why.rank` is
  /// refused. `why` tells the user what to do. Runs on the loop thread: must not block.
  std::function<void(const base::Error& why)> on_refused;
  std::chrono::nanoseconds join_timeout = std::chrono::seconds(300);
  /// A peer that is silent for this long is lost. If zero, only a closed connection shows a loss.
  std::chrono::nanoseconds peer_timeout = std::chrono::seconds(5);
  /// Rank 0: the job's options, sent to all ranks. Other ranks: options that must equal rank 0's.
  std::map<std::string, std::string> job_options;
  /// Called on the joining thread when all ranks are known, before any other rank can call this
  /// one, with the number of ranks, including this one, that share its CPUs.
  std::function<void(int ranks)> on_cpus_shared;
  /// Called on the joining thread every 5 s while join() waits; on a rank 0 without `listen_fd`,
  /// first after 1 s. If unset, join() is silent. `missing`: on rank 0, the ranks that have not
  /// joined or are not ready; on other ranks, rank 0. `address`: rank 0's. `reason`: why ranks are
  /// missing, or why this rank cannot join; may be empty. See examples/runtime.cpp.
  std::function<void(const std::vector<int>& missing, const std::string& address,
                     const std::string& reason)>
      on_waiting;
};

/// Returns the name of the abstract unix socket at which ranks of this user on rank 0's host meet
/// rank 0. Jobs with different ids or ports have different names, so they never meet. If `job_id`
/// is empty, the name also depends on the address of rank 0.
std::string meeting_name(const std::string& job_id, const std::string& master_addr, uint16_t port);
/// Returns the port (20000 to 28999) of a job for which no port was given, computed from `job_id`.
uint16_t port_of_job(const std::string& job_id);
/// Opens rank 0's TCP socket. Binds it to `listen_addr` or, if that is empty, to the interface that
/// `master_addr` names; to `port` or, if that is 0, to a free port of `ports`. Throws `rendezvous`.
net::Fd listen_as_rank_0(const std::string& listen_addr, const std::string& master_addr,
                         uint16_t port, net::PortRange ports);

/// Returns a random token for Options::token of all ranks of a job. A program that forks its ranks
/// calls this before it forks, so that OpenSSL is initialized only once.
std::string new_token();
/// Returns a new, random name for an abstract unix socket.
std::string new_unix_name();

}  // namespace distrain::membership

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

/// The options by which a rank finds the other ranks of its job.
struct Contact {
  int rank = 0;        ///< wire::kUnassignedRank: rank 0 chooses (for a Slot, not an Agent)
  int world_size = 0;  ///< the expected number of ranks; 0: any number
  std::string master_addr = "localhost";  ///< host on which rank 0 listens
  uint16_t master_port = 0;               ///< rank 0's port; on rank 0, 0 means any free port
  int listen_fd = -1;                     ///< on rank 0: a socket that is already listening
  /// Address to bind. If empty, rank 0 binds master_addr, and other ranks the interface to rank 0.
  std::string listen_addr;
  /// If not empty, all ranks are on this host and connect to rank 0's unix socket of this name. No
  /// rank listens on TCP. If rank 0's `listen_fd` is set, it must be this socket.
  std::string rank_0_unix_name;
  /// Name of a unix socket on rank 0's host. Ranks of the same host and user try to join there
  /// before they try TCP. Unused if `transport` is tcp. If empty, the name is derived from
  /// `job_id`, `master_addr` and the port: see meeting_name().
  std::string meeting_name;
  net::PortRange ports;            ///< ports to listen on; unused on rank 0 if master_port is not 0
  std::string transport = "auto";  ///< auto (unix on the same host), tcp, unix
  /// A secret shared by the job's ranks. Both sides of a connection prove that they know it. If
  /// empty, ranks trust processes of this user on this host or, with `insecure`, any process.
  std::string token;
  bool insecure = false;
  /// Distinguishes jobs that use the same address. If empty, rank 0 chooses an id for all ranks.
  std::string job_id;
  /// Number of restarts of the job. Rank 0 refuses ranks with another number. Unset means 0 on rank
  /// 0, and any number on the other ranks.
  std::optional<uint32_t> generation;
  /// If set, join() retries until the join timeout while rank 0 does not admit this rank. Needed
  /// after a restart, because rank 0 may not have noticed yet that this rank's old process is gone.
  bool rejoins = false;
};

/// Options for joining a job and for monitoring its ranks. Errors and warnings name a member by its
/// command-line option: `--master-port` for `master_port`, `--listen` for `listen_addr`,
/// `--token-file` (a file with the token) for `token`, and so on.
struct Options : Contact {
  /// The name of each rank, in the order of ranks. Set on rank 0, which sends the names to all.
  std::vector<std::string> names;
  std::string job = "distrain";  ///< name of the job's command; the same on all ranks
  /// Called once for each rank and reason when this rank refuses a process that claims to be rank
  /// `why.rank`. `why` tells the user what to do. Runs on the loop thread: must not block.
  std::function<void(const base::Error& why)> on_refused;
  std::chrono::nanoseconds join_timeout = std::chrono::seconds(300);
  /// A rank that sends nothing for this long is lost. If zero, only a closed connection is a loss.
  std::chrono::nanoseconds peer_timeout = std::chrono::seconds(5);
  /// Rank 0 sends its options to all ranks. join() fails if another rank sets a different value.
  std::map<std::string, std::string> job_options;
  /// Called on the joining thread when all ranks are known, before any other rank can call this
  /// rank. `ranks` is the number of ranks, including this rank, that share its CPUs.
  std::function<void(int ranks)> on_cpus_shared;
  /// Called on the joining thread every 5 s while join() waits. On a rank 0 without `listen_fd`,
  /// the first call is after 1 s. If unset, join() is silent. `missing` has the ranks that have not
  /// joined or are not ready; on ranks other than 0, only rank 0. `address` is rank 0's. `reason`
  /// says why ranks are missing or this rank cannot join; may be empty. See examples/runtime.cpp.
  std::function<void(const std::vector<int>& missing, const std::string& address,
                     const std::string& reason)>
      on_waiting;
};

/// Returns the name of the abstract unix socket at which ranks of this user on rank 0's host meet
/// rank 0. Jobs with different ids or ports have different names, so they never meet. If `job_id`
/// is empty, the name also depends on the address of rank 0.
std::string meeting_name(const std::string& job_id, const std::string& master_addr, uint16_t port);
/// Computes a port (20000 to 28999) from `job_id`, for a job whose port is not given.
uint16_t port_of_job(const std::string& job_id);
/// Opens rank 0's TCP socket on `port` (0: a free port of `ports`). Binds it to `listen_addr`; if
/// empty, to the interface that `master_addr` names. Throws `rendezvous` if no such port is free.
net::Fd listen_as_rank_0(const std::string& listen_addr, const std::string& master_addr,
                         uint16_t port, net::PortRange ports);

/// Returns a random token for Options::token of all ranks of a job. A program that forks its ranks
/// calls this before it forks, so that OpenSSL is initialized only once.
std::string new_token();
/// Returns a new, random name for an abstract unix socket.
std::string new_unix_name();

}  // namespace distrain::membership

#pragma once

#include <cstdint>
#include <string>

#include "distrain/net/port_range.h"
#include "distrain/net/socket.h"

namespace distrain::rpc {

/// Returns the name of the unix socket, without a file, at which ranks of this user on rank 0's
/// host meet rank 0. Jobs with different ids or ports have different names, so they never meet. For
/// a job without an id the address of rank 0 is in the name, too.
std::string meeting_name(const std::string& job_id, const std::string& master_addr, uint16_t port);

/// Returns the port (20000 to 28999) that all ranks of a job without a given port compute.
uint16_t port_of_job(const std::string& job_id);

/// Opens rank 0's TCP socket at `listen_addr`, or at the interface that `master_addr` names if that
/// is empty; at `port`, or at a free one of `ports` if that is 0. Throws `rendezvous`.
net::Fd listen_as_rank_0(const std::string& listen_addr, const std::string& master_addr,
                         uint16_t port, net::PortRange ports);

}  // namespace distrain::rpc

#pragma once

#include <cstdint>
#include <string>

#include "distrain/net/port_range.h"
#include "distrain/net/socket.h"

namespace distrain::membership {

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

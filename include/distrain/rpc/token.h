#pragma once

#include <string>

namespace distrain::rpc {

/// A token that nobody can guess, for AgentOptions::token of all ranks of a job. Whoever forks them
/// makes it before that: then OpenSSL is set up once, and not by each of them.
std::string new_token();

/// A name for a unix socket that nobody else has; it ends with its socket.
std::string new_unix_name();

}  // namespace distrain::rpc

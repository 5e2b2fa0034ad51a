#pragma once

#include <string>

namespace distrain::membership {

/// Returns a random token for AgentOptions::token of all ranks of a job. A program that forks its
/// ranks calls this before it forks, so that OpenSSL is initialized only once.
std::string new_token();

/// Returns a new, random name for an abstract unix socket.
std::string new_unix_name();

}  // namespace distrain::membership

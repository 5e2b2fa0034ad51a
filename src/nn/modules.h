#pragma once

#include "distrain/rpc/agent.h"

namespace distrain::nn {

/// Returns true if nn::install() was called.
bool is_installed(rpc::Agent& agent);

/// Name of the exposed function that returns a module by name, and creates it if necessary.
/// Request: text name · arguments of make().
inline constexpr const char* kAttachFunction = "distrain.nn.attach";

}  // namespace distrain::nn

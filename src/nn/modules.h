#pragma once

#include "distrain/rpc/agent.h"

namespace distrain::nn {

/// Returns true if nn::install() was called.
bool is_installed(rpc::Agent& agent);

/// The function that finds or makes a module, for RemoteModule: text name · arguments of its
/// make().
inline constexpr const char* kAttachFunction = "distrain.nn.attach";

}  // namespace distrain::nn

#pragma once

#include "distrain/membership/loss.h"

namespace distrain::rpc {

// The types and functions of layer `membership` that belong to the interface of an agent.
using membership::incarnation_of;
using membership::kMaxIncarnations;
using membership::kMaxRanks;
using membership::Loss;
using membership::make_id;
using membership::maker_of;
using membership::process_number;
using membership::ProcessNumber;
using membership::rank_of;
using membership::Wait;

}  // namespace distrain::rpc

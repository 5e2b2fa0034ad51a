#pragma once

#include <memory>
#include <string>

#include "distrain/cuda/plugin.h"

namespace distrain::cuda {

std::string nccl_version();
NcclId new_nccl_id();
std::unique_ptr<NcclCommunicator> make_communicator(const NcclId& id, int size, int rank,
                                                    int device_index);

}  // namespace distrain::cuda

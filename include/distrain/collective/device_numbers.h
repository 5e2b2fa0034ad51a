#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <c10/core/Device.h>

namespace distrain::collective {

/// Devices by the order in which they are met: what ranks can compare. Which devices there are may
/// differ between ranks; which tensors share one may not.
class DeviceNumbers {
 public:
  size_t number_of(c10::Device device) {
    const auto it = std::find(devices_.begin(), devices_.end(), device);
    if (it != devices_.end()) return static_cast<size_t>(it - devices_.begin());
    devices_.push_back(device);
    return devices_.size() - 1;
  }

 private:
  std::vector<c10::Device> devices_;
};

}  // namespace distrain::collective

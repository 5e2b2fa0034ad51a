#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <c10/core/Device.h>

namespace distrain::collective {

/// Numbers devices by their first use, so that ranks can compare which tensors share a device.
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

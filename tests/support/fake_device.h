#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

namespace distrain::testing {

// Note [Fake device]
//
// The device type PrivateUse1, named "fake", in test programs only: four devices that test what the
// runtime must do right on any accelerator. They behave in the worst way that is allowed:
//
//  - The CPU cannot access device memory: reading it is a segmentation fault.
//  - A stream is a list of work that runs only when a thread waits for it (for a stream or an
//    event, in item(), in a copy to the CPU) or another running stream does. So a missing wait
//    always gives the previous contents of memory.
//  - Non-blocking copies between pinned memory and a device are such work, too: host memory is
//    read or written only when the stream runs. Copies of other host memory block or are staged,
//    as CUDA's are.
//  - They have their own random generators and refuse those of other devices.
//  - Operations that use CUDA's current device create a context there, which is recorded:
//    switching to a device, events, and allocations of pinned memory and of device memory.
//  - Freed memory is filled with 0xFF (NaN or -1) by work on the stream that allocated it, which
//    may reuse the memory at once. Work on another stream that uses the memory without
//    recordStream or a wait finds it filled.
//
// The kernels are the CPU's, on another mapping of the memory. Enqueued work keeps no tensor alive.

constexpr int kFakeDevices = 4;

inline c10::Device fake(int index = 0) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

struct FakeDeviceCopies {
  int64_t number = 0;
  int64_t bytes = 0;
  bool operator==(const FakeDeviceCopies&) const = default;
};

/// The numbers of operations since the last reset, on all threads and devices.
struct FakeDeviceCounters {
  FakeDeviceCopies host_to_device;
  FakeDeviceCopies device_to_host;
  FakeDeviceCopies device_to_device;  ///< between two devices
  FakeDeviceCopies within_device;     ///< by copy_, clone, to or contiguous
  int64_t scalars = 0;                ///< calls of item()
  int64_t waits = 0;                  ///< a stream waits for an event
  int64_t host_waits = 0;             ///< a thread waits for a stream or an event
};

FakeDeviceCounters fake_device_counters();
void reset_fake_device_counters();

/// Runs all work that is enqueued on any stream of any device.
void run_all_fake_streams();

/// During its lifetime, an allocation fails if the tensors on its device would exceed `bytes`.
class FakeDeviceMemoryLimit {
 public:
  explicit FakeDeviceMemoryLimit(int64_t bytes);
  ~FakeDeviceMemoryLimit();
  FakeDeviceMemoryLimit(const FakeDeviceMemoryLimit&) = delete;
  FakeDeviceMemoryLimit& operator=(const FakeDeviceMemoryLimit&) = delete;
};
/// Returns the bytes of all tensors on `device`.
int64_t fake_bytes_in_use(int device);

/// During its lifetime, the devices have failed, as after an assertion in a kernel: queries of work
/// and waits for it throw, and no more memory can be pinned.
class FakeDeviceFailure {
 public:
  FakeDeviceFailure();
  ~FakeDeviceFailure();
  FakeDeviceFailure(const FakeDeviceFailure&) = delete;
  FakeDeviceFailure& operator=(const FakeDeviceFailure&) = delete;
};

/// Returns the sorted names of the threads that have created a context on `device` since the last
/// reset, separated by commas. A guard that restores the previous device creates no context.
std::string fake_contexts(int device);
void reset_fake_contexts();

}  // namespace distrain::testing

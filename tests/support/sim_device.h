#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

namespace distrain::testing {

// Note [Simulated accelerator]
//
// Device type PrivateUse1 with the name "sim": four devices, in test binaries only, to test what
// the runtime must do right on any accelerator. It behaves in the worst way that is allowed:
//
//  - The CPU cannot access device memory: reading it is a segmentation fault.
//  - A stream is a list of work that runs only when a thread waits for it (for a stream or an
//    event, in item(), in a copy to the CPU), or when a running stream does. So a missing wait
//    always gives the previous contents of memory.
//  - Non-blocking copies between pinned memory and a device are such work, too: host memory is
//    read or written only when the stream runs. Copies of other host memory block or are staged,
//    as CUDA's are.
//  - It has its own generators and refuses those of other devices.
//  - Operations that use CUDA's current device create a context there, which is recorded: moving
//    to a device, events, pinned memory, device memory.
//  - Freed memory is filled with 0xFF (NaN; -1) in the order of the stream that allocated it,
//    which may reuse it at once. Work on another stream that uses the memory without
//    recordStream or a wait finds it filled.
//
// Kernels are the CPU's, on another mapping of the same memory. They keep no tensor alive.

constexpr int kSimDevices = 4;

inline c10::Device sim(int index = 0) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

struct SimCopies {
  int64_t number = 0;
  int64_t bytes = 0;
  bool operator==(const SimCopies&) const = default;
};

/// Operations since the last reset, on all threads and devices.
struct SimCounters {
  SimCopies host_to_device;
  SimCopies device_to_host;
  SimCopies device_to_device;  ///< between two devices
  SimCopies within_device;     ///< copy_, clone, to, contiguous
  int64_t scalars = 0;         ///< item()
  int64_t waits = 0;           ///< a stream waits for an event
  int64_t host_waits = 0;      ///< a thread waits for a stream or an event
};

SimCounters sim_counters();
void reset_sim_counters();

/// Runs all work that is enqueued on any stream of any device.
void run_all_sim_streams();

/// Makes allocations fail that exceed `bytes` of tensors on a device, during its lifetime.
class SimMemoryLimit {
 public:
  explicit SimMemoryLimit(int64_t bytes);
  ~SimMemoryLimit();
  SimMemoryLimit(const SimMemoryLimit&) = delete;
  SimMemoryLimit& operator=(const SimMemoryLimit&) = delete;
};
/// Returns the bytes of all tensors on `device`.
int64_t sim_bytes_in_use(int device);

/// During its lifetime, the devices have failed, as after an assertion in a kernel: queries of work
/// and waits for it throw, and no more memory can be pinned.
class SimFailure {
 public:
  SimFailure();
  ~SimFailure();
  SimFailure(const SimFailure&) = delete;
  SimFailure& operator=(const SimFailure&) = delete;
};

/// Returns the names of the threads that have created a context on `device` since the last reset,
/// sorted, without duplicates, separated by commas. A guard that restores a device creates no
/// context.
std::string sim_contexts(int device);
void reset_sim_contexts();

}  // namespace distrain::testing

#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

namespace distrain::testing {

// Note [Simulated accelerator]
//
// Device type PrivateUse1 under the name "sim": four devices, in test binaries only, for what the
// runtime has to get right on any accelerator. It is as unkind as an accelerator may be:
//
//  - Its memory cannot be touched by the CPU: reading it is a segmentation fault.
//  - A stream is a list of work that nobody does until somebody waits for it: on the host
//    (a stream, an event, item(), a copy to the CPU), or in another stream that is itself run. So
//    whoever forgets to wait gets the state from before, every time.
//  - Copies between pinned memory and a device with non_blocking are such work, too: the host's
//    memory is read or written only when the stream comes to it. Of memory that is not pinned they
//    wait or stage, as CUDA's do.
//  - It has generators of its own, and takes no other device's.
//  - Whatever CUDA does in the thread's current device makes a context there, of which is kept a
//    record: moving to a device, events, pinned memory, device memory.
//  - Freed memory is filled with 0xFF (NaN; -1) in the order of the stream that allocated it, which
//    may use it again at once. Whatever touches it under another stream without recordStream or a
//    wait finds that done already.
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

/// What has been asked for since the last reset, of all threads and devices.
struct SimCounters {
  SimCopies host_to_device;
  SimCopies device_to_host;
  SimCopies device_to_device;  ///< between two devices
  SimCopies within_device;     ///< copy_, clone, to, contiguous
  int64_t scalars = 0;         ///< item()
  int64_t waits = 0;           ///< of a stream for an event
  int64_t host_waits = 0;      ///< of a thread for a stream or an event
};

SimCounters sim_counters();
void reset_sim_counters();

/// Does everything that any stream of any device has been given.
void run_all_sim_streams();

/// While it lives, an allocation fails that would make more than `bytes` of tensors on a device, as
/// on a small GPU.
class SimMemoryLimit {
 public:
  explicit SimMemoryLimit(int64_t bytes);
  ~SimMemoryLimit();
  SimMemoryLimit(const SimMemoryLimit&) = delete;
  SimMemoryLimit& operator=(const SimMemoryLimit&) = delete;
};
/// Of tensors on `device` now.
int64_t sim_bytes_in_use(int device);

/// While it lives, the devices have failed, as after a kernel's assert: whoever asks whether work
/// is done, or waits for it, is thrown at, and no more memory is pinned.
class SimFailure {
 public:
  SimFailure();
  ~SimFailure();
  SimFailure(const SimFailure&) = delete;
  SimFailure& operator=(const SimFailure&) = delete;
};

/// The names of the threads that have made a context on `device` since the last reset, sorted, each
/// once, with commas between them. The way back of a guard makes none.
std::string sim_contexts(int device);
void reset_sim_contexts();

}  // namespace distrain::testing

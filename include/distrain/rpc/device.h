#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace distrain::rpc {

// Note [Streams]
//
// An accelerator does its work in streams: a kernel or a copy is only put into one, and runs when
// all before it in that stream has run. Work of two streams is in order only where one of them was
// told to wait for a point in the other. So the runtime keeps to these rules:
//
//  - What a user function, a continuation or a backward node computes goes into the current stream
//    of the thread that runs it. Worker threads leave that at the device's default stream, so work
//    of several handlers is in order by itself, and so is their memory, which torch's allocators
//    reuse within a stream. A continuation runs under the streams of where it was registered,
//    behind those under which its future was completed; Future::wait() is behind them, too.
//  - Copies between the device and the network's memory go into streams of their own, beside the
//    computing. A tensor is copied out behind all that the sender's current stream had been given;
//    the network waits for that copy, the receiver's current stream for the copy in.
//  - Nobody ever waits for a whole device.
//
// Such a wait is a StreamPoint, except where autograd hands gradients from node to node with the
// events of torch's own InputBuffer. The runtime knows devices through c10's Stream, Event and
// DeviceGuardImplInterface alone, so all of it also runs on a simulated accelerator.

inline bool is_accelerator(const c10::Device& device) { return !device.is_cpu(); }

/// Makes `device` current on this thread; does nothing on the CPU. Each thread of a rank does so
/// before it works: CUDA otherwise takes device 0, and makes a context of hundreds of megabytes
/// there. If the device has failed, the work that follows tells it.
void make_current(c10::Device device) noexcept;

/// The current stream of this thread on `device`, which must be an accelerator.
c10::Stream current_stream(c10::Device device);

/// A stream of `device` that runs beside the computing; a few of them are handed out in turn.
c10::Stream side_stream(c10::Device device);

/// A point in the work of a stream. Copies are the same point. Thread-safe.
class StreamPoint {
 public:
  /// Reached from the start.
  StreamPoint() = default;

  /// Behind all that this thread's current stream of `device` has been given. On the CPU: reached.
  static StreamPoint mark(c10::Device device);
  /// Behind all that `stream` has been given.
  static StreamPoint mark(const c10::Stream& stream);

  /// What `stream` is given from now on runs when the point is reached.
  void make_wait(const c10::Stream& stream) const;
  /// The same of this thread's current stream of `device`; nothing on the CPU.
  void make_current_wait(c10::Device device) const;

  /// Blocks this thread until the point is reached. Throws what the device's work has failed of,
  /// and `overloaded` when no other thread of its pool is left.
  void wait_on_host() const;
  /// The same for destructors: what has failed is done, too, and the pool does not grow.
  void settle() const noexcept;
  bool reached() const;

 private:
  std::shared_ptr<c10::Event> event_;
};

/// Tells the allocator of the memory of `tensor`, which was made under another stream, that
/// `stream` uses it too: once freed it is not reused before that has come so far.
void use_on_stream(const at::Tensor& tensor, const c10::Stream& stream);

/// CPU memory of `bytes` that devices of `device`'s type copy to and from on their own.
at::Tensor pinned_bytes(c10::Device device, int64_t bytes);

/// The same values on the CPU, row-major, for files and the like: those of devices come by way of a
/// little pinned memory, one piece while the one before is put in its place. Blocks until they are
/// there. Tensors of the CPU are given back as they are.
std::vector<at::Tensor> to_host(const std::vector<at::Tensor>& tensors);

/// The most bytes that tensors of this process have taken on `device` at any time; 0 on the CPU.
int64_t peak_device_bytes(c10::Device device);

}  // namespace distrain::rpc

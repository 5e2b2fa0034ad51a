#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

namespace distrain::rpc {

// Note [Streams]
//
// An accelerator runs the work of a stream in order. Work in two streams is ordered only if one
// stream has been told to wait for a point in the other. The runtime keeps these rules:
//
//  - The work of a user function, a continuation or a backward node goes into the current stream
//    of its thread. Worker threads leave the device's default stream current, so the work of
//    several handlers is ordered and may reuse memory. A continuation runs with the streams that
//    were current where it was registered, after the work in the streams under which its future
//    was completed. Code after Future::wait() also runs after that work.
//  - Copies between devices and network buffers have streams of their own and overlap computation.
//    A copy to the host starts after all work in the sender's current stream. The network waits
//    for that copy; the receiver's current stream waits for the copy to the receiver's device.
//  - No thread ever waits for a whole device.
//
// These waits are StreamPoints, except between autograd's nodes, where torch's InputBuffer has
// events. The runtime uses devices only through c10, so it also runs on the tests' fake device.

inline bool is_accelerator(const c10::Device& device) { return !device.is_cpu(); }

/// Makes `device` this thread's current device; does nothing for the CPU. Each thread must call
/// this before it uses devices: CUDA would otherwise create a context of hundreds of MB on device
/// 0. Ignores errors, because later device work reports them.
void make_current(c10::Device device) noexcept;

/// Returns the current stream of this thread on `device`, which must be an accelerator.
c10::Stream current_stream(c10::Device device);

/// Returns a stream of torch's pool, whose work may run concurrently with the current stream.
c10::Stream side_stream(c10::Device device);

/// A point in a stream, reached when all earlier work is done. Copies share the point. Thread-safe.
class StreamPoint {
 public:
  /// Creates a point that has already been reached.
  StreamPoint() = default;
  /// Returns the point after the work in this thread's current stream; already reached for the CPU.
  static StreamPoint mark(c10::Device device) {
    return is_accelerator(device) ? mark(current_stream(device)) : StreamPoint();
  }
  /// Returns the point after all work in `stream`.
  static StreamPoint mark(const c10::Stream& stream);
  /// Makes later work in `stream` wait for this point.
  void make_wait(const c10::Stream& stream) const;
  /// Makes this thread's current stream of `device` wait for this point. Does nothing for the CPU.
  void make_current_wait(c10::Device device) const {
    if (event_ && is_accelerator(device)) make_wait(current_stream(device));
  }
  /// Blocks this thread until the point is reached. Throws the error of failed device work, and
  /// `overloaded` if the thread pool has no other thread left.
  void wait_on_host() const;
  /// Like wait_on_host(), but ignores errors and does not tell the thread pool that it blocks.
  void wait_in_destructor() const noexcept;
  bool reached() const;

 private:
  std::shared_ptr<c10::Event> event_;
};

/// Tells the allocator of `tensor`, which was allocated under another stream, that `stream` uses
/// its memory. Once freed, the memory is not reused until `stream` has run its work up to then.
void use_on_stream(const at::Tensor& tensor, const c10::Stream& stream);

/// Returns a CPU tensor of `bytes` bytes in pinned memory, for asynchronous copies by `device`.
at::Tensor pinned_bytes(c10::Device device, int64_t bytes);

/// Copies device tensors to the CPU in row-major order, through two small pinned buffers in turn.
/// Returns CPU tensors as they are. Blocks until the copies are complete.
std::vector<at::Tensor> to_host(const std::vector<at::Tensor>& tensors);

/// Returns the peak memory of this process's tensors on `device` in bytes; 0 for the CPU.
int64_t peak_device_bytes(c10::Device device);

}  // namespace distrain::rpc

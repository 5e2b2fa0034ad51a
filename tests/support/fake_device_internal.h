// Shared declarations of the parts of the fake device; see fake_device.h.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include "support/fake_device.h"

namespace distrain::testing::fake_device {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr int64_t kStreams = 33;  // per device; 0 is its default stream

/// A recursive lock for all devices. Finished work is destroyed after the outermost lock is
/// released, because destructors of user code may take other locks.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

class Queue;

/// A piece of device memory; never destroyed.
struct Block {
  Queue* owner = nullptr;  // the stream that allocated the block
  int device = 0;
  char* host = nullptr;
  size_t size = 0;
  std::vector<Queue*> users;  // other streams that use it, known by recordStream
  uint64_t poisoned_at = 0;   // point of `owner` after the freed block is filled
};

/// The enqueued work of one stream, guarded by the Lock. Point n is reached when n items are done.
class Queue {
 public:
  void add(std::vector<Block*> touched, std::function<void()> work);
  void add_wait(Queue& other, uint64_t point);
  /// Blocks later work until `open` returns true. Waiting threads call `open` under the Lock.
  void add_gate(std::function<bool()> open);

  /// Returns the point after all work that has been enqueued.
  uint64_t end() const { return added_; }
  bool reached(uint64_t point) const { return done_ >= point; }

  /// Runs the work before `point`. Returns false if a gate is closed, or if the work depends on a
  /// stream whose run_to() is active further up the call stack.
  bool run_to(uint64_t point);
  /// Runs the next piece of work, which must exist.
  bool run_one();

 private:
  struct Item {
    std::function<void()> work;
    std::vector<Block*> touched;
    Queue* awaited = nullptr;
    uint64_t awaited_point = 0;
    std::function<bool()> open;
  };

  std::deque<Item> items_;
  uint64_t added_ = 0;
  uint64_t done_ = 0;
  bool at_work_ = false;
};

/// Runs the work before `point`. While a gate is closed, waits without the Lock.
void run_on_host(Queue& queue, uint64_t point);

Queue& queue_of(const c10::Stream& stream);
Queue& queue_of(int device, int64_t stream);
int current_device();
/// Records that this thread has created a context on `device`.
void touch(int device);
/// Returns a generator whose numbers are those of a CPU generator.
at::Generator make_generator(int device);
const at::Generator& default_generator(int device);
/// Returns the CPU generator within a generator of `device`. Throws for any other generator.
at::Generator cpu_generator(const at::Generator& generator, int device);
c10::Stream current_stream(int device);
Queue& current_queue(c10::Device device);

c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();
bool is_pinned(const void* pointer);
/// Returns the address at which the CPU can access the device memory at `pointer`.
char* host_of(const void* pointer);
Block* block_of(const void* pointer);
void record_use(const void* pointer, const c10::Stream& stream);

/// Throws if a FakeDeviceFailure exists.
void check_health();

/// Returns true if mutants.sh has selected the calling wait (or event record) to be omitted.
bool wait_is_dropped();

/// Returns the counters. The caller must hold the Lock.
FakeDeviceCounters& counters();

/// Returns a CPU tensor that shares the memory of a device tensor but does not keep it alive.
at::Tensor host_alias(const at::Tensor& tensor);

/// Collects the operands of some work, and enqueues it on the current stream of their device.
class Launch {
 public:
  /// Adds an operand. Returns host_alias() of a device tensor, or a copy of a CPU scalar.
  at::Tensor operand(const at::Tensor& tensor);
  at::Tensor operand(const std::optional<at::Tensor>& tensor) {
    return tensor ? operand(*tensor) : at::Tensor();
  }
  c10::Device device() const;
  void set_device(c10::Device device) { device_ = device; }
  void submit(std::function<void()> work);
  /// Runs all work that was enqueued on the stream before this call.
  void synchronize() const;

 private:
  std::optional<c10::Device> device_;
  std::vector<Block*> touched_;
};

/// Returns `value`, an argument of an operator, with `change` applied to each tensor in it.
c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& change);

/// Returns an empty tensor on `device` with the shape and strides of `like`.
at::Tensor empty_on(c10::Device device, const at::Tensor& like);

/// Returns a tensor on `device` and enqueues a copy of the CPU tensor `value` to it.
at::Tensor publish(c10::Device device, const at::Tensor& value);

}  // namespace distrain::testing::fake_device

// What the parts of the simulated accelerator share; see sim_device.h.
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

#include "support/sim_device.h"

namespace distrain::testing::simulated {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int64_t kStreams = 33;  // of each device; 0 is its default stream

/// One lock for all devices, taken again at will. What finished work held is let go after the
/// outermost one, as its destructors may take locks of whoever gave the work.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

class Queue;

/// A piece of device memory; lives for ever.
struct Block {
  Queue* owner = nullptr;  // the stream that allocated it
  int device = 0;
  char* host = nullptr;
  size_t size = 0;
  std::vector<Queue*> users;  // other streams that were recorded
  uint64_t poisoned_at = 0;   // how far the owner has to come until what was freed is gone
};

/// The work of one stream. Under the Lock.
class Queue {
 public:
  void add(std::vector<Block*> touched, std::function<void()> work);
  void add_wait(Queue& other, uint64_t point);
  /// What comes behind it waits until `open` says so. Asked under the Lock whenever somebody waits.
  void add_gate(std::function<bool()> open);

  /// All that it has been given lies before this point.
  uint64_t end() const { return added_; }
  bool reached(uint64_t point) const { return done_ >= point; }

  /// Works up to there. False: it would have to go on with a stream that is at work further up, or
  /// a gate is closed.
  bool run_to(uint64_t point);
  /// The next piece of work; there is one.
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

/// Works up to there, and waits, without the Lock, for gates that are closed.
void run_on_host(Queue& queue, uint64_t point);

Queue& queue_of(const c10::Stream& stream);
Queue& queue_of(int device, int64_t stream);
int current_device();
/// This thread has made a context on `device`.
void touch(int device);
/// Its numbers are those of a generator of the CPU.
at::Generator make_generator(int device);
const at::Generator& default_generator(int device);
/// The generator of the CPU within one of `device`. Throws for any other.
at::Generator cpu_generator(const at::Generator& generator, int device);
c10::Stream current_stream(int device);
Queue& current_queue(c10::Device device);

// Memory.
c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();
bool is_pinned(const void* pointer);
/// The CPU's view of device memory.
char* host_of(const void* pointer);
Block* block_of(const void* pointer);
void record_use(const void* pointer, const c10::Stream& stream);

/// Throws while a SimFailure lives.
void check_health();

/// Whether the wait that is being asked for is one that a test leaves out on purpose.
bool wait_is_dropped();

// Counters, under the Lock.
SimCounters& counters();

/// A tensor in the memory of `tensor`, for work in streams only. It keeps nothing alive.
at::Tensor host_alias(const at::Tensor& tensor);

/// Work on some tensors for the current stream of their device.
class Launch {
 public:
  /// Of a tensor of the device its host_alias, of a scalar on the CPU a copy.
  at::Tensor operand(const at::Tensor& tensor);
  at::Tensor operand(const std::optional<at::Tensor>& tensor) {
    return tensor ? operand(*tensor) : at::Tensor();
  }
  c10::Device device() const;
  void set_device(c10::Device device) { device_ = device; }
  void submit(std::function<void()> work);
  /// Does what the stream was given before.
  void synchronize() const;

 private:
  std::optional<c10::Device> device_;
  std::vector<Block*> touched_;
};

/// Replaces each tensor in an argument of an operator by what `change` makes of it.
c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& change);

/// On `device`, of the shape and strides of `like`.
at::Tensor empty_on(c10::Device device, const at::Tensor& like);

/// A tensor that holds what `value`, on the CPU, holds when the current stream comes so far.
at::Tensor publish(c10::Device device, const at::Tensor& value);

}  // namespace distrain::testing::simulated

#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/input_buffer.h>

#include "distrain/rpc/device.h"

namespace distrain::autograd {

// Note [Streams of a backward pass]
//
// As in torch's engine, a node runs in the device and stream of its forward function, and each
// gradient travels with the stream that computed it. If the receiving node has another stream,
// torch's InputBuffer records an event, for which the node waits, and sums up gradients in the
// node's stream. Gradients of other ranks enter a pass in the thread's current stream, which has
// waited for their arrival. If a node gets gradients on several devices (a call with tensors on
// each of them), the node's stream and the other devices' current streams wait for all gradients.
//
// Node::stream() is not used: it would make torch decide for good that there is no accelerator.

/// Returns the stream in which `node` runs: the stream of the first output of its forward function
/// that is on an accelerator. Returns nullopt if no output is on an accelerator.
std::optional<c10::Stream> stream_of(const torch::autograd::Node& node);

/// Adds `gradient` to input `input` of `node`. A null `producer` stands for the current stream.
void add_gradient(torch::autograd::InputBuffer& inputs, torch::autograd::Node& node, uint32_t input,
                  at::Tensor gradient, const std::optional<c10::Stream>& producer);

/// Makes a node's stream `own` wait until the node's `inputs` are computed.
void await_inputs(const torch::autograd::InputBuffer& inputs,
                  const std::optional<c10::Stream>& own);

/// Returns the stream in which this thread has just computed `tensor`, or nullopt on the CPU.
std::optional<c10::Stream> producer_of(const at::Tensor& tensor);

/// Makes the current stream wait for `producer`, which computes `tensor`. Returns true if the two
/// streams differ.
bool wait_for_producer(const at::Tensor& tensor, const std::optional<c10::Stream>& producer);

/// Makes this thread's current streams wait for `streams`, or only for those of device `only`.
void wait_for_streams(const std::vector<c10::Stream>& streams,
                      std::optional<c10::Device> only = std::nullopt);

/// Adds `stream` to `streams` if it is not among them.
inline void insert(std::vector<c10::Stream>& streams, const c10::Stream& stream) {
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

/// Orders the streams that read and update the parameters of a rank. Thread-safe.
class ParameterStreams {
 public:
  /// Makes this thread's current stream wait for earlier updates of parameters on `device`.
  void read(c10::Device device) { order(device, false); }
  /// Makes the current stream wait for updates and records the stream as a user of the memory.
  void read(const at::Tensor& parameter) { order(parameter, false); }
  /// Makes this thread's current stream wait for earlier reads and updates on `device`.
  void update(c10::Device device) { order(device, true); }
  void update(const at::Tensor& parameter) { order(parameter, true); }

 private:
  void order(c10::Device device, bool updates);
  void order(const at::Tensor& parameter, bool updates) {
    order(parameter.device(), updates);
    if (const auto stream = producer_of(parameter)) rpc::use_on_stream(parameter, *stream);
  }

  std::mutex mutex_;
  std::vector<c10::Stream> readers_;
  std::vector<c10::Stream> writers_;
};

}  // namespace distrain::autograd

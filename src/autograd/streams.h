#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/input_buffer.h>

namespace distrain::autograd {

// Note [Streams of a backward pass]
//
// As in torch's engine, a node runs under the device and stream of its forward, and each gradient
// travels with the stream that it was made in: torch's InputBuffer records an event there if the
// node that gets it has another one, and adds up under the stream of that node; the node waits for
// the events before it runs. Gradients enter a pass under this thread's current stream: the
// caller's for the roots, the one that has waited for their arrival for those of other ranks.
//
// A node has one stream. If it gets gradients on several devices (one that stands for a call with
// tensors on each), its stream waits for all, and so do the other devices' current streams.
//
// On the CPU all of this is a look at the device of each input of a node. Torch's Node::stream()
// would ask for the accelerator, and torch remembers for good that there is none yet.

/// What `node` runs under: the stream of its first output on an accelerator, in the forward pass.
std::optional<c10::Stream> stream_of(const torch::autograd::Node& node);

/// Gives `node` a gradient, which `producer` has made or, if there is none, the current stream.
void add_gradient(torch::autograd::InputBuffer& inputs, torch::autograd::Node& node, uint32_t input,
                  at::Tensor gradient, const std::optional<c10::Stream>& producer);

/// Lets `own`, the stream that the node with these inputs runs under, wait for them.
void await_inputs(const torch::autograd::InputBuffer& inputs,
                  const std::optional<c10::Stream>& own);

/// The stream that has been given the making of `tensor`, just now; none on the CPU.
std::optional<c10::Stream> made_under(const at::Tensor& tensor);

/// Has this thread's current stream wait for `tensor`, made under `made`. True if they differ.
bool follow(const at::Tensor& tensor, const std::optional<c10::Stream>& made);

/// Makes this thread's current streams, or that of one device only, wait for all that `streams` (of
/// that device) have been given.
void follow(const std::vector<c10::Stream>& streams,
            std::optional<c10::Device> only = std::nullopt);

void insert(std::vector<c10::Stream>& streams, const c10::Stream& stream);

/// Keeps what many streams do with the parameters of a rank in order. Thread-safe.
class ParameterStreams {
 public:
  /// This thread's current stream is going to read parameters on `device`.
  void read(c10::Device device);
  /// The same of one of them, whose memory it may still need when the parameter has moved.
  void read(const at::Tensor& parameter);
  /// It is going to change some.
  void update(c10::Device device);
  void update(const at::Tensor& parameter);

 private:
  std::mutex mutex_;
  std::vector<c10::Stream> readers_;
  std::vector<c10::Stream> writers_;
};

}  // namespace distrain::autograd

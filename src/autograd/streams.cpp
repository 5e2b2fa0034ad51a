#include "streams.h"

namespace distrain::autograd {

using torch::autograd::InputBuffer;
using torch::autograd::Node;

std::optional<c10::Stream> stream_of(const Node& node) {
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    const auto& metadata = node.input_metadata(i);
    if (rpc::is_accelerator(metadata.device())) return metadata.stream();
  }
  return std::nullopt;
}

void add_gradient(InputBuffer& inputs, Node& node, uint32_t input, at::Tensor gradient,
                  const std::optional<c10::Stream>& producer) {
  if (!gradient.defined()) return;
  const c10::Device device = gradient.device();
  if (!rpc::is_accelerator(device)) {
    inputs.add(input, std::move(gradient), std::nullopt, std::nullopt, &node);
    return;
  }
  const c10::Stream stream = producer ? *producer : rpc::current_stream(device);
  // Pass no node: InputBuffer uses the node only to warn about leaves that several streams use.
  inputs.add(input, std::move(gradient), stream, stream_of(node), nullptr);
}

void await_inputs(const InputBuffer& inputs, const std::optional<c10::Stream>& own) {
  if (!own) return;
  for (size_t i = 0; i < inputs.ready_streams.size(); ++i) {
    const auto& producer = inputs.ready_streams[i];
    if (!producer) continue;
    const auto& event = inputs.ready_events[i];
    if (*producer != *own) event->block(*own);
    const at::Tensor& gradient = inputs.buffer[i];
    if (gradient.device() == own->device()) continue;
    const c10::Stream found = rpc::current_stream(gradient.device());
    event->block(found);
    rpc::use_on_stream(gradient, found);
  }
}

std::optional<c10::Stream> producer_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !rpc::is_accelerator(tensor.device())) return std::nullopt;
  return rpc::current_stream(tensor.device());
}

bool wait_for_producer(const at::Tensor& tensor, const std::optional<c10::Stream>& producer) {
  if (!producer) return false;
  const c10::Stream current = rpc::current_stream(producer->device());
  if (current == *producer) return false;
  rpc::StreamPoint::mark(*producer).make_wait(current);
  rpc::use_on_stream(tensor, current);
  return true;
}

void wait_for_streams(const std::vector<c10::Stream>& streams, std::optional<c10::Device> only) {
  for (const c10::Stream& stream : streams) {
    if ((only && stream.device() != *only) || rpc::current_stream(stream.device()) == stream)
      continue;
    rpc::StreamPoint::mark(stream).make_current_wait(stream.device());
  }
}

// A read records the current stream as a reader. An update waits for the work that these streams
// have when the update begins. The update need not wait for later reads, because later reads use
// versions that the update does not change.
void ParameterStreams::order(c10::Device device, bool updates) {
  if (!rpc::is_accelerator(device)) return;
  std::lock_guard lock(mutex_);
  if (updates) wait_for_streams(readers_, device);
  wait_for_streams(writers_, device);
  insert(updates ? writers_ : readers_, rpc::current_stream(device));
}

}  // namespace distrain::autograd

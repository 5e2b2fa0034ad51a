#include "operations.h"

#include <algorithm>
#include <cstring>

#include <ATen/core/grad_mode.h>

#include "reduce.h"

namespace distrain::collective {

namespace {

uint8_t* bytes_of(const at::Tensor& tensor) { return static_cast<uint8_t*>(tensor.data_ptr()); }

void copy_bytes(uint8_t* to, std::span<const uint8_t> from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

void write_tensor(const at::Tensor& tensor, std::span<const uint8_t> data) {
  if (tensor.is_contiguous()) return copy_bytes(bytes_of(tensor), data);
  const at::NoGradGuard no_grad;
  tensor.copy_(at::from_blob(const_cast<uint8_t*>(data.data()), tensor.sizes(),
                             tensor.options().requires_grad(false)));
}

// Header and tensor in one buffer.
base::BufferPtr pack(Core& core, const OpSpec& spec, const at::Tensor& tensor) {
  base::BufferPtr buffer = core.allocate(kHeaderBytes + spec.bytes);
  encode_header(spec, 0, buffer->data);
  uint8_t* data = buffer->data + kHeaderBytes;
  if (tensor.is_contiguous()) {
    copy_bytes(data, {bytes_of(tensor), spec.bytes});
  } else {
    const at::NoGradGuard no_grad;
    at::from_blob(data, tensor.sizes(), tensor.options().requires_grad(false)).copy_(tensor);
  }
  return buffer;
}

base::BufferPtr header_only(Core& core, const OpSpec& spec, int step) {
  base::BufferPtr buffer = core.allocate(kHeaderBytes);
  encode_header(spec, step, buffer->data);
  return buffer;
}

}  // namespace

void BarrierOperation::start() { core().send_to_all(number(), 0, header_only(core(), spec(), 0)); }

bool BroadcastOperation::is_root() const { return core().rank() == static_cast<int>(spec().root); }

bool BroadcastOperation::expects(int, int from) const {
  return from != core().rank() && (is_root() || from == static_cast<int>(spec().root));
}

size_t BroadcastOperation::expected_bytes(int, int) const { return is_root() ? 0 : spec().bytes; }

void BroadcastOperation::start() {
  if (is_root()) {
    core().send_to_all(number(), 0, pack(core(), spec(), tensor_));
  } else {
    base::BufferPtr header = header_only(core(), spec(), 0);
    const std::span<const uint8_t> piece(header->data, header->size);
    core().send(static_cast<int>(spec().root), number(), 0, std::span(&piece, 1), header);
  }
}

void BroadcastOperation::run_step(int step) {
  if (!is_root()) write_tensor(tensor_, input(step, static_cast<int>(spec().root)));
}

void AllgatherOperation::start() {
  sent_ = pack(core(), spec(), input_);
  core().send_to_all(number(), 0, sent_);
}

void AllgatherOperation::run_step(int step) {
  for (int from = 0; from < core().size(); ++from) {
    const std::span<const uint8_t> own(sent_->data + kHeaderBytes, spec().bytes);
    write_tensor(outputs_[static_cast<size_t>(from)],
                 from == core().rank() ? own : input(step, from));
  }
}

void DirectAllreduce::start() {
  sent_ = pack(core(), spec(), tensor_);
  core().send_to_all(number(), 0, sent_);
}

void DirectAllreduce::run_step(int step) {
  std::vector<const uint8_t*> inputs;
  inputs.reserve(static_cast<size_t>(core().size()));
  for (int from = 0; from < core().size(); ++from) {
    inputs.push_back(from == core().rank() ? sent_->data + kHeaderBytes : input(step, from).data());
  }
  const auto count = static_cast<size_t>(tensor_.numel());
  if (tensor_.is_contiguous()) {
    reduce(spec().reduce_op, spec().dtype, inputs, count, bytes_of(tensor_));
  } else {
    base::BufferPtr result = core().allocate(spec().bytes);
    reduce(spec().reduce_op, spec().dtype, inputs, count, result->data);
    write_tensor(tensor_, {result->data, spec().bytes});
  }
}

// Equal parts, begun at multiples of 64 bytes; the last ones may be short or empty.
ChunkedAllreduce::Range ChunkedAllreduce::chunk(int rank) const {
  const size_t item = c10::elementSize(spec().dtype);
  const size_t total = spec().bytes / item;
  const auto ranks = static_cast<size_t>(core().size());
  const size_t line = std::max<size_t>(64 / item, 1);
  const size_t each = ((total + ranks - 1) / ranks + line - 1) / line * line;
  const size_t begin = std::min(total, static_cast<size_t>(rank) * each);
  return {begin, std::min(each, total - begin)};
}

size_t ChunkedAllreduce::expected_bytes(int step, int from) const {
  return chunk(step == 0 ? core().rank() : from).count * c10::elementSize(spec().dtype);
}

void ChunkedAllreduce::start() {
  const at::NoGradGuard no_grad;
  work_ = tensor_.contiguous();
  struct Sent {
    alignas(64) uint8_t header[kHeaderBytes];
    at::Tensor tensor;
  };
  auto sent = std::make_shared<Sent>();
  sent->tensor = work_;
  encode_header(spec(), 0, sent->header);
  const size_t item = c10::elementSize(spec().dtype);
  for (int i = 1; i < core().size(); ++i) {
    const int to = (core().rank() + i) % core().size();
    const Range range = chunk(to);
    const std::span<const uint8_t> pieces[] = {
        {sent->header, kHeaderBytes}, {bytes_of(work_) + range.begin * item, range.count * item}};
    core().send(to, number(), 0, pieces, sent);
  }
}

// In step 0 reduces its own chunk and sends it to all, in step 1 collects the others'.
void ChunkedAllreduce::run_step(int step) {
  const size_t item = c10::elementSize(spec().dtype);
  if (step == 0) {
    const Range own = chunk(core().rank());
    std::vector<const uint8_t*> inputs;
    for (int from = 0; from < core().size(); ++from) {
      inputs.push_back(from == core().rank() ? bytes_of(work_) + own.begin * item
                                             : input(0, from).data());
    }
    sent_ = core().allocate(kHeaderBytes + own.count * item);
    encode_header(spec(), 1, sent_->data);
    reduce(spec().reduce_op, spec().dtype, inputs, own.count, sent_->data + kHeaderBytes);
    return core().send_to_all(number(), 1, sent_);
  }
  for (int from = 0; from < core().size(); ++from) {
    const Range range = chunk(from);
    const std::span<const uint8_t> own(sent_->data + kHeaderBytes, range.count * item);
    copy_bytes(bytes_of(work_) + range.begin * item, from == core().rank() ? own : input(1, from));
  }
  if (work_.is_same(tensor_)) return;
  const at::NoGradGuard no_grad;
  tensor_.copy_(work_);
}

}  // namespace distrain::collective

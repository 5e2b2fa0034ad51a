#include "operations.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/core/grad_mode.h>

#include "halves.h"

namespace distrain::collective {

// Memory that is being sent never changes. Small data is copied behind its header into one buffer
// for all ranks. Step 1 of the chunked allreduce sends chunk j from the caller's tensor without a
// copy, because only the result of rank j, which must have received it before, overwrites chunk j.

namespace {

// Fits in the first-level cache. The constant trip count lets -O2 vectorise.
constexpr size_t kBlock = 512;

// Sums and products of integers are computed in unsigned types of at least 32 bits, which wrap.
template <class T>
using Wide = std::conditional_t<!std::is_integral_v<T>, T,
                                std::conditional_t<(sizeof(T) > 4), uint64_t, uint32_t>>;

// `a` becomes the result. `T` may be a vector of floats.
constexpr auto kSum = []<class T>(T& a, const T& b) { a = T(Wide<T>(a) + Wide<T>(b)); };
constexpr auto kProduct = []<class T>(T& a, const T& b) { a = T(Wide<T>(a) * Wide<T>(b)); };
// `a != a` is true only for NaN.
constexpr auto kMin = []<class T>(T& a, const T& b) { a = ((a != a) | (a < b)) ? a : b; };
constexpr auto kMax = []<class T>(T& a, const T& b) { a = ((a != a) | (a > b)) ? a : b; };
// Reduce bools as bytes, because a peer may send other bytes than 0 and 1.
constexpr auto kOr = [](uint8_t& a, uint8_t b) { a = (a | b) != 0; };
constexpr auto kAnd = [](uint8_t& a, uint8_t b) { a = a != 0 && b != 0; };

template <class T>
using Accumulator = std::conditional_t<HalfType<T>, float, T>;

template <class T, class Op>
[[gnu::always_inline]] inline void reduce_some(Op op, std::span<const T* const> inputs,
                                               size_t begin, size_t count, size_t divisor, T* out) {
  using A = Accumulator<T>;
  A sum[kBlock];
  const T* first = inputs[0] + begin;
  if (inputs.size() == 1) {
    for (size_t i = 0; i < count; ++i) sum[i] = static_cast<A>(first[i]);
  } else {
    const T* second = inputs[1] + begin;
    for (size_t i = 0; i < count; ++i) {
      sum[i] = static_cast<A>(first[i]);
      op(sum[i], static_cast<A>(second[i]));
    }
  }
  for (const T* input : inputs.subspan(std::min<size_t>(inputs.size(), 2))) {
    input += begin;
    for (size_t i = 0; i < count; ++i) op(sum[i], static_cast<A>(input[i]));
  }
  if constexpr (std::is_floating_point_v<A>) {
    if (divisor != 1) {
      for (size_t i = 0; i < count; ++i) sum[i] /= static_cast<A>(divisor);
    }
  }
  // Each element is read from all inputs before it is written, so `out` may be one of them.
  for (size_t i = 0; i < count; ++i) out[begin + i] = static_cast<T>(sum[i]);
}

template <class T, class Op>
void reduce_all(Op op, std::span<const uint8_t* const> inputs, size_t count, bool average,
                uint8_t* out) {
  const std::span<const T* const> typed(reinterpret_cast<const T* const*>(inputs.data()),
                                        inputs.size());
  auto* result = reinterpret_cast<T*>(out);
  const size_t divisor = average ? inputs.size() : 1;
  size_t begin = 0;
#ifdef __x86_64__
  if constexpr (HalfType<T>) begin = reduce_by_vectors(op, typed, count, divisor, result);
#endif
  for (; begin + kBlock <= count; begin += kBlock) {
    reduce_some<T>(op, typed, begin, kBlock, divisor, result);
  }
  if (begin < count) reduce_some<T>(op, typed, begin, count - begin, divisor, result);
}

template <class T>
void reduce_typed(ReduceOp op, std::span<const uint8_t* const> inputs, size_t count, uint8_t* out) {
  if (op == ReduceOp::PRODUCT) return reduce_all<T>(kProduct, inputs, count, false, out);
  if (op == ReduceOp::MIN) return reduce_all<T>(kMin, inputs, count, false, out);
  if (op == ReduceOp::MAX) return reduce_all<T>(kMax, inputs, count, false, out);
  reduce_all<T>(kSum, inputs, count, op == ReduceOp::AVG, out);
}

void copy_bytes(uint8_t* to, std::span<const uint8_t> from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

// Returns a tensor of the shape and dtype of `like` over the bytes at `data`.
at::Tensor tensor_at(const uint8_t* data, const at::Tensor& like) {
  return at::from_blob(const_cast<uint8_t*>(data), like.sizes(),
                       like.options().requires_grad(false));
}

}  // namespace

void write_tensor(const at::Tensor& tensor, std::span<const uint8_t> data) {
  if (tensor.is_contiguous()) return copy_bytes(bytes_of(tensor), data);
  const at::NoGradGuard no_grad;
  tensor.copy_(tensor_at(data.data(), tensor));
}

base::BufferPtr pack(Core& core, const OpSpec& spec, const at::Tensor& tensor) {
  base::BufferPtr buffer = core.allocate(kHeaderBytes + tensor.nbytes());
  encode_header(spec, 0, buffer->data);
  uint8_t* data = buffer->data + kHeaderBytes;
  if (tensor.is_contiguous()) {
    copy_bytes(data, {bytes_of(tensor), tensor.nbytes()});
  } else {
    const at::NoGradGuard no_grad;
    tensor_at(data, tensor).copy_(tensor);
  }
  return buffer;
}

base::BufferPtr header_only(Core& core, const OpSpec& spec) {
  base::BufferPtr buffer = core.allocate(kHeaderBytes);
  encode_header(spec, 0, buffer->data);
  return buffer;
}

namespace {

class Barrier final : public Operation {
 public:
  using Operation::Operation;

 private:
  void start() override { core().send_to_all(number(), 0, header_only(core(), spec())); }
  void run_step(int) override {}
};

class Broadcast final : public Operation {
 public:
  Broadcast(const OpSpec& spec, base::TimePoint deadline, at::Tensor tensor)
      : Operation(spec, deadline), tensor_(std::move(tensor)) {}

 private:
  int root() const { return static_cast<int>(spec().root); }
  bool is_root() const { return core().rank() == root(); }
  bool expects(int, int from) const override {
    return from != core().rank() && (is_root() || from == root());
  }
  size_t expected_bytes(int, int) const override { return is_root() ? 0 : spec().bytes; }

  void start() override {
    if (is_root()) return core().send_to_all(number(), 0, pack(core(), spec(), tensor_));
    const base::BufferPtr header = header_only(core(), spec());
    const std::span<const uint8_t> piece(header->data, header->size);
    core().send(root(), number(), 0, std::span(&piece, 1), header);
  }
  void run_step(int step) override {
    if (!is_root()) write_tensor(tensor_, input(step, root()));
  }

  const at::Tensor tensor_;
};

// An operation in which each rank sends its whole tensor to all other ranks.
class Exchange : public Operation {
 public:
  Exchange(const OpSpec& spec, base::TimePoint deadline, at::Tensor tensor)
      : Operation(spec, deadline), tensor_(std::move(tensor)) {}

 protected:
  // Returns the data of group rank `from`, which may be this rank.
  std::span<const uint8_t> data_of(int from) const {
    if (from != core().rank()) return input(0, from);
    return {sent_->data + kHeaderBytes, spec().bytes};
  }

  const at::Tensor tensor_;

 private:
  void start() override {
    sent_ = pack(core(), spec(), tensor_);
    core().send_to_all(number(), 0, sent_);
  }

  base::BufferPtr sent_;
};

class Allgather final : public Exchange {
 public:
  Allgather(const OpSpec& spec, base::TimePoint deadline, const at::Tensor& input,
            std::vector<at::Tensor> outputs)
      : Exchange(spec, deadline, input), outputs_(std::move(outputs)) {}

 private:
  void run_step(int) override {
    for (int from = 0; from < core().size(); ++from) {
      write_tensor(outputs_[static_cast<size_t>(from)], data_of(from));
    }
  }

  const std::vector<at::Tensor> outputs_;
};

class DirectAllreduce final : public Exchange {
 public:
  using Exchange::Exchange;

 private:
  void run_step(int) override {
    std::vector<const uint8_t*> inputs;
    for (int from = 0; from < core().size(); ++from) inputs.push_back(data_of(from).data());
    const auto count = static_cast<size_t>(tensor_.numel());
    if (tensor_.is_contiguous()) {
      return reduce(spec().reduce_op, spec().dtype, inputs, count, bytes_of(tensor_));
    }
    const base::BufferPtr result = core().allocate(spec().bytes);
    reduce(spec().reduce_op, spec().dtype, inputs, count, result->data);
    write_tensor(tensor_, {result->data, spec().bytes});
  }
};

// Also the barrier of a large group, without a tensor.
class RootedAllreduce final : public Operation {
 public:
  RootedAllreduce(const OpSpec& spec, base::TimePoint deadline, int rank, at::Tensor tensor)
      : Operation(spec, deadline, rank == 0 ? 1 : 2, rank == 0 ? 0 : 1),
        tensor_(std::move(tensor)) {}

 private:
  bool is_root() const { return core().rank() == 0; }
  bool expects(int step, int from) const override {
    return is_root() ? from != 0 : step == 1 && from == 0;
  }
  bool is_awaited(int) const override { return is_root(); }
  bool tells_others() const override { return is_root(); }

  void start() override {
    sent_ = tensor_.defined() ? pack(core(), spec(), tensor_) : header_only(core(), spec());
    if (is_root()) return;
    const std::span<const uint8_t> piece(sent_->data, sent_->size);
    core().send(0, number(), 0, std::span(&piece, 1), sent_);
  }

  void run_step(int) override {
    std::span<const uint8_t> result;
    if (is_root()) {
      uint8_t* const own = sent_->data + kHeaderBytes;
      std::vector<const uint8_t*> inputs{own};
      for (int from = 1; from < core().size(); ++from) inputs.push_back(input(0, from).data());
      if (tensor_.defined()) {
        reduce(spec().reduce_op, spec().dtype, inputs, static_cast<size_t>(tensor_.numel()), own);
      }
      encode_header(spec(), 1, sent_->data);
      core().send_to_all(number(), 1, sent_);
      result = {own, spec().bytes};
    } else {
      result = input(1, 0);
    }
    if (tensor_.defined()) write_tensor(tensor_, result);
  }

  const at::Tensor tensor_;
  base::BufferPtr sent_;
};

class ChunkedAllreduce final : public Operation {
 public:
  ChunkedAllreduce(const OpSpec& spec, base::TimePoint deadline, at::Tensor tensor)
      : Operation(spec, deadline, 2), tensor_(std::move(tensor)) {}

 private:
  ByteRange range(int rank) const { return chunk_of(spec(), rank, core().size()); }
  std::span<uint8_t> chunk(int rank) const {
    const auto [begin, size] = range(rank);
    return {bytes_of(work_) + begin, size};
  }

  size_t expected_bytes(int step, int from) const override {
    return range(step == 0 ? core().rank() : from).size;
  }
  size_t sent_bytes(int to) const override { return range(to).size; }

  void start() override {
    const at::NoGradGuard no_grad;
    work_ = tensor_.contiguous();
    struct Sent {
      alignas(64) uint8_t header[kHeaderBytes];
      at::Tensor tensor;
    };
    auto sent = std::make_shared<Sent>();
    sent->tensor = work_;
    encode_header(spec(), 0, sent->header);
    for (int i = 1; i < core().size(); ++i) {
      const int to = (core().rank() + i) % core().size();
      const std::span<const uint8_t> pieces[] = {sent->header, chunk(to)};
      core().send(to, number(), 0, pieces, sent);
    }
  }

  // In step 0 reduces its own chunk and sends it to all, in step 1 collects the others'.
  void run_step(int step) override {
    const std::span<uint8_t> own = chunk(core().rank());
    if (step == 0) {
      std::vector<const uint8_t*> inputs;
      for (int from = 0; from < core().size(); ++from) {
        inputs.push_back(from == core().rank() ? own.data() : input(0, from).data());
      }
      sent_ = core().allocate(kHeaderBytes + own.size());
      encode_header(spec(), 1, sent_->data);
      reduce(spec().reduce_op, spec().dtype, inputs, own.size() / c10::elementSize(spec().dtype),
             sent_->data + kHeaderBytes);
      return core().send_to_all(number(), 1, sent_);
    }
    for (int from = 0; from < core().size(); ++from) {
      copy_bytes(chunk(from).data(), from == core().rank()
                                         ? std::span(sent_->data + kHeaderBytes, own.size())
                                         : input(1, from));
    }
    if (work_.is_same(tensor_)) return;
    const at::NoGradGuard no_grad;
    tensor_.copy_(work_);
  }

  const at::Tensor tensor_;  // the caller's
  at::Tensor work_;          // the same if that is contiguous
  base::BufferPtr sent_;
};

}  // namespace

void reduce(ReduceOp op, c10::ScalarType dtype, std::span<const uint8_t* const> inputs,
            size_t count, uint8_t* out) {
  if (c10::isComplexType(dtype)) {
    dtype = c10::toRealValueType(dtype);
    count *= 2;
  }
  if (dtype == c10::ScalarType::Bool) {
    return op == ReduceOp::SUM || op == ReduceOp::MAX
               ? reduce_all<uint8_t>(kOr, inputs, count, false, out)
               : reduce_all<uint8_t>(kAnd, inputs, count, false, out);
  }
  AT_DISPATCH_V2(dtype, "reduce", AT_WRAP([&] { reduce_typed<scalar_t>(op, inputs, count, out); }),
                 AT_EXPAND(AT_ALL_TYPES), AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), at::kHalf,
                 at::kBFloat16);
}

void reduce_into(const at::Tensor& result, ReduceOp op, std::span<const uint8_t* const> inputs,
                 Core& core) {
  const auto count = static_cast<size_t>(result.numel());
  if (result.is_contiguous()) {
    return reduce(op, result.scalar_type(), inputs, count, bytes_of(result));
  }
  const base::BufferPtr buffer = core.allocate(result.nbytes());
  reduce(op, result.scalar_type(), inputs, count, buffer->data);
  write_tensor(result, {buffer->data, result.nbytes()});
}

ByteRange chunk_of(const OpSpec& spec, int index, int count) {
  const size_t item = c10::elementSize(spec.dtype);
  const size_t total = spec.bytes / item;
  const auto parts = static_cast<size_t>(count);
  const size_t line = std::max<size_t>(64 / item, 1);
  const size_t each = ((total + parts - 1) / parts + line - 1) / line * line;
  const size_t begin = std::min(total, static_cast<size_t>(index) * each);
  return {begin * item, std::min(each, total - begin) * item};
}

bool can_reduce(ReduceOp op, c10::ScalarType dtype) {
  using enum c10::ScalarType;
  constexpr std::array kReal = {Double, Float, Half, BFloat16};
  if (std::ranges::find(kReal, dtype) != kReal.end()) return op <= ReduceOp::MAX;
  if (dtype == ComplexFloat || dtype == ComplexDouble) {
    return op == ReduceOp::SUM || op == ReduceOp::AVG;
  }
  return c10::isIntegralType(dtype, /*includeBool=*/true) && op <= ReduceOp::MAX &&
         op != ReduceOp::AVG;
}

std::shared_ptr<Operation> make_operation(const OpSpec& spec, base::TimePoint deadline, int rank,
                                          int size, const at::Tensor& tensor,
                                          std::vector<at::Tensor> outputs) {
  const bool is_rooted = size > kMostDirectRanks &&
                         (spec.kind == OpKind::kBarrier || spec.kind == OpKind::kAllreduceDirect);
  if (is_rooted) return std::make_shared<RootedAllreduce>(spec, deadline, rank, tensor);
  switch (spec.kind) {
    case OpKind::kBarrier:
      return std::make_shared<Barrier>(spec, deadline);
    case OpKind::kBroadcast:
      return std::make_shared<Broadcast>(spec, deadline, tensor);
    case OpKind::kAllgather:
      return std::make_shared<Allgather>(spec, deadline, tensor, std::move(outputs));
    case OpKind::kAllreduceDirect:
      return std::make_shared<DirectAllreduce>(spec, deadline, tensor);
    case OpKind::kAllreduceChunked:
      return std::make_shared<ChunkedAllreduce>(spec, deadline, tensor);
    default:
      break;
  }
  throw base::Exception(base::ErrorKind::kInternal, "no operation of this kind");
}

}  // namespace distrain::collective

#include "operations.h"

#include <bit>

#include <ATen/Dispatch_v2.h>
#include <ATen/core/grad_mode.h>

#include "halves.h"

namespace distrain::collective {

// Memory that is being sent never changes. Data is copied behind its header into one buffer for all
// ranks that get it, except in chunked.cpp.

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
  // Each element is read from all inputs before it is written, so `out` may be one of them.
  const auto write = [&](auto quotient) {
    for (size_t i = 0; i < count; ++i) out[begin + i] = static_cast<T>(quotient(sum[i]));
  };
  if (divisor == 1) return write([](A x) { return x; });
  const A number = static_cast<A>(divisor), inverse = 1 / number;
  // The inverse of a power of 2 is exact, so the product has the quotient's bits, but is faster.
  if (std::has_single_bit(divisor)) return write([=](A x) { return x * inverse; });
  write([=](A x) { return x / number; });
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
  reduce_all<T>(kSum, inputs, count, op == ReduceOp::AVG && !std::is_integral_v<T>, out);
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
  base::BufferPtr buffer = core.allocate(kHeaderBytes + (tensor.defined() ? tensor.nbytes() : 0));
  encode_header(spec, 0, buffer->data);
  uint8_t* data = buffer->data + kHeaderBytes;
  if (!tensor.defined()) return buffer;
  if (tensor.is_contiguous()) {
    copy_bytes(data, {bytes_of(tensor), tensor.nbytes()});
  } else {
    const at::NoGradGuard no_grad;
    tensor_at(data, tensor).copy_(tensor);
  }
  return buffer;
}

namespace {

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
    sent_ = pack(core(), spec(), tensor_);
    if (!is_root()) core().send(0, number(), 0, sent_);
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
                                          int size, const Hosts& hosts, const at::Tensor& tensor) {
  if (spec.kind == OpKind::kAllreduceChunked || spec.kind == OpKind::kAllreduceOverHosts) {
    return make_chunked_allreduce(spec, deadline, rank, size, hosts, tensor);
  }
  if (size > kMostDirectRanks)
    return std::make_shared<RootedAllreduce>(spec, deadline, rank, tensor);
  const auto ranks = static_cast<size_t>(size);
  return make_exchange(
      spec, deadline, rank,
      {.sends = Tensors(ranks, tensor), .outputs = Tensors(ranks), .result = tensor});
}

}  // namespace distrain::collective

// What the graphs of these tests are made of: operations that run on "the other rank". Each runtime
// implements them in its own way; the graphs (graphs.h) do not know which one they run on.
#pragma once

#include <ATen/ATen.h>

namespace distrain::oracle {

class RemoteOps {
 public:
  virtual ~RemoteOps() = default;

  /// x * y and x + y, computed over there.
  virtual at::Tensor mul(const at::Tensor& x, const at::Tensor& y) = 0;
  virtual at::Tensor add(const at::Tensor& x, const at::Tensor& y) = 0;

  /// nested_value() over there; the add within it is a call from there back to here (A→B→A).
  virtual at::Tensor nested(const at::Tensor& x, const at::Tensor& y) = 0;

  /// ((x * y) + x) * y in three calls whose results stay over there until the last is fetched:
  /// remote() and RRef arguments, in a runtime that has them.
  virtual at::Tensor chain(const at::Tensor& x, const at::Tensor& y) {
    return mul(add(mul(x, y), x), y);
  }

  /// The sums of bags of rows of `weight`, which travels there; the gradient that comes back is
  /// sparse if `sparse`.
  virtual at::Tensor embedding_bag(const at::Tensor& weight, const at::Tensor& indices,
                                   const at::Tensor& offsets, bool sparse) = 0;

  /// The same of the table that lives over there; its gradient is sparse and stays there.
  virtual at::Tensor lookup(const at::Tensor& indices, const at::Tensor& offsets) = 0;
};

/// What `nested` computes: x is used before and after the hop, y in two places.
template <class Add>
at::Tensor nested_value(const at::Tensor& x, const at::Tensor& y, Add add) {
  return add(x * y, x) * y;
}

/// What `embedding_bag` and `lookup` compute (mode sum).
inline at::Tensor embedding_bag_value(const at::Tensor& weight, const at::Tensor& indices,
                                      const at::Tensor& offsets, bool sparse) {
  constexpr int64_t kSum = 0;
  return std::get<0>(at::embedding_bag(weight, indices, offsets, false, kSum, sparse));
}

/// Everything here, in plain autograd: what every runtime must agree with.
class LocalOps final : public RemoteOps {
 public:
  /// `table` is what lookup() reads.
  explicit LocalOps(at::Tensor table) : table_(std::move(table)) {}

  at::Tensor mul(const at::Tensor& x, const at::Tensor& y) override { return x * y; }
  at::Tensor add(const at::Tensor& x, const at::Tensor& y) override { return x + y; }
  at::Tensor nested(const at::Tensor& x, const at::Tensor& y) override {
    return nested_value(x, y, [](const at::Tensor& a, const at::Tensor& b) { return a + b; });
  }
  at::Tensor embedding_bag(const at::Tensor& weight, const at::Tensor& indices,
                           const at::Tensor& offsets, bool sparse) override {
    return embedding_bag_value(weight, indices, offsets, sparse);
  }
  at::Tensor lookup(const at::Tensor& indices, const at::Tensor& offsets) override {
    return embedding_bag_value(table_, indices, offsets, true);
  }

 private:
  at::Tensor table_;
};

}  // namespace distrain::oracle

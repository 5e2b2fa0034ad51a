// The operations of the test graphs, which run on "the other rank". Each runtime implements them in
// its own way; the graphs (graphs.h) do not depend on the runtime.
#pragma once

#include <ATen/ATen.h>

namespace distrain::oracle {

class RemoteOps {
 public:
  virtual ~RemoteOps() = default;

  /// Computes x * y or x + y on the other rank.
  virtual at::Tensor mul(const at::Tensor& x, const at::Tensor& y) = 0;
  virtual at::Tensor add(const at::Tensor& x, const at::Tensor& y) = 0;

  /// Runs nested_value() on the other rank, which calls back to this rank for the sum (A→B→A).
  virtual at::Tensor nested(const at::Tensor& x, const at::Tensor& y) = 0;

  /// Computes ((x * y) + x) * y in three calls whose results stay on the other rank until the last
  /// one is fetched, with remote() and RRef arguments if the runtime has them.
  virtual at::Tensor chain(const at::Tensor& x, const at::Tensor& y) {
    return mul(add(mul(x, y), x), y);
  }

  /// Sends `weight` to the other rank and returns sums of bags of its rows. The gradient of
  /// `weight` is sparse if `sparse`.
  virtual at::Tensor embedding_bag(const at::Tensor& weight, const at::Tensor& indices,
                                   const at::Tensor& offsets, bool sparse) = 0;

  /// Acts as embedding_bag(), but on a table of the other rank. The sparse gradient stays there.
  virtual at::Tensor lookup(const at::Tensor& indices, const at::Tensor& offsets) = 0;
};

/// Computes nested(): uses x before and after the call, and y in two places.
template <class Add>
at::Tensor nested_value(const at::Tensor& x, const at::Tensor& y, Add add) {
  return add(x * y, x) * y;
}

/// Computes embedding_bag() and lookup() (mode sum).
inline at::Tensor embedding_bag_value(const at::Tensor& weight, const at::Tensor& indices,
                                      const at::Tensor& offsets, bool sparse) {
  constexpr int64_t kSum = 0;
  return std::get<0>(at::embedding_bag(weight, indices, offsets, false, kSum, sparse));
}

/// Runs all operations locally with plain autograd, as the reference for every runtime.
class LocalOps final : public RemoteOps {
 public:
  /// lookup() reads `table`.
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

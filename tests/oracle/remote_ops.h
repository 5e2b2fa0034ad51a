// The operations of the test graphs, which run on "the other rank". Each runtime implements the
// operations in its own way, so the graphs (graphs.h) do not depend on a runtime.
#pragma once

#include <ATen/ATen.h>

namespace distrain::oracle {

class RemoteOps {
 public:
  virtual ~RemoteOps() = default;

  /// Computes x * y on the other rank; add() computes x + y.
  virtual at::Tensor mul(const at::Tensor& x, const at::Tensor& y) = 0;
  virtual at::Tensor add(const at::Tensor& x, const at::Tensor& y) = 0;

  /// Computes nested_value() on the other rank, which calls this rank for the sum (A→B→A).
  virtual at::Tensor nested(const at::Tensor& x, const at::Tensor& y) = 0;

  /// Computes ((x * y) + x) * y in three calls. If the runtime has remote() and RRef arguments,
  /// only the last result is fetched, and the others stay remote.
  virtual at::Tensor chain(const at::Tensor& x, const at::Tensor& y) {
    return mul(add(mul(x, y), x), y);
  }

  /// Sends `weight` to the other rank, which computes sums of bags of its rows. If `sparse`, the
  /// gradient of `weight` is sparse.
  virtual at::Tensor embedding_bag(const at::Tensor& weight, const at::Tensor& indices,
                                   const at::Tensor& offsets, bool sparse) = 0;

  /// Computes sums of bags of rows of the other rank's table. The table's gradient stays there.
  virtual at::Tensor lookup(const at::Tensor& indices, const at::Tensor& offsets) = 0;
};

/// Computes x * y + x, with `add` for the sum, and multiplies it by y. Uses both x and y twice.
template <class Add>
at::Tensor nested_value(const at::Tensor& x, const at::Tensor& y, Add add) {
  return add(x * y, x) * y;
}

/// Returns the sums of bags of rows of `weight`.
inline at::Tensor embedding_bag_value(const at::Tensor& weight, const at::Tensor& indices,
                                      const at::Tensor& offsets, bool sparse) {
  constexpr int64_t kSum = 0;
  return std::get<0>(at::embedding_bag(weight, indices, offsets, false, kSum, sparse));
}

/// Runs all operations locally with plain autograd, as the reference for every runtime.
class LocalOps final : public RemoteOps {
 public:
  /// Sets the table that lookup() reads.
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

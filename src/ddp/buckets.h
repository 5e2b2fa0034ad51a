#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/collective/pending.h"

namespace distrain::ddp {

/// Indices into `parameters`, bucket by bucket: those of one dtype in the order of `order`, cut
/// before a bucket would exceed the cap (the first of each dtype: `first_bytes`); the buckets in
/// the order in which their last member comes. Never empty buckets; a parameter larger than the cap
/// has one for itself.
std::vector<std::vector<size_t>> assign_buckets(const std::vector<at::Tensor>& parameters,
                                                const std::vector<int64_t>& order,
                                                size_t first_bytes, size_t cap_bytes);

/// The gradients of some parameters side by side in one flat tensor.
class Bucket {
 public:
  Bucket(std::vector<size_t> members, const std::vector<at::Tensor>& parameters);

  const std::vector<size_t>& members() const { return members_; }
  const at::Tensor& flat() const { return flat_; }
  /// The gradient of member `slot`, of its parameter's shape, within `flat`.
  const at::Tensor& view(size_t slot) const { return views_[slot]; }

  /// Prepares for a pass. Takes new memory if views given away in an earlier one are still in use.
  void begin();
  /// `gradient` is of the parameter's shape and dtype.
  void store(size_t slot, const at::Tensor& gradient);
  /// Copies the gradient of member `slot` to `to`, of the same shape and dtype.
  void load(size_t slot, const at::Tensor& to) const;
  bool complete() const { return missing_ == 0; }

  collective::Pending pending;  ///< the allreduce of `flat`, once it has started

 private:
  void allocate();
  bool is_shared() const;

  std::vector<size_t> members_;
  std::vector<at::Tensor> like_;  // the parameters
  at::Tensor flat_;
  std::vector<at::Tensor> views_;
  size_t missing_ = 0;
};

}  // namespace distrain::ddp

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "distrain/collective/reduce_group.h"
#include "distrain/rpc/device.h"

namespace distrain::ddp {

/// Indices into `parameters`, bucket by bucket: those of one dtype and device in the order of
/// `order`, cut before a bucket would exceed the cap (the first of each kind: `first_bytes`); the
/// buckets in the order in which their last member comes. A parameter above the cap has its own.
std::vector<std::vector<size_t>> assign_buckets(const std::vector<at::Tensor>& parameters,
                                                const std::vector<int64_t>& order,
                                                size_t first_bytes, size_t cap_bytes);

/// The gradients of some parameters side by side in one flat tensor on their device. One thread at
/// a time; functions work in its current stream, in order across streams.
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
  bool complete() const { return missing_ == 0; }
  /// To be called when complete: starts the mean over the group behind what all threads stored.
  void start(collective::ReduceGroup& group, const collective::PassNumber& pass);
  /// Waits for the mean. Throws as ReduceWork::wait does.
  void wait();
  /// Copies the mean of member `slot` to `to`, of the same shape and dtype.
  void load(size_t slot, const at::Tensor& to) const;
  /// Ends a pass: memory is used again behind what this thread's current stream was given.
  void end();
  /// Ends a pass that failed: the memory may still be in use and is taken no more.
  void drop();

 private:
  void allocate();
  void make_writer(const c10::Stream& stream);

  std::vector<size_t> members_;
  std::vector<at::Tensor> like_;  // the parameters
  at::Tensor flat_;
  std::vector<at::Tensor> views_;
  size_t missing_ = 0;
  collective::ReduceGroup::WorkPtr work_;
  // Of a device only.
  c10::Device device_;
  rpc::StreamPoint free_;             // what the last pass did with the memory
  std::vector<c10::Stream> writers_;  // that gradients of this pass were stored in
};

}  // namespace distrain::ddp

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "distrain/rpc/device.h"

namespace distrain::ddp {

/// Groups `parameters` into buckets and returns the indices in each bucket. The parameters of a
/// bucket have one dtype and device and follow `order`. A bucket holds at most `cap_bytes` (the
/// first of a dtype and device `first_bytes`), or one larger parameter. The buckets are sorted by
/// the position of their last parameter in `order`.
std::vector<std::vector<size_t>> assign_buckets(const std::vector<at::Tensor>& parameters,
                                                const std::vector<int64_t>& order,
                                                size_t first_bytes, size_t cap_bytes);

/// The gradients of several parameters in one flat tensor on their device. Used by one thread at a
/// time; functions work in the thread's current stream and wait for the streams of earlier calls.
class Bucket {
 public:
  /// Returns a flat tensor of that many elements. By default at::empty().
  using Allocate = std::function<at::Tensor(int64_t, const at::TensorOptions&)>;
  Bucket(std::vector<size_t> members, const std::vector<at::Tensor>& parameters,
         Allocate allocate = {})
      : allocate_(std::move(allocate)),
        members_(std::move(members)),
        device_(parameters[members_.front()].device()) {
    for (size_t index : members_) like_.push_back(parameters[index]);
  }

  const std::vector<size_t>& members() const { return members_; }
  const std::vector<at::Tensor>& parameters() const { return like_; }
  const at::Tensor& flat() const { return flat_; }
  /// Returns the part of flat() for member `slot`, in the shape of the member's parameter.
  const at::Tensor& view(size_t slot) const { return views_[slot]; }
  const std::vector<at::Tensor>& views() const { return views_; }

  /// Prepares for a pass. Allocates new memory if views of an earlier pass are still in use, except
  /// as the `.grad` of their parameters if `is_plain`: a plain pass adds to them.
  void begin(bool is_plain = false);
  /// Copies `gradient`, of the parameter's shape and dtype, into flat(), unless it is view(slot).
  void store(size_t slot, const at::Tensor& gradient);
  bool complete() const { return missing_ == 0; }
  /// Calls `start` after the work of all store() calls. Requires complete().
  void start(const std::function<std::future<at::Tensor>()>& start);
  /// Waits until flat() has the result of start(). Throws the future's error.
  void wait();
  /// Copies the mean of member `slot` to `to`, of the same shape.
  void load(size_t slot, const at::Tensor& to) const;
  /// Ends a pass. The next pass waits for this thread's current stream before it uses the memory.
  void end() {
    if (device_.is_cpu()) return;
    rpc::use_on_stream(flat_, rpc::current_stream(device_));
    free_ = rpc::StreamPoint::mark(device_);
  }
  /// Ends a failed pass. Its allreduce may still use the memory, so the next pass uses new memory,
  /// and a `.grad` in this memory is set to none.
  void drop();

 private:
  void allocate();
  void make_writer(const c10::Stream& stream) {
    if (std::find(writers_.begin(), writers_.end(), stream) != writers_.end()) return;
    free_.make_wait(stream);
    rpc::use_on_stream(flat_, stream);
    writers_.push_back(stream);
  }

  Allocate allocate_;
  std::vector<size_t> members_;
  std::vector<at::Tensor> like_;  // the members' parameters
  at::Tensor flat_;
  std::vector<at::Tensor> views_;
  size_t missing_ = 0;
  std::future<at::Tensor> result_;
  c10::Device device_;
  rpc::StreamPoint free_;             // end of the last pass's work on the memory
  std::vector<c10::Stream> writers_;  // streams that store gradients of this pass
};

}  // namespace distrain::ddp

#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

#include "distrain/collective/reduce_group.h"

namespace distrain::ddp {

/// Returns buckets of indices into `parameters`. A bucket has parameters of one dtype and device in
/// the order of `order`, with at most `cap_bytes` (the first bucket of a dtype and device: with
/// `first_bytes`) or one larger parameter. Sorts the buckets by their last member's place.
inline std::vector<std::vector<size_t>> assign_buckets(const std::vector<at::Tensor>& parameters,
                                                       const std::vector<int64_t>& order,
                                                       size_t first_bytes, size_t cap_bytes) {
  struct Open {
    std::vector<size_t> members;
    size_t bytes = 0;
    size_t last = 0;  // the place of its last member in `order`
    size_t limit = 0;
  };
  using Kind = std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  std::map<Kind, Open> open;
  std::vector<Open> closed;
  for (size_t place = 0; place < order.size(); ++place) {
    const auto index = static_cast<size_t>(order[place]);
    const at::Tensor& parameter = parameters[index];
    const auto [it, is_first] = open.try_emplace(
        Kind(parameter.scalar_type(), parameter.device().type(), parameter.device().index()));
    Open& bucket = it->second;
    if (is_first) bucket.limit = first_bytes;
    if (!bucket.members.empty() && bucket.bytes + parameter.nbytes() > bucket.limit) {
      closed.push_back(std::exchange(bucket, Open{.limit = cap_bytes}));
    }
    bucket.members.push_back(index);
    bucket.bytes += parameter.nbytes();
    bucket.last = place;
  }
  for (auto& [kind, bucket] : open) closed.push_back(std::move(bucket));
  std::sort(closed.begin(), closed.end(),
            [](const Open& a, const Open& b) { return a.last < b.last; });
  std::vector<std::vector<size_t>> result;
  for (Open& bucket : closed) result.push_back(std::move(bucket.members));
  return result;
}

inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Copies between tensors of one shape and device. Converts the dtype if the user has changed it.
inline void copy_values(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_cpu() && from.scalar_type() == to.scalar_type() && is_plain(from) && is_plain(to)) {
    if (to.nbytes() > 0) std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
  } else {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  }
}

/// The gradients of several parameters in one flat tensor on their device. Used by one thread at a
/// time; functions work in the thread's current stream and wait for the streams of earlier calls.
class Bucket {
 public:
  Bucket(std::vector<size_t> members, const std::vector<at::Tensor>& parameters)
      : members_(std::move(members)), device_(parameters[members_.front()].device()) {
    for (size_t index : members_) like_.push_back(parameters[index]);
  }

  const std::vector<size_t>& members() const { return members_; }
  const at::Tensor& flat() const { return flat_; }
  /// Returns the part of flat() for member `slot`, in the shape of the member's parameter.
  const at::Tensor& view(size_t slot) const { return views_[slot]; }

  /// Prepares for a pass. Allocates new memory if views of an earlier pass are still in use.
  void begin() {
    work_ = nullptr;
    writers_.clear();
    missing_ = members_.size();
    free_.make_current_wait(device_);
    // Views are handed out as gradients, and a failed allreduce may still send from `flat_`.
    const bool is_shared =
        flat_.defined() &&
        (flat_.use_count() > 1 || flat_.storage().use_count() > 1 + views_.size() ||
         std::ranges::any_of(views_, [](const at::Tensor& view) { return view.use_count() > 1; }));
    if (!flat_.defined() || is_shared) allocate();
    free_ = rpc::StreamPoint::mark(device_);
  }

  /// Copies `gradient`, of the parameter's shape and dtype, into flat().
  void store(size_t slot, const at::Tensor& gradient) {
    if (!device_.is_cpu()) make_writer(rpc::current_stream(device_));
    copy_values(gradient, views_[slot]);
    --missing_;
  }
  bool complete() const { return missing_ == 0; }

  /// Starts the mean over the group, after the work of all store() calls. Requires complete().
  void start_average(collective::ReduceGroup& group, const collective::PassNumber& pass) {
    if (device_.is_cpu() || (writers_.size() == 1 && writers_[0] == rpc::current_stream(device_))) {
      work_ = group.average_async(flat_, pass);
      return;
    }
    // Uses a side stream, so that later work of the current stream does not wait for other writers.
    const c10::Stream side = rpc::side_stream(device_);
    for (const c10::Stream& writer : writers_) rpc::StreamPoint::mark(writer).make_wait(side);
    const c10::StreamGuard guard(side);
    work_ = group.average_async(flat_, pass);
  }

  /// Waits for the mean. Throws as ReduceWork::wait does.
  void wait() { std::exchange(work_, nullptr)->wait(); }

  /// Copies the mean of member `slot` to `to`, of the same shape.
  void load(size_t slot, const at::Tensor& to) const { copy_values(views_[slot], to); }

  /// Ends a pass. The next pass uses the memory after the work of this thread's current stream.
  void end() {
    if (device_.is_cpu()) return;
    rpc::use_on_stream(flat_, rpc::current_stream(device_));
    free_ = rpc::StreamPoint::mark(device_);
  }

  /// Ends a failed pass. The failed operation may still use the memory, so the next pass allocates.
  void drop() {
    work_ = nullptr;
    views_.clear();
    flat_ = at::Tensor();
  }

 private:
  void allocate() {
    // Creates plain aliases, because an autograd view would hold a reference to `flat_`.
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    int64_t total = 0;
    for (const at::Tensor& parameter : like_) total += parameter.numel();
    views_.clear();
    flat_ = at::empty({total}, like_[0].options().requires_grad(false));
    int64_t at = 0;
    for (const at::Tensor& parameter : like_) {
      views_.push_back(flat_.narrow(0, at, parameter.numel()).view(parameter.sizes()));
      at += parameter.numel();
    }
  }

  void make_writer(const c10::Stream& stream) {
    if (std::find(writers_.begin(), writers_.end(), stream) != writers_.end()) return;
    free_.make_wait(stream);
    rpc::use_on_stream(flat_, stream);
    writers_.push_back(stream);
  }

  std::vector<size_t> members_;
  std::vector<at::Tensor> like_;  // the parameters
  at::Tensor flat_;
  std::vector<at::Tensor> views_;
  size_t missing_ = 0;
  collective::ReduceGroup::WorkPtr work_;
  c10::Device device_;
  rpc::StreamPoint free_;             // end of the last pass's work on the memory
  std::vector<c10::Stream> writers_;  // streams that store gradients of this pass
};

}  // namespace distrain::ddp

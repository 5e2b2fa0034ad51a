#include "buckets.h"

#include <cstring>
#include <map>
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

#include "distrain/base/error.h"

namespace distrain::ddp {

namespace {

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Copies between tensors of one shape and device. Converts the values if the dtypes differ.
void copy_values(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_cpu() && from.scalar_type() == to.scalar_type() && is_plain(from) && is_plain(to)) {
    if (to.nbytes() > 0) std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
  } else {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  }
}

}  // namespace

std::vector<std::vector<size_t>> assign_buckets(const std::vector<at::Tensor>& parameters,
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
  std::ranges::sort(closed, {}, &Open::last);
  std::vector<std::vector<size_t>> result;
  for (Open& bucket : closed) result.push_back(std::move(bucket.members));
  return result;
}

void Bucket::allocate() {
  // Create plain aliases: autograd views would hold `flat_`, so begin() would find it in use.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  int64_t total = 0;
  for (const at::Tensor& parameter : like_) total += parameter.numel();
  views_.clear();
  const at::TensorOptions options = like_[0].options().requires_grad(false);
  flat_ = allocate_ ? allocate_(total, options) : at::empty({total}, options);
  int64_t at = 0;
  for (const at::Tensor& parameter : like_) {
    views_.push_back(flat_.narrow(0, at, parameter.numel()).view(parameter.sizes()));
    at += parameter.numel();
  }
}

void Bucket::begin(bool is_plain) {
  result_ = {};
  writers_.clear();
  missing_ = members_.size();
  free_.make_current_wait(device_);
  // Do not reuse memory that views hold as gradients or that a failed allreduce may still send.
  bool is_shared =
      flat_.defined() && (flat_.use_count() > 1 || flat_.storage().use_count() > 1 + views_.size());
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    const bool is_grad = is_plain && like_[slot].grad().is_same(views_[slot]);
    is_shared = is_shared || views_[slot].use_count() > (is_grad ? 2 : 1);
  }
  if (!flat_.defined() || is_shared) allocate();
  free_ = rpc::StreamPoint::mark(device_);
}

void Bucket::store(size_t slot, const at::Tensor& gradient) {
  if (!device_.is_cpu()) make_writer(rpc::current_stream(device_));
  if (!gradient.is_same(views_[slot])) copy_values(gradient, views_[slot]);
  --missing_;
}

void Bucket::start(const std::function<std::future<at::Tensor>()>& start) {
  if (device_.is_cpu() || (writers_.size() == 1 && writers_[0] == rpc::current_stream(device_))) {
    result_ = start();
    return;
  }
  // Use a side stream, so that later work of the current stream does not wait for other writers.
  const c10::Stream side = rpc::side_stream(device_);
  for (const c10::Stream& writer : writers_) rpc::StreamPoint::mark(writer).make_wait(side);
  const c10::StreamGuard guard(side);
  result_ = start();
}

void Bucket::wait() {
  const at::Tensor result = std::exchange(result_, {}).get();
  if (result.is_same(flat_)) return;
  if (!result.defined() || result.sizes() != flat_.sizes() ||
      result.scalar_type() != flat_.scalar_type() || result.device() != flat_.device()) {
    base::invalid("returned a tensor of another size, dtype or device");
  }
  copy_values(result, flat_);
}

void Bucket::load(size_t slot, const at::Tensor& to) const { copy_values(views_[slot], to); }

void Bucket::drop() {
  result_ = {};
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    if (like_[slot].grad().is_same(views_[slot])) like_[slot].mutable_grad() = at::Tensor();
  }
  views_.clear();
  flat_ = at::Tensor();
}

}  // namespace distrain::ddp

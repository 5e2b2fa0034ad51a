#pragma once

#include <cstddef>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/collective/reduce_group.h"

namespace distrain::ddp {

/// A bucket of a backward pass, whose gradients on this rank are complete.
struct GradientBucket {
  size_t index = 0;  ///< from 0, in the order in which buckets are averaged
  bool is_last = false;
  at::Tensor tensor;                   ///< all gradients of the bucket, flat; may be written
  std::vector<at::Tensor> parameters;  ///< in the order of their gradients in `tensor`
  std::vector<at::Tensor> gradients;   ///< views of `tensor` in the shapes of `parameters`

  /// Starts to average `values`, of any size and floating dtype, in place; get() of the result
  /// waits for the mean and returns `values`. Call it in CommHook::run or in a deferred future.
  std::future<at::Tensor> average(const at::Tensor& values);
  // Set by the Reducer.
  std::function<collective::ReduceGroup::WorkPtr(const at::Tensor&)> start_average;
  int averages_left = 0;
};

/// A communication hook: replaces the averaging of a bucket, as torch's register_comm_hook().
///
///   CommHook hook{"halved", [](const std::shared_ptr<GradientBucket>& bucket) {
///     return bucket->average(bucket->tensor.div(2));  // replaces the bucket's gradients
///   }};
struct CommHook {
  std::string name;
  /// Returns a future of a tensor like GradientBucket::tensor, which becomes the bucket's mean. The
  /// pass calls `run` on its own threads and get() of the future at its end. If one of them throws,
  /// the pass fails on all ranks. `run` must not call the Reducer.
  std::function<std::future<at::Tensor>(const std::shared_ptr<GradientBucket>&)> run;
  int averages = 1;           ///< calls of GradientBucket::average() for each bucket, exactly
  bool may_fail_late = true;  ///< false: cannot fail after average(); saves a small collective
};

/// Returns a hook that sends gradients as `dtype`, at::kHalf or at::kBFloat16, unless they are as
/// small already. The ranks' values are added in float32.
CommHook compress_hook(at::ScalarType dtype);

}  // namespace distrain::ddp

#include "distrain/ddp/comm_hook.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

namespace distrain::ddp {

std::future<at::Tensor> GradientBucket::average(const at::Tensor& values) {
  if (averages_left == 0) base::invalid("called average() more often than CommHook::averages says");
  if (!values.is_contiguous()) base::invalid("average() needs a contiguous tensor");
  const auto work = start_average(values);
  --averages_left;
  return std::async(std::launch::deferred, [work, values] {
    work->wait();
    if (!values.is_cpu()) rpc::use_on_stream(values, rpc::current_stream(values.device()));
    return values;
  });
}

CommHook compress_hook(at::ScalarType dtype) {
  const auto run = [dtype](const std::shared_ptr<GradientBucket>& bucket) {
    const at::Tensor& tensor = bucket->tensor;
    const bool is_small = tensor.dtype().itemsize() <= c10::elementSize(dtype);
    if (is_small || !tensor.is_floating_point()) return bucket->average(tensor);
    const at::NoGradGuard no_grad;
    const auto sent = std::make_shared<std::future<at::Tensor>>(bucket->average(tensor.to(dtype)));
    return std::async(std::launch::deferred, [bucket, sent] {
      const at::NoGradGuard no_grad;
      return bucket->tensor.copy_(sent->get());
    });
  };
  return {c10::str("compress to ", dtype), run, 1, /*may_fail_late=*/false};
}

}  // namespace distrain::ddp

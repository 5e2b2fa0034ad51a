#include "distrain/collective/staged_reduce_group.h"

#include <mutex>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "distrain/base/future.h"
#include "distrain/rpc/device.h"

namespace distrain::collective {

// Note [Staged operations]
//
//   caller  enqueues the copy to the host in a side stream, behind its current stream, and the
//           operation in `queue_`.
//   queue   waits for the copy, then calls the Backend, in the order of the calls.
//   waiter  waits for the Backend, enqueues the copy back in the same side stream, and makes its
//           current stream wait for it.

/// Keeps pinned buffers until the device has copied from them.
class StagedReduceGroup::HostBuffers {
 public:
  ~HostBuffers() {
    for (const Used& used : used_) used.copied.wait_in_destructor();
  }

  /// Returns a pinned buffer of the size and dtype of `tensor`, which is on a device.
  at::Tensor like(const at::Tensor& tensor) {
    {
      std::lock_guard lock(mutex_);
      std::erase_if(used_, [](const Used& used) { return used.copied.reached(); });
    }
    const at::NoGradGuard no_grad;
    return rpc::pinned_bytes(tensor.device(), static_cast<int64_t>(tensor.nbytes()))
        .view(tensor.scalar_type())
        .view(tensor.sizes());
  }

  void keep(at::Tensor buffer, rpc::StreamPoint copied) {
    std::lock_guard lock(mutex_);
    used_.push_back({std::move(buffer), std::move(copied)});
  }

 private:
  struct Used {
    at::Tensor buffer;
    rpc::StreamPoint copied;
  };
  std::mutex mutex_;
  std::vector<Used> used_;
};

/// An operation on a tensor of a device.
class StagedReduceGroup::StagedWork final : public ReduceWork {
 public:
  StagedWork(const at::Tensor& tensor, std::shared_ptr<HostBuffers> buffers)
      : tensor_(tensor),
        buffers_(std::move(buffers)),
        host_(buffers_->like(tensor)),
        side_(rpc::side_stream(tensor.device())) {
    rpc::StreamPoint::mark(tensor.device()).make_wait(side_);
    rpc::use_on_stream(tensor_, side_);
  }

  const at::Tensor& host() const { return host_; }

  rpc::StreamPoint copy_out() {
    const at::NoGradGuard no_grad;
    const c10::StreamGuard guard(side_);
    host_.copy_(tensor_, /*non_blocking=*/true);
    return rpc::StreamPoint::mark(side_);
  }

  void set(base::Future<Pending> issued, bool copies_back) {
    issued_ = std::move(issued);
    copies_back_ = copies_back;
  }

  void wait() override {
    issued_.wait().wait();
    if (std::exchange(copies_back_, false)) {
      const at::NoGradGuard no_grad;
      const c10::StreamGuard guard(side_);
      tensor_.copy_(host_, /*non_blocking=*/true);
      arrived_ = rpc::StreamPoint::mark(side_);
      buffers_->keep(host_, arrived_);
    }
    arrived_.make_current_wait(tensor_.device());
  }

 private:
  const at::Tensor tensor_;
  const std::shared_ptr<HostBuffers> buffers_;
  const at::Tensor host_;
  const c10::Stream side_;
  base::Future<Pending> issued_;
  bool copies_back_ = false;
  rpc::StreamPoint arrived_;
};

StagedReduceGroup::StagedReduceGroup(c10::intrusive_ptr<Backend> backend, uint32_t sequence)
    : backend_(std::move(backend)),
      sequence_(sequence),
      buffers_(std::make_shared<HostBuffers>()),
      queue_(backend_, "distrain-stage", sequence_) {}

StagedReduceGroup::~StagedReduceGroup() = default;

std::shared_ptr<ReduceGroup> StagedReduceGroup::duplicate() {
  return std::make_shared<StagedReduceGroup>(backend_, backend_->new_sequence());
}

ReduceGroup::WorkPtr StagedReduceGroup::average_async(const at::Tensor& bucket,
                                                      const PassNumber& pass) {
  if (bucket.device().is_cpu()) return queue_.average_async(bucket, pass);
  auto staged = std::make_shared<StagedWork>(bucket, buffers_);
  // `call` owns `staged`, because the tensor and the host memory must outlive the copy.
  auto call = [backend = backend_.get(), staged, options = OperationOptions{sequence_, pass}] {
    return backend->allreduce(staged->host(), Backend::ReduceOp::AVG, Backend::kDefault, options);
  };
  staged->set(queue_.call_behind(staged->copy_out(), std::move(call)), true);
  return staged;
}

ReduceGroup::WorkPtr StagedReduceGroup::broadcast(const at::Tensor& tensor, int root) {
  if (tensor.device().is_cpu()) return queue_.broadcast(tensor, root);
  auto staged = std::make_shared<StagedWork>(tensor, buffers_);
  auto call = [backend = backend_.get(), staged, root, options = OperationOptions{sequence_, {}}] {
    return backend->broadcast(staged->host(), root, Backend::kDefault, options);
  };
  const bool sends = root == rank();
  staged->set(queue_.call_behind(sends ? staged->copy_out() : rpc::StreamPoint(), std::move(call)),
              !sends);
  return staged;
}

void StagedReduceGroup::refuse(int count, const base::Error& error) { queue_.refuse(count, error); }

}  // namespace distrain::collective

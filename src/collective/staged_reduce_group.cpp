#include "distrain/collective/staged_reduce_group.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "distrain/rpc/error.h"

namespace distrain::collective {

namespace {

class BackendWork final : public ReduceWork {
 public:
  explicit BackendWork(base::Future<Pending> called) : called_(std::move(called)) {}
  void wait() override { called_.wait().wait(); }

 private:
  const base::Future<Pending> called_;
};

}  // namespace

BackendQueue::Call BackendQueue::average(const PassNumber& pass) const {
  return [backend = backend_.get(), options = OperationOptions{sequence_, pass}](auto& tensor) {
    return backend->allreduce(tensor, Backend::ReduceOp::AVG, Backend::kDefault, options);
  };
}

BackendQueue::Call BackendQueue::broadcast(int root) const {
  return [backend = backend_.get(), root, options = OperationOptions{sequence_, {}}](auto& tensor) {
    return backend->broadcast(tensor, root, Backend::kDefault, options);
  };
}

ReduceGroup::WorkPtr BackendQueue::run(Call call, const at::Tensor& tensor) {
  return std::make_shared<BackendWork>(
      queue_.idle() ? base::Future<Pending>::ready(call(tensor))
                    : call_behind({}, [call = std::move(call), tensor] { return call(tensor); }));
}

void BackendQueue::refuse(int count, const base::Error& error) {
  if (queue_.idle()) return backend_->refuse(count, error, sequence_);
  queue_.post([backend = backend_.get(), count, error, sequence = sequence_] {
    backend->refuse(count, error, sequence);
  });
}

base::Future<Pending> BackendQueue::call_behind(rpc::StreamPoint copied,
                                                std::function<Pending()> call) {
  base::Promise<Pending> promise;
  base::Future<Pending> future = promise.future();
  queue_.post([backend = backend_.get(), sequence = sequence_, copied = std::move(copied),
               call = std::move(call), promise = std::move(promise)]() mutable {
    try {
      copied.wait_on_host();
    } catch (...) {
      // Refuse the operation, so that other ranks neither wait for this rank nor get out of step.
      const base::Error error = rpc::error_in_flight(base::ErrorKind::kInternal);
      backend->refuse(1, error, sequence);
      promise.fail(error);
      return;
    }
    try {
      promise.set(call());
    } catch (...) {
      promise.fail(rpc::error_in_flight(base::ErrorKind::kInternal));
    }
  });
  return future;
}

// Note [Staged operations]
//
//   caller  enqueues the copy to the host in a side stream, behind its current stream, and the
//           operation in `queue_`.
//   queue   waits for the copy, then calls the Backend, in the order of the calls.
//   waiter  waits for the Backend, enqueues the copy back in the same side stream, and makes its
//           current stream wait for that copy.

/// Keeps pinned buffers alive until the device has copied from them.
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

/// An operation on a device tensor; see Note [Staged operations].
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
      buffers_(std::make_shared<HostBuffers>()),
      queue_(backend_, "distrain-stage", sequence) {}

at::Tensor ReduceGroup::allocate(int64_t count, const at::TensorOptions& options) {
  return at::empty({count}, options);
}

at::Tensor StagedReduceGroup::allocate(int64_t count, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return ReduceGroup::allocate(count, options);
  return backend_->allocate(static_cast<size_t>(count) * options.dtype().itemsize())
      .view(c10::typeMetaToScalarType(options.dtype()));
}

ReduceGroup::WorkPtr StagedReduceGroup::start(const at::Tensor& tensor, BackendQueue::Call call,
                                              bool sends, bool receives) {
  if (tensor.device().is_cpu()) return queue_.run(std::move(call), tensor);
  const auto staged = std::make_shared<StagedWork>(tensor, buffers_);
  // The queued call owns `staged`, because the tensor and the host memory must outlive the copy.
  staged->set(queue_.call_behind(sends ? staged->copy_out() : rpc::StreamPoint(),
                                 [call = std::move(call), staged] { return call(staged->host()); }),
              receives);
  return staged;
}

}  // namespace distrain::collective

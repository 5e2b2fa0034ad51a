#include "distrain/collective/staged_reduce_group.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/StreamGuard.h>

#include "distrain/base/future.h"
#include "distrain/rpc/device.h"

namespace distrain::collective {

// Note [Staged operations]
//
//   the caller    puts the copy to the host into a side stream, behind its own current stream, and
//                 the operation into the line.
//   the line      a thread of this group: waits for the copy, then calls the Backend. Its order is
//                 that of the calls, so all ranks call their Backends in the same order, whose
//                 copies are done first.
//   the waiter    waits for the Backend, puts the copy back into the same side stream, and makes
//                 its current stream wait for it.
//
// What has nothing to wait for (a tensor of the CPU, a refusal) is called at once while the line is
// empty, so that CPU users neither start nor meet a thread.

namespace {

using Call = std::function<Pending()>;

class Direct final : public ReduceWork {
 public:
  explicit Direct(Pending pending) : pending_(std::move(pending)) {}
  void wait() override { pending_.wait(); }

 private:
  const Pending pending_;
};

class Queued final : public ReduceWork {
 public:
  explicit Queued(base::Future<Pending> issued) : issued_(std::move(issued)) {}
  void wait() override { issued_.wait().wait(); }

 private:
  const base::Future<Pending> issued_;
};

}  // namespace

/// Calls of the Backend, in order.
class StagedReduceGroup::Line {
 public:
  explicit Line(c10::intrusive_ptr<Backend> backend) : backend_(std::move(backend)) {}
  ~Line() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  bool empty() const {
    std::lock_guard lock(mutex_);
    return queue_.empty();
  }

  /// `step` must not throw.
  void put(std::function<void()> step) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(step));
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    }
    changed_.notify_all();
  }

  /// Has `call` made once `copied` is reached.
  base::Future<Pending> call_behind(rpc::StreamPoint copied, Call call) {
    auto promise = std::make_shared<base::Promise<Pending>>();
    base::Future<Pending> future = promise->future();
    put([this, copied = std::move(copied), call = std::move(call), promise] {
      try {
        copied.wait_on_host();
        promise->set(call());
      } catch (...) {
        // Nothing was called: the other ranks must not wait for it, nor come out of step.
        const base::Error error = base::current_error(base::ErrorKind::kInternal);
        backend_->refuse(1, error);
        promise->fail(error);
      }
    });
    return future;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      // It stays in the queue while it runs: what comes meanwhile must not overtake it.
      std::function<void()>& step = queue_.front();
      lock.unlock();
      step();
      step = nullptr;
      lock.lock();
      queue_.pop_front();
    }
  }

  const c10::intrusive_ptr<Backend> backend_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

/// Pinned memory, kept until the copies out of it have been made.
class StagedReduceGroup::HostBuffers {
 public:
  ~HostBuffers() {
    for (const Used& used : used_) used.copied.wait_on_host();
  }

  /// Of the size and dtype of `tensor`, which is on a device.
  at::Tensor like(const at::Tensor& tensor) {
    {
      std::lock_guard lock(mutex_);
      std::erase_if(used_, [](const Used& used) { return used.copied.reached(); });
    }
    c10::Allocator* const allocator = at::globalContext()
                                          .getAcceleratorHooksInterface(tensor.device().type())
                                          .getPinnedMemoryAllocator();
    return at::detail::empty_generic(tensor.sizes(), allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::CPU),
                                     tensor.scalar_type(), std::nullopt);
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
class StagedReduceGroup::Staged final : public ReduceWork {
 public:
  Staged(const at::Tensor& tensor, std::shared_ptr<HostBuffers> buffers)
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
    if (std::exchange(copies_back_, false)) copy_back();
    arrived_.make_current_wait(tensor_.device());
  }

 private:
  void copy_back() {
    const at::NoGradGuard no_grad;
    const c10::StreamGuard guard(side_);
    tensor_.copy_(host_, /*non_blocking=*/true);
    arrived_ = rpc::StreamPoint::mark(side_);
    buffers_->keep(host_, arrived_);
  }

  const at::Tensor tensor_;
  const std::shared_ptr<HostBuffers> buffers_;
  const at::Tensor host_;
  const c10::Stream side_;
  base::Future<Pending> issued_;
  bool copies_back_ = false;
  rpc::StreamPoint arrived_;
};

StagedReduceGroup::StagedReduceGroup(c10::intrusive_ptr<Backend> backend)
    : backend_(std::move(backend)),
      buffers_(std::make_shared<HostBuffers>()),
      line_(std::make_unique<Line>(backend_)) {}

StagedReduceGroup::~StagedReduceGroup() = default;

ReduceGroup::WorkPtr StagedReduceGroup::start(const at::Tensor& bucket) {
  constexpr auto kMean = c10d::ReduceOp::AVG;
  if (bucket.device().is_cpu()) {
    if (line_->empty()) return std::make_shared<Direct>(backend_->allreduce(bucket, kMean));
    return std::make_shared<Queued>(line_->call_behind(
        {}, [backend = backend_.get(), bucket] { return backend->allreduce(bucket, kMean); }));
  }
  auto staged = std::make_shared<Staged>(bucket, buffers_);
  // The step holds `staged`: tensor and host memory must outlive the copy.
  Call call = [backend = backend_.get(), staged] {
    return backend->allreduce(staged->host(), kMean);
  };
  staged->set(line_->call_behind(staged->copy_out(), std::move(call)), true);
  return staged;
}

ReduceGroup::WorkPtr StagedReduceGroup::broadcast(const at::Tensor& tensor, int root) {
  if (tensor.device().is_cpu()) {
    if (line_->empty()) return std::make_shared<Direct>(backend_->broadcast(tensor, root));
    return std::make_shared<Queued>(line_->call_behind(
        {}, [backend = backend_.get(), tensor, root] { return backend->broadcast(tensor, root); }));
  }
  auto staged = std::make_shared<Staged>(tensor, buffers_);
  Call call = [backend = backend_.get(), staged, root] {
    return backend->broadcast(staged->host(), root);
  };
  const bool sends = root == rank();
  staged->set(line_->call_behind(sends ? staged->copy_out() : rpc::StreamPoint(), std::move(call)),
              !sends);
  return staged;
}

void StagedReduceGroup::refuse(int count, const base::Error& error) {
  if (line_->empty()) return backend_->refuse(count, error);
  line_->put([backend = backend_.get(), count, error] { backend->refuse(count, error); });
}

}  // namespace distrain::collective

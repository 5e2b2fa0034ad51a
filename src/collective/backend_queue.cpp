#include "distrain/collective/backend_queue.h"

#include <memory>
#include <utility>

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

BackendQueue::BackendQueue(c10::intrusive_ptr<Backend> backend, std::string name, uint32_t sequence)
    : backend_(std::move(backend)), sequence_(sequence), queue_(std::move(name)) {}

ReduceGroup::WorkPtr BackendQueue::average_async(const at::Tensor& tensor, const PassNumber& pass) {
  return call([backend = backend_.get(), tensor, options = OperationOptions{sequence_, pass}] {
    return backend->allreduce(tensor, Backend::ReduceOp::AVG, Backend::kDefault, options);
  });
}

ReduceGroup::WorkPtr BackendQueue::broadcast(const at::Tensor& tensor, int root) {
  return call([backend = backend_.get(), tensor, root, options = OperationOptions{sequence_, {}}] {
    return backend->broadcast(tensor, root, Backend::kDefault, options);
  });
}

void BackendQueue::refuse(int count, const base::Error& error) {
  if (queue_.idle()) return backend_->refuse(count, error, sequence_);
  queue_.post([backend = backend_.get(), count, error, sequence = sequence_] {
    backend->refuse(count, error, sequence);
  });
}

ReduceGroup::WorkPtr BackendQueue::call(std::function<Pending()> call) {
  return std::make_shared<BackendWork>(queue_.idle() ? base::Future<Pending>::ready(call())
                                                     : call_behind({}, std::move(call)));
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
      // Refuses the operation, so that the other ranks neither wait for it nor get out of step.
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

}  // namespace distrain::collective

#include "distrain/collective/backend_line.h"

#include <memory>
#include <utility>

namespace distrain::collective {

namespace {

class Called final : public ReduceWork {
 public:
  explicit Called(base::Future<Pending> called) : called_(std::move(called)) {}
  void wait() override { called_.wait().wait(); }

 private:
  const base::Future<Pending> called_;
};

}  // namespace

BackendLine::BackendLine(c10::intrusive_ptr<Backend> backend, std::string name)
    : backend_(std::move(backend)), line_(std::move(name)) {}

ReduceGroup::WorkPtr BackendLine::mean(const at::Tensor& tensor) {
  return call([backend = backend_.get(), tensor] {
    return backend->allreduce(tensor, Backend::ReduceOp::AVG);
  });
}

ReduceGroup::WorkPtr BackendLine::broadcast(const at::Tensor& tensor, int root) {
  return call(
      [backend = backend_.get(), tensor, root] { return backend->broadcast(tensor, root); });
}

void BackendLine::refuse(int count, const base::Error& error) {
  if (line_.idle()) return backend_->refuse(count, error);
  line_.post([backend = backend_.get(), count, error] { backend->refuse(count, error); });
}

ReduceGroup::WorkPtr BackendLine::call(std::function<Pending()> call) {
  return std::make_shared<Called>(line_.idle() ? base::Future<Pending>::ready(call())
                                               : call_behind({}, std::move(call)));
}

base::Future<Pending> BackendLine::call_behind(rpc::StreamPoint copied,
                                               std::function<Pending()> call) {
  base::Promise<Pending> promise;
  base::Future<Pending> future = promise.future();
  line_.post([backend = backend_.get(), copied = std::move(copied), call = std::move(call),
              promise = std::move(promise)]() mutable {
    try {
      copied.wait_on_host();
    } catch (...) {
      // Nothing was called: the other ranks must not wait for it, nor come out of step.
      const base::Error error = base::current_error(base::ErrorKind::kInternal);
      backend->refuse(1, error);
      promise.fail(error);
      return;
    }
    try {
      promise.set(call());
    } catch (...) {
      promise.fail(base::current_error(base::ErrorKind::kInternal));
    }
  });
  return future;
}

}  // namespace distrain::collective

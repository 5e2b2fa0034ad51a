#include "distrain/collective/pending.h"

#include "distrain/rpc/error.h"
#include "operation.h"

namespace distrain::collective {

bool Pending::done() const { return operation_->done(); }

void Pending::wait() const { static_cast<void>(operation_->wait_until(base::kNever)); }

bool Pending::wait_until(base::TimePoint limit) const { return operation_->wait_until(limit); }

void Pending::expire() const { operation_->expire(); }

void Pending::fail(base::Error error) const { operation_->fail(std::move(error)); }

base::Future<void> Pending::future() const {
  auto promise = std::make_shared<base::Promise<void>>();
  base::Future<void> future = promise->future();
  auto complete = [operation = operation_, promise] {
    try {
      static_cast<void>(operation->wait_until(base::kNever));
      promise->set();
    } catch (...) {
      promise->fail(rpc::error_in_flight(base::ErrorKind::kInternal));
    }
  };
  if (operation_->done()) {
    complete();
  } else {
    operation_->executor().post(std::move(complete));
  }
  return future;
}

}  // namespace distrain::collective

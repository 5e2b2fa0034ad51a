// Checks of the arguments of Backend's functions, and the c10d::Work that they return.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "distrain/collective/backend.h"
#include "distrain/rpc/message.h"
#include "operations.h"

namespace distrain::collective {

// Throws `invalid` with a message that consists of `op` and `message`.
template <class... Parts>
[[noreturn]] void refuse_call(const char* op, const Parts&... message) {
  throw base::Exception(base::Error{
      .kind = base::ErrorKind::kInvalid, .message = c10::str(op, message...), .op = op});
}

inline void check_tensor(const char* op, const at::Tensor& tensor) {
  if (!tensor.defined()) refuse_call(op, " of an undefined tensor");
  if (const std::string kind = rpc::kind_that_cannot_be_sent(tensor); !kind.empty()) {
    refuse_call(op, " of ", kind, " is not supported");
  }
  if (tensor.is_sparse()) refuse_call(op, " of a sparse tensor is not supported");
  if (!tensor.device().is_cpu()) {
    refuse_call(op, " of a tensor on ", tensor.device(), " is not supported");
  }
  if (tensor.is_conj()) {
    refuse_call(op, " of a conjugated view is not supported: resolve_conj() it");
  }
  if (tensor.is_neg()) refuse_call(op, " of a negated view is not supported: resolve_neg() it");
}

// Throws `invalid` if an operation cannot write to `tensor`.
inline void check_result(const char* op, const at::Tensor& tensor) {
  check_tensor(op, tensor);
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse_call(
        op, " into an expanded tensor, whose elements share memory, is not supported: clone() it");
  }
}

inline void check_reduction(const char* name, const at::Tensor& tensor, ReduceOp op) {
  check_result(name, tensor);
  if (can_reduce(op, tensor.scalar_type())) return;
  refuse_call(name, ": no such reduction of ", tensor.scalar_type(), " (operation number ", int(op),
              ")");
}

inline void check_root(const char* op, int root, int size) {
  if (root < 0 || root >= size) refuse_call(op, ": root ", root, " is not in the group");
}

inline OpSpec spec_of(OpKind kind, const at::Tensor& tensor, int root = 0,
                      ReduceOp op = ReduceOp::UNUSED) {
  return {kind, op, tensor.scalar_type(), static_cast<uint32_t>(root), tensor.nbytes()};
}

/// A c10d::Work that is complete when all of `operations` are.
class Work final : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, std::vector<Pending> operations,
       std::vector<at::Tensor> results)
      : c10d::Work(rank, type), operations_(std::move(operations)), results_(std::move(results)) {}

  bool isCompleted() override { return std::ranges::all_of(operations_, &Pending::done); }
  bool isSuccess() const override {
    return std::ranges::all_of(operations_, &Pending::done) && exception() == nullptr;
  }

  std::exception_ptr exception() const override {
    for (const Pending& operation : operations_) {
      if (!operation.done()) continue;
      try {
        operation.wait();
      } catch (...) {
        return std::current_exception();
      }
    }
    return nullptr;
  }

  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { wait(kNoTimeout); }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool has_limit = timeout != kNoTimeout;
    const base::TimePoint limit = has_limit ? base::deadline_after(timeout) : base::kNever;
    for (const Pending& operation : operations_) {
      if (operation.wait_until(limit)) continue;
      operation.expire();
      operation.wait();
    }
    return true;
  }

  void abort() override {
    for (const Pending& operation : operations_) {
      operation.fail({base::ErrorKind::kCancelled, "the collective was aborted", rank_});
    }
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    struct Progress {
      std::atomic<size_t> missing;
      std::atomic<bool> failed{false};
    };
    auto progress = std::make_shared<Progress>();
    progress->missing = operations_.size();
    if (operations_.empty()) future->markCompleted(c10::IValue(results_));
    for (const Pending& operation : operations_) {
      operation.future().state()->on_ready(
          [future, progress, results = results_](base::Result<base::Unit>& result) {
            if (!result.ok() && !progress->failed.exchange(true)) {
              future->setError(std::make_exception_ptr(base::Exception(result.error())));
            }
            if (--progress->missing == 0 && !progress->failed) {
              future->markCompleted(c10::IValue(results));
            }
          });
    }
    return future;
  }

 private:
  const std::vector<Pending> operations_;
  const std::vector<at::Tensor> results_;
};

inline c10::intrusive_ptr<c10d::Work> make_work(int rank, c10d::OpType type, Pending operation,
                                                std::vector<at::Tensor> results) {
  return c10::make_intrusive<Work>(rank, type, std::vector{std::move(operation)},
                                   std::move(results));
}

}  // namespace distrain::collective

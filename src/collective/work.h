#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "distrain/collective/pending.h"

namespace distrain::collective {

/// Our operations as c10d knows them. Complete when all of `operations` are.
class Work final : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, std::vector<Pending> operations,
       std::vector<at::Tensor> results);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<Pending> operations_;
  const std::vector<at::Tensor> results_;
};

}  // namespace distrain::collective

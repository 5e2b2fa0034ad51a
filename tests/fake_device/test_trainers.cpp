// Tests the behaviour that all jobs with trainers share, on the fake device.
#include <memory>
#include <optional>
#include <utility>

#include <ATen/ATen.h>

#include "distrain/collective/reduce_group.h"
#include "distrain/rpc/device.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/test_device.h"

namespace distrain::testing {
namespace {

/// A group of one rank. Its failure() reports an error once `operation_` has failed on the device.
class FailsOnTheDevice final : public collective::ReduceGroup {
 public:
  void fail_behind(rpc::StreamPoint operation) { operation_ = std::move(operation); }

  int rank() const override { return 0; }
  int size() const override { return 1; }
  int world_rank(int rank) const override { return rank; }
  std::shared_ptr<ReduceGroup> duplicate() override { return nullptr; }
  WorkPtr average_async(const at::Tensor&, const collective::PassNumber&) override {
    return nullptr;
  }
  WorkPtr broadcast(const at::Tensor&, int) override { return nullptr; }
  void refuse(int, const base::Error&) override {}
  std::optional<base::Error> failure() const override {
    if (!operation_ || !operation_->reached()) return std::nullopt;
    return base::Error{base::ErrorKind::kPeerLost, "lost on the way", 1, {}};
  }

 private:
  std::optional<rpc::StreamPoint> operation_;
};

}  // namespace

TEST_CASE("a job checks that averages are complete after its device has computed them") {
  const auto group = std::make_shared<FailsOnTheDevice>();
  at::Tensor x = at::ones({3}, at::TensorOptions(test_device(1)));
  group->check(test_device(1));
  x = x * 2 + 1;
  group->fail_behind(rpc::StreamPoint::mark(test_device(1)));
  const base::Error error = error_of([&] { group->check(test_device(1)); });
  CHECK(error.kind == base::ErrorKind::kPeerLost);
  CHECK(error.rank == 1);
}

}  // namespace distrain::testing

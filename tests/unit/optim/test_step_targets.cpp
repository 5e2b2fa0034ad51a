// Tests when an optimizer calls the targets that are added to it.
#include <functional>

#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "remote_layers.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using base::ErrorKind;
using optim::DistributedOptimizer;
using testing::Cluster;
using testing::error_of;

namespace {

/// Records calls, and throws in the function that `fails` names.
struct FakeTarget final : optim::StepTarget {
  std::string where() const override { return "the fake"; }
  void check(const std::vector<uint64_t>&) override { note("check"); }
  base::Future<optim::Norms> norm(const std::vector<uint64_t>&,
                                  const optim::NormArguments& arguments) override {
    note("norm");
    return base::Future<optim::Norms>::ready({16, arguments.own});
  }
  base::Future<uint64_t> apply(const std::vector<uint64_t>&,
                               const optim::StepOptions& options) override {
    note("apply");
    scale = options.scale;
    return base::Future<uint64_t>::ready(7);
  }
  bool only_sends() const override { return sends; }
  void note(const std::string& call) {
    calls += (calls.empty() ? "" : " ") + call;
    if (call == fails) throw base::Exception(ErrorKind::kBadData, "it fails in " + call);
  }

  std::string calls, fails;
  bool sends = false;
  double scale = 0;
};

struct Steps {
  explicit Steps(double max_norm)
      : optimizer(cluster[0], {}, {own}, optim::Rule{optim::Sgd{.lr = 1}, {}, max_norm}) {
    optimizer.add(target);
  }
  base::Error step() {
    autograd::Context context(cluster[0]);
    context.set_gradient(own, at::full({1}, 3, at::kDouble));
    return error_of([&] { testing::expect(optimizer.step(context) == 7, "the target's count"); });
  }

  Cluster cluster{1, testing::set_up_weights};
  const at::Tensor own = at::zeros({1}, at::kDouble).requires_grad_();
  const std::shared_ptr<FakeTarget> target = std::make_shared<FakeTarget>();
  DistributedOptimizer optimizer;
};

}  // namespace

TEST_CASE("a step checks its targets before it changes anything") {
  Steps steps(0);
  CHECK(steps.step().message == "(no error)");
  CHECK(steps.target->calls == "check apply");
  CHECK(steps.own.item<double>() == -3);
  steps.target->fails = "check";
  CHECK(steps.step().kind == ErrorKind::kBadData);
  CHECK(steps.own.item<double>() == -3);
  steps.target->fails = "apply";
  CHECK(steps.step().message ==
        "it fails in apply; the step failed on the fake, is made on rank 0 "
        "(its own)");
}

TEST_CASE("an error of a step says which targets have only sent their gradients") {
  Steps steps(0);
  const auto broken = std::make_shared<FakeTarget>();
  broken->fails = "apply";
  steps.optimizer.add(broken);
  steps.target->sends = true;
  CHECK(steps.step().message ==
        "it fails in apply; the step failed on the fake, is made on rank 0 "
        "(its own), is sent to the fake");
}

TEST_CASE("a step that clips counts the norms of its targets, and changes nothing if one fails") {
  Steps steps(2.5);
  CHECK(steps.step().message == "(no error)");
  CHECK(steps.target->calls == "check norm apply");
  CHECK(steps.target->scale == Catch::Detail::Approx(0.5));  // sqrt(16 + 9) is 5
  CHECK(steps.own.item<double>() == Catch::Detail::Approx(-1.5));
  steps.target->calls.clear();
  steps.target->fails = "norm";
  CHECK(steps.step().kind == ErrorKind::kBadData);
  CHECK(steps.target->calls == "check norm");
  CHECK(steps.own.item<double>() == Catch::Detail::Approx(-1.5));
}

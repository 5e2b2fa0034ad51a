// Tests parameters whose participants are lost, rest (make no steps for a while) and return.
#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "parameter_updater.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using base::ErrorKind;
using optim::DistributedOptimizer;
using optim::ParameterUpdater;
using optim::Sharing;
using rpc::Agent;
using testing::Cluster;
using testing::error_of;
using Mode = optim::Sharing::Mode;

namespace {

// One number that several participants train. Participant p is the process of rank p + 1. Each
// step subtracts 1 from the number.
struct OneNumber {
  OneNumber(Mode mode, int participants, int64_t staleness)
      : cluster(1, [](Agent& agent) { autograd::install(agent); }),
        number(at::zeros({1}, at::kDouble)),
        optimizer(cluster[0], {number},
                  {{{optim::to_fields(optim::Sgd{.lr = 1}), 1, 0}}, mode, participants, staleness},
                  nullptr) {
    for (int each = 0; each < participants; ++each) optimizer.take_part(each, process(each));
  }

  static rpc::ProcessNumber process(int participant, uint32_t incarnation = 0) {
    return rpc::process_number(participant + 1, incarnation);
  }
  base::Future<uint64_t> step(int participant, uint32_t incarnation = 0, int64_t numbered = 0) {
    return optimizer.step({participant, 1, 1, numbered}, {at::ones({1}, at::kDouble)},
                          process(participant, incarnation));
  }
  void lose(int participant, uint32_t incarnation = 0, bool job_goes_on = true) {
    const int rank = participant + 1;
    optimizer.on_rank_lost(
        {rank, {ErrorKind::kPeerLost, "it is lost", rank, {}}, job_goes_on, incarnation});
  }
  int64_t made() const { return -number.item<int64_t>(); }

  Cluster cluster;
  at::Tensor number;
  ParameterUpdater optimizer;
};

ErrorKind kind_of_step(const base::Future<uint64_t>& step) {
  return error_of([&] { step.wait(); }).kind;
}

}  // namespace

TEST_CASE("in ssp the others continue when the slowest is lost") {
  OneNumber shared(Mode::kSsp, 3, 1);
  for (const int each : {0, 1}) CHECK(shared.step(each).done());
  const auto first = shared.step(0), second = shared.step(1);
  CHECK_FALSE(first.done());
  CHECK_FALSE(second.done());
  shared.lose(2);
  CHECK(first.wait() == 3);
  CHECK(second.wait() == 4);
  // The two remaining participants wait for each other as before the loss.
  CHECK(shared.step(0).done());
  const auto ahead = shared.step(0);
  CHECK_FALSE(ahead.done());
  CHECK(shared.step(1).done());
  CHECK(ahead.done());
  CHECK(shared.made() == 7);
}

TEST_CASE("in ssp a resting participant is not waited for until it makes a step") {
  OneNumber shared(Mode::kSsp, 2, 1);
  CHECK(shared.step(0).done());
  const auto waits = shared.step(0);
  CHECK_FALSE(waits.done());
  shared.optimizer.rest(OneNumber::process(1, 1));  // another process, which is not a participant
  CHECK_FALSE(waits.done());
  shared.optimizer.rest(OneNumber::process(1));
  CHECK(waits.done());
  for (int i = 0; i < 3; ++i) CHECK(shared.step(0).done());
  // Participant 1 resumes at participant 0's count of five steps; this step is its sixth.
  CHECK(shared.step(1).done());
  CHECK(shared.optimizer.progress(1).lead == 1);
  CHECK(shared.step(0).done());
  CHECK(shared.step(0).done());
  const auto ahead = shared.step(0);
  CHECK_FALSE(ahead.done());
  CHECK(shared.optimizer.progress(0).lead == 2);
  CHECK(shared.step(1).done());
  CHECK(ahead.done());
}

TEST_CASE("in ssp all participants but one may be lost or rest") {
  OneNumber shared(Mode::kSsp, 3, 0);
  const auto waits = shared.step(0);
  CHECK_FALSE(waits.done());
  shared.lose(1);
  CHECK_FALSE(waits.done());
  shared.optimizer.rest(OneNumber::process(2));
  CHECK(waits.done());
  for (int i = 0; i < 5; ++i) CHECK(shared.step(0).done());
  shared.lose(2);  // while it rests
  CHECK(shared.step(0).done());
}

TEST_CASE("in ssp a new process begins where the slowest of the others is") {
  OneNumber shared(Mode::kSsp, 3, 1);
  shared.lose(2);
  for (int i = 0; i < 3; ++i) {
    for (const int each : {0, 1}) CHECK(shared.step(each).done());
  }
  CHECK(shared.step(0).done());  // participants 0 and 1 have made 4 and 3 steps
  shared.optimizer.take_part(2, OneNumber::process(2, 1));
  CHECK(shared.optimizer.progress(2).lead == 0);
  CHECK(shared.step(1).done());
  const auto waits = shared.step(0);
  CHECK_FALSE(waits.done());  // the participants have made 5, 4 and 3 steps
  CHECK(shared.step(2, 1).done());
  CHECK(waits.done());
  // The new process of participant 2 can be lost, too.
  const auto ahead = shared.step(0);
  CHECK_FALSE(ahead.done());
  CHECK(shared.step(1).done());
  CHECK_FALSE(ahead.done());
  shared.lose(2, 1);
  CHECK(ahead.done());
}

TEST_CASE("the loss of a previous process does not affect its successor") {
  OneNumber shared(Mode::kSsp, 2, 1);
  shared.lose(1);
  shared.optimizer.take_part(1, OneNumber::process(1, 1));
  shared.lose(1, 0);  // a repeated report of the loss
  CHECK(shared.step(1, 1).done());
}

TEST_CASE("a late step of a lost process is refused and changes nothing") {
  const Mode mode = GENERATE(Mode::kAsync, Mode::kSsp);
  const bool comes_back = GENERATE(false, true);
  CAPTURE(comes_back);
  OneNumber shared(mode, 2, 5);
  CHECK(shared.step(1, 0, 1).done());
  shared.lose(1);
  if (comes_back) shared.optimizer.take_part(1, OneNumber::process(1, 1));
  CHECK(error_of([&] { static_cast<void>(shared.step(1, 0, 2)); }).kind == ErrorKind::kPeerLost);
  CHECK(shared.made() == 1);
  CHECK(shared.optimizer.progress(0).updates == 1);
  CHECK(shared.optimizer.last_step_of(OneNumber::process(1)) ==
        (comes_back ? std::nullopt : std::optional<int64_t>(1)));
  if (!comes_back) return;
  CHECK(shared.step(1, 1, 1).done());
  CHECK(shared.made() == 2);
}

TEST_CASE("a step of a lost process that waits for others fails") {
  OneNumber shared(Mode::kSsp, 2, 0);
  const auto waits = shared.step(0);
  CHECK_FALSE(waits.done());
  shared.lose(0);
  CHECK(kind_of_step(waits) == ErrorKind::kPeerLost);
  CHECK(shared.made() == 1);  // the step had been applied
}

TEST_CASE("the last applied step of each process is reported") {
  OneNumber shared(Mode::kAsync, 2, 0);
  const auto last = [&](int participant, uint32_t incarnation = 0) {
    return shared.optimizer.last_step_of(OneNumber::process(participant, incarnation));
  };
  CHECK(last(0) == 0);
  for (int64_t i = 1; i <= 3; ++i) CHECK(shared.step(0, 0, i).done());
  CHECK(last(0) == 3);
  CHECK(last(1) == 0);
  CHECK(last(0, 1) == std::nullopt);
  CHECK(last(7) == std::nullopt);
  // A step with a gradient of the wrong size is refused and does not count.
  CHECK_THROWS(
      shared.optimizer.step({0, 1, 1, 4}, {at::ones({2}, at::kDouble)}, OneNumber::process(0)));
  CHECK(last(0) == 3);
  shared.lose(0);
  CHECK(last(0) == 3);
  shared.optimizer.take_part(0, OneNumber::process(0, 1));
  CHECK(last(0, 1) == 0);
  CHECK(shared.step(0, 1, 1).done());
  CHECK(last(0, 1) == 1);
}

TEST_CASE("in sync mode no participant continues without a lost one") {
  const bool job_goes_on = GENERATE(false, true);
  OneNumber shared(Mode::kSync, 2, 0);
  const auto waits = shared.step(0, 0, 1);
  CHECK_FALSE(waits.done());
  shared.lose(1, 0, job_goes_on);
  CHECK(kind_of_step(waits) == ErrorKind::kPeerLost);
  CHECK(error_of([&] { static_cast<void>(shared.step(0, 0, 2)); }).kind == ErrorKind::kPeerLost);
  CHECK(shared.made() == 0);
  CHECK(shared.optimizer.last_step_of(OneNumber::process(0)) == std::nullopt);  // unknown
}

TEST_CASE("if a loss ends the job, all waits for others fail") {
  OneNumber shared(Mode::kSsp, 3, 0);
  const auto first = shared.step(0), second = shared.step(1);
  shared.lose(2, 0, false);
  CHECK(kind_of_step(first) == ErrorKind::kPeerLost);
  CHECK(kind_of_step(second) == ErrorKind::kPeerLost);
  CHECK(kind_of_step(shared.step(0)) == ErrorKind::kPeerLost);
}

TEST_CASE("a step that waits for a participant that has left fails and names its rank") {
  const auto fails = [](const auto& waits) {
    const base::Error error = error_of([&] { waits.wait(); });
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == 2);
    return error.message;
  };
  SECTION("in sync mode") {
    OneNumber shared(Mode::kSync, 2, 0);
    const auto waits = shared.step(0);
    shared.optimizer.leave(OneNumber::process(1));
    CHECK(fails(waits) ==
          "participant 1 (rank 2) has entered shutdown() after 0 steps, and a step waits for one "
          "more of it");
    fails(shared.step(0));
    fails(shared.optimizer.norms_squared({0, 0}, {at::ones({1}, at::kDouble)}));
    CHECK(shared.made() == 0);
  }
  SECTION("in sync mode with clipping") {
    OneNumber shared(Mode::kSync, 2, 0);
    const auto waits = shared.optimizer.norms_squared({0, 0}, {at::ones({1}, at::kDouble)});
    shared.optimizer.leave(OneNumber::process(1));
    fails(waits);
  }
  SECTION("in sync mode, except for a step that it has made") {
    OneNumber shared(Mode::kSync, 3, 0);
    const auto last = shared.step(1), waits = shared.step(0);
    shared.optimizer.leave(OneNumber::process(1));
    CHECK_FALSE(waits.done());
    CHECK(shared.step(2).done());
    CHECK(waits.done());
    CHECK(last.done());
    fails(shared.step(0));
  }
  SECTION("in ssp") {
    OneNumber shared(Mode::kSsp, 2, 1);
    CHECK(shared.step(0).done());
    const auto waits = shared.step(0);
    CHECK_FALSE(waits.done());
    shared.optimizer.leave(OneNumber::process(1));
    fails(waits);
    fails(shared.step(0));
  }
  SECTION("in ssp, except for a participant that rested before") {
    OneNumber shared(Mode::kSsp, 2, 0);
    shared.optimizer.rest(OneNumber::process(1));
    shared.optimizer.leave(OneNumber::process(1));
    CHECK(shared.step(0).done());
  }
}

namespace {

struct Factor {
  at::Tensor weight = at::zeros({1}, at::kDouble).requires_grad_();
  at::Tensor forward(at::Tensor x) { return x * weight; }
  rpc::RRef<at::Tensor> parameter(rpc::CallContext& context) {
    return context.agent.make_rref(weight);
  }
};

// Holds the factor on rank 0 alive, so that other ranks can get it by shown().
struct Shown {
  rpc::RRef<Factor> factor;
};
rpc::RRef<Factor> shown(rpc::CallContext& context) { return context.agent.local<Shown>().factor; }

void train_one_step(rpc::CallContext& call);

void set_up_factor(Agent& agent) {
  autograd::install(agent);
  optim::install(agent);
  agent.expose<&Factor::forward>("Factor.forward");
  agent.expose<&Factor::parameter>("Factor.parameter");
  agent.expose<&shown>("shown");
  agent.expose<&train_one_step>("train_one_step");
  agent.provide(std::make_shared<Shown>());
}

// The training loop that ranks 1 and 2 run.
class Trainer {
 public:
  explicit Trainer(Agent& agent)
      : agent_(agent),
        factor_(agent.rpc_sync<&shown>(0)),
        optimizer_(agent, {factor_.rpc_sync<&Factor::parameter>()}, optim::Sgd{.lr = 1},
                   Sharing{Mode::kSsp, 2, agent.rank() - 1, 1}) {}

  void step() {
    autograd::Context context(agent_);
    backward(context);
    optimizer_.set_step_number(++steps_);
    optimizer_.step(context);
  }
  void backward(autograd::Context& context) {
    const at::Tensor x = at::ones({1}, at::kDouble);
    autograd::backward(context, {factor_.rpc_sync<&Factor::forward>(x).sum()});
  }

 private:
  Agent& agent_;
  rpc::RRef<Factor> factor_;
  DistributedOptimizer optimizer_;
  int64_t steps_ = 0;
};

void train_one_step(rpc::CallContext& call) { Trainer(call.agent).step(); }

void wait_until(const std::function<bool()>& holds) {
  const base::TimePoint limit = base::deadline_after(std::chrono::seconds(60));
  while (!holds()) {
    if (base::Clock::now() > limit) throw std::runtime_error("it did not come to that");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

TEST_CASE("a trainer continues without another, and with the process that replaces it") {
  Cluster cluster(3, set_up_factor);
  cluster[0].go_on_without({1, 2}, 1, "", true);
  const auto factor = std::make_shared<Factor>();
  cluster[0].local<Shown>().factor = cluster[0].make_rref(factor);
  auto stays = std::make_unique<Trainer>(cluster[1]);
  for (uint32_t before = 0; before < 3; ++before) {
    CAPTURE(before);
    auto other = std::make_unique<Trainer>(cluster[2]);
    optim::keep_updaters(cluster[0]);
    const rpc::ProcessNumber process = rpc::process_number(2, before);
    for (int i = 0; i < 2; ++i) other->step(), stays->step();
    CHECK(optim::last_step_of(cluster[0], process) == 2);
    // This context ends because its process is lost. Until then rank 0 holds gradients of the pass.
    auto context = std::make_unique<autograd::Context>(cluster[2]);
    other->backward(*context);
    CHECK(cluster[0].live_contexts() > 0);

    stays->step();
    std::thread ahead([&] { stays->step(); });
    wait_until([&] { return optim::progress_of(cluster[0], factor->weight, 0).lead == 2; });
    cluster[2].abort({ErrorKind::kPeerLost, "it is gone", -1, {}});
    ahead.join();
    CHECK(optim::last_step_of(cluster[0], process) == 2);
    wait_until([&] { return cluster[0].live_contexts() == 0; });
    context.reset();
    other.reset();
    cluster.kill(2);
    for (int i = 0; i < 3; ++i) stays->step();
    cluster.bring_back(2);
  }
  CHECK(factor->weight.item<double>() == -3 * (2 + 2 + 2 + 3));
  stays.reset();
  cluster[0].local<Shown>().factor = {};
  cluster.shutdown();
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(cluster[rank].live_rrefs() == 0);
    CHECK(cluster[rank].live_contexts() == 0);
  }
}

TEST_CASE("shutdown() ends waits for a trainer's steps unless others may still call it") {
  const bool is_called = GENERATE(false, true);
  CAPTURE(is_called);
  Cluster cluster(3, set_up_factor);
  const auto factor = std::make_shared<Factor>();
  cluster[0].local<Shown>().factor = cluster[0].make_rref(factor);
  auto stays = std::make_unique<Trainer>(cluster[1]);
  if (is_called) {
    cluster[1].rpc_sync<&train_one_step>(2);
  } else {
    Trainer(cluster[2]).step();
  }
  std::thread zero([&] { cluster[0].shutdown(); }), two([&] { cluster[2].shutdown(); });
  wait_until([&] { return !cluster[2].waits().empty(); });
  for (int i = 0; i < 2; ++i) stays->step();
  base::Error error;
  std::thread ahead([&] { error = error_of([&] { stays->step(); }); });
  if (is_called) {
    wait_until([&] { return optim::progress_of(cluster[0], factor->weight, 0).lead == 2; });
    cluster[1].rpc_sync<&train_one_step>(2);
  }
  ahead.join();
  if (is_called) {
    CHECK(error.message == "(no error)");
  } else {
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == 2);
  }
  stays.reset();
  cluster[0].local<Shown>().factor = {};
  cluster[1].shutdown();
  zero.join();
  two.join();
}

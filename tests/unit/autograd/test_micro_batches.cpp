// Tests several concurrent contexts, as a pipeline uses them.
#include <chrono>
#include <memory>
#include <thread>

#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using base::ErrorKind;
using rpc::Agent;
using rpc::RRef;
using testing::Cluster;
using testing::error_of;
using Scope = autograd::Context::Scope;

namespace {

/// Counts the calls to pass guards. The guards share this object, because the initiator may receive
/// a failure and destroy the stage before the failure reaches a guard.
struct Told {
  uint64_t gather_in = 0;
  std::atomic<int> ended{0};
  std::atomic<int> failed{0};
};

/// A stage whose backward passes wait until the test opens a gate. A task that waits at the gate
/// holds the guard, so a guard that held the gate would form a reference cycle.
struct GatedStage : std::enable_shared_from_this<GatedStage> {
  using Constructor = GatedStage(double weight);
  explicit GatedStage(double w) : weight(at::full({1}, w, at::kDouble).requires_grad_()) {}

  at::Tensor forward(rpc::CallContext& call, const RRef<at::Tensor>& input) {
    autograd::PassGuard guard;
    guard.admit = [stage = weak_from_this()] {
      const auto self = stage.lock();
      return self ? self->gate.future() : base::Promise<void>().future();
    };
    guard.on_end = [told = told, &agent = call.agent, from = rpc::current_context()] {
      if (told->gather_in != 0) autograd::move_gradients(agent, from, told->gather_in);
      ++told->ended;
    };
    guard.on_failure = [told = told](const base::Error&) { ++told->failed; };
    autograd::guard_pass(call.agent, guard);
    return input.to_here() * weight;
  }
  void gather() { told->gather_in = rpc::current_context(); }
  void open() { gate.set(); }
  void break_gate() { gate.fail({ErrorKind::kResources, "the gate broke", -1, {}}); }
  at::Tensor gradient(rpc::CallContext& call, uint64_t context) {
    return autograd::gradient(call.agent, context, weight);
  }
  int passes() { return told->ended; }
  int failures() { return told->failed; }

  at::Tensor weight;
  base::Promise<void> gate;
  const std::shared_ptr<Told> told = std::make_shared<Told>();
};

base::Future<at::Tensor> fetch_later(const RRef<at::Tensor>& value) {
  return value.to_here_async();
}

void setup_gated(Agent& agent) {
  autograd::install(agent);
  agent.expose_class<GatedStage>("GatedStage");
  agent.expose<&GatedStage::forward>("GatedStage.forward");
  agent.expose<&GatedStage::gather>("GatedStage.gather");
  agent.expose<&GatedStage::open>("GatedStage.open");
  agent.expose<&GatedStage::break_gate>("GatedStage.break_gate");
  agent.expose<&GatedStage::gradient>("GatedStage.gradient");
  agent.expose<&GatedStage::passes>("GatedStage.passes");
  agent.expose<&GatedStage::failures>("GatedStage.failures");
  agent.expose<&fetch_later>("fetch_later");
}

/// A batch of micro-batches, each with its own context, whose backward passes run concurrently.
struct Batch {
  Batch(Agent& agent, const RRef<GatedStage>& stage, int micro_batches) {
    for (int m = 0; m < micro_batches; ++m) {
      auto& context =
          *contexts.emplace_back(std::make_unique<autograd::Context>(agent, Scope::kExplicit));
      const rpc::ContextScope scope(agent, context.id());
      const auto output = stage.remote<&GatedStage::forward>(
          agent.make_rref(at::full({1}, static_cast<double>(m + 1), at::kDouble)));
      done.push_back(autograd::backward_async(context, {output.to_here_async().wait().sum()}));
    }
  }
  std::vector<std::unique_ptr<autograd::Context>> contexts;
  std::vector<base::Future<void>> done;
};

void check_all_released(Cluster& cluster) {
  cluster.shutdown();
  for (int rank = 0; rank < cluster.size(); ++rank) {
    CAPTURE(rank);
    CHECK(cluster[rank].live_contexts() == 0);
    CHECK(cluster[rank].live_rrefs() == 0);
  }
}

}  // namespace

TEST_CASE("gradients wait until they are admitted and are summed in one context") {
  Cluster cluster(2, setup_gated);
  {
    const auto stage = cluster[0].remote_new<GatedStage>(1, 2.0);
    const autograd::Context whole(cluster[0]);
    stage.rpc_sync<&GatedStage::gather>();
    {
      Batch batch(cluster[0], stage, 3);
      CHECK(stage.rpc_sync<&GatedStage::passes>() == 0);
      for (const auto& done : batch.done) CHECK_FALSE(done.done());
      stage.rpc_sync<&GatedStage::open>();
      base::wait_all(batch.done);
      CHECK(stage.rpc_sync<&GatedStage::passes>() == 3);
      for (const auto& context : batch.contexts) {
        CHECK_FALSE(stage.rpc_sync<&GatedStage::gradient>(context->id()).defined());
      }
    }
    CHECK(stage.rpc_sync<&GatedStage::gradient>(whole.id()).item<double>() == 1 + 2 + 3);
  }
  check_all_released(cluster);
}

TEST_CASE("gradients that are not admitted fail their pass") {
  Cluster cluster(2, setup_gated);
  {
    const auto stage = cluster[0].remote_new<GatedStage>(1, 2.0);
    Batch batch(cluster[0], stage, 2);
    stage.rpc_sync<&GatedStage::break_gate>();
    for (const auto& done : batch.done) {
      const base::Error error = error_of([&] { done.wait(); });
      CHECK(error.kind == ErrorKind::kResources);
      CHECK(error.message.find("the gate broke") != std::string::npos);
      CHECK(error.rank == 1);
    }
  }
  check_all_released(cluster);
}

TEST_CASE("a rank that dies while gradients wait at its gate fails their passes") {
  Cluster cluster(2, setup_gated);
  const auto stage = cluster[0].remote_new<GatedStage>(1, 2.0);
  Batch batch(cluster[0], stage, 2);
  cluster.kill(1);
  for (const auto& done : batch.done) {
    CHECK(error_of([&] { done.wait(); }).kind == ErrorKind::kPeerLost);
  }
}

TEST_CASE("gradients have their own timeout") {
  Cluster cluster(2, setup_gated);
  {
    const auto stage = cluster[0].remote_new<GatedStage>(1, 2.0);
    autograd::Context context(cluster[0]);
    const auto output =
        stage.remote<&GatedStage::forward>(cluster[0].make_rref(at::ones({1}, at::kDouble)));
    const at::Tensor root = output.to_here().sum();
    const base::Error error = error_of(
        [&] { autograd::backward(context, {root}, {.timeout = std::chrono::milliseconds(50)}); });
    CHECK(error.kind == ErrorKind::kDeadline);
    // The pass failed at the timeout, so gradients that reach the stage later must not start it.
    for (int i = 0; i < 3000 && stage.rpc_sync<&GatedStage::failures>() == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(stage.rpc_sync<&GatedStage::failures>() == 1);
    stage.rpc_sync<&GatedStage::open>();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(stage.rpc_sync<&GatedStage::passes>() == 0);
    CHECK_FALSE(stage.rpc_sync<&GatedStage::gradient>(context.id()).defined());
  }
  check_all_released(cluster);
}

TEST_CASE("a guard outside a context is refused") {
  Cluster cluster(2, setup_gated);
  {
    const auto stage = cluster[0].remote_new<GatedStage>(1, 2.0);
    const auto input = cluster[0].make_rref(at::ones({1}, at::kDouble));
    CHECK(error_of([&] { stage.rpc_sync<&GatedStage::forward>(input); }).kind ==
          ErrorKind::kInvalid);
  }
  check_all_released(cluster);
}

TEST_CASE("an explicit context is the current one within its scope") {
  Cluster cluster(1, setup_gated);
  {
    const autograd::Context outer(cluster[0]);
    const autograd::Context inner(cluster[0], Scope::kExplicit);
    CHECK(rpc::current_context() == outer.id());
    const rpc::ContextScope scope(cluster[0], inner.id());
    CHECK(rpc::current_context() == inner.id());
  }
  CHECK(rpc::current_context() == 0);
}

TEST_CASE("an RRef is fetched without blocking, locally and remotely") {
  Cluster cluster(2, setup_gated);
  {
    const auto value = cluster[0].make_rref(at::ones({2}));
    CHECK(at::equal(value.to_here_async().wait(), at::ones({2})));
    CHECK(at::equal(cluster[0].rpc_sync<&fetch_later>(1, value), at::ones({2})));
  }
  check_all_released(cluster);
}

// Tests DistributedDataParallel in passes of autograd contexts, which forward() announces to the
// reducer.
#include "distrain/ddp/reducer.h"
#include "support/catch.h"
#include "unit/ddp/manual_pass.h"
#include "unit/ddp/trainer.h"

using namespace distrain;
using namespace distrain::testing;

TEST_CASE("passes of contexts and plain passes give the same bits, the means that torch gives") {
  const auto train = [](bool plain, bool in_context) {
    return on_trainers([=](Trainer& trainer) {
      for (int step = 0; step < 10; ++step) {
        const auto wanted = reference(trainer, {step});
        if (plain && !(in_context && step % 2)) {
          std::optional<autograd::Context> context;
          if (in_context) context.emplace(trainer.agent);
          trainer.forward(step).backward();
          expect_close(trainer.grads(), wanted, "a plain pass");
          trainer.update(trainer.grads());
        } else {
          autograd::Context context(trainer.agent);
          autograd::backward(context, {trainer.forward(step)});
          expect_close(trainer.gradients(context), wanted, "a pass of a context");
          for (const at::Tensor& p : trainer.parameters()) {
            expect(!p.grad().defined(), ".grad was touched");
          }
          trainer.update(trainer.gradients(context));
        }
      }
      expect(trainer.group->refused == 0, "all forwards had their backward");
    });
  };
  const Values plain = train(true, false);
  CHECK(all_same_bits(plain, train(false, false)));
  CHECK(all_same_bits(plain, train(true, true)));  // plain and context passes alternate
}

TEST_CASE("several forwards before one backward and several backwards are averaged") {
  on_trainers([](Trainer& trainer) {
    for (int round = 0; round < 3; ++round) {
      const auto wanted = reference(trainer, {1, 2});
      {
        autograd::Context context(trainer.agent);
        const at::Tensor loss = trainer.forward(1) + trainer.forward(2);
        autograd::backward(context, {loss});
        expect_close(trainer.gradients(context), wanted, "the sum");
      }
      {
        autograd::Context context(trainer.agent);
        const at::Tensor first = trainer.forward(1), second = trainer.forward(2);
        autograd::backward(context, {first});
        autograd::backward(context, {second});
        expect_close(trainer.gradients(context), wanted, "one after the other");
      }
      autograd::Context context(trainer.agent);
      for (int step : {1, 2}) autograd::backward(context, {trainer.forward(step)});
      expect_close(trainer.gradients(context), wanted, "in turns");
      trainer.update(trainer.gradients(context));
    }
    autograd::Context context(trainer.agent);
    const at::Tensor loss = trainer.forward(3);
    autograd::backward(context, {loss}, {.retain_graph = true});
    autograd::backward(context, {loss});
    expect_close(trainer.gradients(context), reference(trainer, {3, 3}), "a graph used twice");
    expect(trainer.group->refused == 0, "all forwards had their backward");
  });
}

TEST_CASE("contexts of micro-batches may be in flight together") {
  on_trainers([](Trainer& trainer) {
    for (int round = 0; round < 3; ++round) {
      std::vector<std::unique_ptr<autograd::Context>> contexts;
      std::vector<at::Tensor> losses;
      for (int m = 0; m < 4; ++m) {
        contexts.push_back(std::make_unique<autograd::Context>(trainer.agent, Scope::kExplicit));
        const rpc::ContextScope scope(trainer.agent, contexts.back()->id());
        losses.push_back(trainer.forward(m));
      }
      for (size_t m : {2, 0, 3, 1}) autograd::backward(*contexts[m], {losses[m]});
      Values sum;
      for (int m = 0; m < 4; ++m) {
        const auto mine = trainer.gradients(*contexts[static_cast<size_t>(m)]);
        expect_close(mine, reference(trainer, {m}), "a micro-batch");
        for (size_t i = 0; i < mine.size(); ++i) {
          if (m == 0) sum.push_back(mine[i].clone());
          if (m > 0) sum[i] += mine[i];
        }
      }
      trainer.update(sum);
    }
    expect(trainer.group->refused == 0, "all forwards had their backward");
  });
}

TEST_CASE("a forward() without gradients announces no pass to the reducer") {
  on_trainers([](Trainer& trainer) {
    for (int step = 0; step < 3; ++step) {
      if (trainer.rank() == 1) {  // rank 0 runs none of these forwards
        autograd::Context context(trainer.agent);
        {
          const at::NoGradGuard no_grad;
          trainer.forward(step);
        }
        trainer.model->module()->eval();
        trainer.forward(step);
        trainer.model->module()->train();
      }
      trainer.step(step);
    }
    expect(trainer.group->refused == 0, "nothing was promised");
  });
}

TEST_CASE("only one pass runs at a time, whoever announced it") {
  on_trainers([](Trainer& trainer) {
    ManualPass first(trainer.model->reducer());
    const Values parameters = trainer.parameters();
    first.give(parameters[0], at::zeros_like(parameters[0]));
    {
      autograd::Context context(trainer.agent);
      const at::Tensor loss = trainer.forward(1);
      const base::Error error = error_of([&] { autograd::backward(context, {loss}); });
      expect(error.kind == ErrorKind::kInvalid, error.message);
      expect(contains(error.message, "one at a time"), error.message);
    }
    auto wanted = reference(trainer, {2});
    wanted[0].zero_();
    first.backward(trainer.forward_alone(2), {parameters.begin() + 1, parameters.end()});
    Values means;
    for (const at::Tensor& p : parameters) means.push_back(first.gradient(p));
    expect_close(means, wanted, "the first pass");
  });
}

TEST_CASE("expect() announces a context to a Reducer without a module") {
  Cluster cluster(kTrainers, [](rpc::Agent& agent) { autograd::install(agent); });
  cluster.on_all([](rpc::Agent& agent) {
    const at::Tensor w = at::ones({3}).set_requires_grad(true);
    ddp::Reducer reducer({{"w", w}}, join_group(agent));
    for (int step = 0; step < 3; ++step) {
      autograd::Context context(agent);
      reducer.expect(*autograd::ContextRef::current());
      autograd::backward(context, {(w * double(agent.rank() + step)).sum()});
      expect(at::equal(context.gradient(w), at::full({3}, 0.5 + step)), "the mean");
    }
  });
  cluster.shutdown();
}

TEST_CASE("a gradient that arrives after its pass has failed begins no other pass") {
  Cluster cluster(kTrainers, [](rpc::Agent& agent) { autograd::install(agent); });
  cluster.on_all([](rpc::Agent& agent) {
    const at::Tensor w = at::ones({3}).set_requires_grad(true);
    ddp::Reducer reducer({{"w", w}}, join_group(agent));
    for (int step = 0; step < 4; ++step) {
      autograd::Context context(agent);
      reducer.expect(*autograd::ContextRef::current());
      const at::Tensor loss = (w * double(agent.rank() + step)).sum();
      const bool fails = step == 1 || step == 2;
      if (fails && agent.rank() == 0) {  // runs between the gradient and the reducer's hook
        context.on_gradient_ready(w, [&](const at::Tensor&) {
          autograd::fail_passes(context, {ErrorKind::kBadData, "on purpose", 0, {}});
        });
      }
      const base::Error error = error_of([&] { autograd::backward(context, {loss}); });
      if (!fails) expect(at::equal(context.gradient(w), at::full({3}, 0.5 + step)), "the mean");
      const std::string wanted = !fails              ? kNone
                                 : agent.rank() == 0 ? "on purpose"
                                                     : "the backward pass of rank 0";
      expect(contains(error.message, wanted), error.message);
    }
  });
  cluster.shutdown();
}

TEST_CASE("the current context of a thread is that of the calling agent") {
  Cluster cluster(2, [](rpc::Agent& agent) { autograd::install(agent); });
  CHECK_FALSE(autograd::ContextRef::current());
  const autograd::Context context(cluster[1], Scope::kExplicit);
  {
    const rpc::ContextScope scope(context.id());
    const base::Error error = error_of([] { autograd::ContextRef::current(); });
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(contains(error.message, "rpc::ContextScope(agent"));
  }
  const rpc::ContextScope scope(cluster[1], context.id());
  CHECK(autograd::ContextRef::current()->id() == context.id());
  {
    const autograd::Context other(cluster[0]);
    CHECK(autograd::ContextRef::current()->id() == other.id());
    const rpc::ContextScope outside(0);
    CHECK_FALSE(autograd::ContextRef::current());
  }
  uint64_t seen = 0;
  base::Promise<void> promise;
  base::Future<void> done = promise.future().then(
      cluster[1].executor(), [&] { seen = autograd::ContextRef::current()->id(); });
  promise.set();
  done.wait();
  CHECK(seen == context.id());
  CHECK(cluster[0].live_contexts() == 0);
}

namespace {

at::Tensor remote_module_forward(rpc::CallContext& call, const at::Tensor& x) {
  return call.agent.local<Trainer>().model->module()->forward(x);
}

}  // namespace

TEST_CASE("replicas work in the handlers of another rank's pass") {
  Cluster cluster(kTrainers + 1, [](rpc::Agent& agent) {
    autograd::install(agent);
    agent.expose<&trainer_forward>("forward");
    agent.expose<&remote_module_forward>("module_forward");
  });
  const auto trainers = provide_trainers(cluster);
  rpc::Agent& master = cluster[kTrainers];
  // Step 2, which fails, runs last: a trainer may end that pass after the master sees the error.
  for (const int step : {0, 1, 3, 2}) {
    autograd::Context context(master);
    std::vector<base::Future<at::Tensor>> outputs;
    for (int rank = 0; rank < kTrainers; ++rank) {
      outputs.push_back(step == 2 && rank == 1
                            ? master.rpc_async<&remote_module_forward>(rank, batch(rank, step))
                            : master.rpc_async<&trainer_forward>(rank, batch(rank, step)));
    }
    at::Tensor loss;
    for (auto& output : outputs) {
      const at::Tensor part = trainers[0]->loss_of(output.wait());
      loss = loss.defined() ? loss + part : part;
    }
    const base::Error error = error_of([&] { autograd::backward(context, {loss}); });
    if (step == 2) {
      CHECK(error.kind == ErrorKind::kInvalid);
      CHECK(error.rank == 1);
      CHECK(contains(error.message, "forward() in that context"));
      continue;
    }
    REQUIRE(error.message == kNone);
    const auto wanted = reference(*trainers[0], {step});
    for (const auto& trainer : trainers) {
      const auto parameters = trainer->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        CHECK(at::allclose(autograd::gradient(trainer->agent, context.id(), parameters[i]),
                           wanted[i], 1e-5, 1e-6));
      }
    }
  }
  cluster.shutdown();
}

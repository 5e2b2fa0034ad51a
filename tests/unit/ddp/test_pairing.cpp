// Tests which passes of two ranks are averaged with each other.
#include "distrain/ddp/reducer.h"
#include "support/catch.h"
#include "unit/ddp/trainer.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

/// Checks that the error, on both trainers, says that rank 1 has omitted a pass.
void expect_left_out(const base::Error& error, const std::string& its_pass,
                     const std::string& the_others) {
  expect(error.kind == ErrorKind::kInvalid, error.message);
  expect(error.rank == 1, "rank");
  expect(contains(error.message, "rank 1 is in the backward pass " + its_pass), error.message);
  expect(contains(error.message, "rank 0 in the backward pass " + the_others), error.message);
}

}  // namespace

TEST_CASE("if a rank omits a backward, its next step is not averaged with the omitted one") {
  on_trainers([](Trainer& trainer) {
    trainer.forward(1).backward();
    trainer.update(trainer.grads());
    if (trainer.rank() == 1) trainer.forward(2);
    for (int step : {2, 3}) {  // later steps are not averaged with it either
      const at::Tensor loss = trainer.forward(step + trainer.rank());
      expect_left_out(error_of([&] { loss.backward(); }), "of forward " + std::to_string(step + 1),
                      "of forward " + std::to_string(step));
      for (const at::Tensor& p : trainer.parameters()) p.mutable_grad() = at::Tensor();
    }
  });
}

TEST_CASE("a rank that omits one of several micro-batches is named") {
  on_trainers([](Trainer& trainer) {
    trainer.step(1);
    std::vector<std::unique_ptr<autograd::Context>> contexts;
    std::vector<at::Tensor> losses;
    for (int m = 0; m < 2; ++m) {
      contexts.push_back(std::make_unique<autograd::Context>(trainer.agent, Scope::kExplicit));
      const rpc::ContextScope scope(trainer.agent, contexts.back()->id());
      losses.push_back(trainer.forward(m));
    }
    const auto backward = [&](size_t m) {
      return error_of([&] { autograd::backward(*contexts[m], {losses[m]}); });
    };
    expect_left_out(backward(trainer.rank() == 1 ? 1 : 0), "of forward 3", "of forward 2");
    if (trainer.rank() == 0) {
      const base::Error error = backward(1);
      expect(error.kind == ErrorKind::kRemoteFailed && error.rank == 1, error.message);
      expect(contains(error.message, "backward pass of rank 1 never came"), error.message);
    }
    contexts.clear();
  });
}

TEST_CASE("with set_step(), a rank that omits forward and backward is named") {
  const bool plain = GENERATE(true, false);
  on_trainers([=](Trainer& trainer) {
    ddp::Reducer& reducer = trainer.model->reducer();
    trainer.step(1);
    const int step = 7 + trainer.rank();
    reducer.set_step(static_cast<uint64_t>(step));
    const base::Error error = error_of([&] {
      if (plain) return trainer.forward(step).backward();
      autograd::Context context(trainer.agent);
      autograd::backward(context, {trainer.forward(step)});
    });
    expect_left_out(error, plain ? "of forward 1 in step 8" : "of forward 2 in step 8",
                    plain ? "of forward 1 in step 7" : "of forward 2 in step 7");
    for (const at::Tensor& p : trainer.parameters()) p.mutable_grad() = at::Tensor();
    reducer.set_step(9);  // the ranks are synchronized again
  });
}

TEST_CASE("forwards without gradients may differ between ranks and do not shift the pairing") {
  on_trainers([](Trainer& trainer) {
    const auto evaluate = [&] {
      for (int times = 0; times < 2 * trainer.rank(); ++times) {
        {
          const at::NoGradGuard no_grad;
          trainer.forward(times);
        }
        trainer.model->module()->eval();
        trainer.forward(times);
        trainer.model->module()->train();
      }
    };
    for (int step = 0; step < 3; ++step) {
      const auto wanted = reference(trainer, {step});
      evaluate();
      const at::Tensor loss = trainer.forward(step);
      evaluate();
      loss.backward({}, /*retain_graph=*/true);
      expect_close(trainer.grads(), wanted, "a plain pass");
      evaluate();
      for (const at::Tensor& p : trainer.parameters()) p.mutable_grad() = at::Tensor();
      loss.backward();
      expect_close(trainer.grads(), wanted, "its graph once more");
      trainer.update(trainer.grads());
      trainer.step(step + 10);
    }
    expect(trainer.group->refused == 0, "nothing was wrong");
  });
}

TEST_CASE("calls for two contexts may reach the ranks in different orders") {
  Cluster cluster(kTrainers + 1, [](rpc::Agent& agent) {
    autograd::install(agent);
    agent.expose<&trainer_forward>("forward");
  });
  const auto trainers = provide_trainers(cluster);
  rpc::Agent& master = cluster[kTrainers];
  std::vector<std::unique_ptr<autograd::Context>> contexts;
  for (int i = 0; i < 2; ++i) {
    contexts.push_back(std::make_unique<autograd::Context>(master, Scope::kExplicit));
  }
  at::Tensor losses[2];
  for (int rank = 0; rank < kTrainers; ++rank) {
    for (int turn = 0; turn < 2; ++turn) {
      const int step = rank == 0 ? turn : 1 - turn;
      const rpc::ContextScope scope(master, contexts[size_t(step)]->id());
      const at::Tensor part =
          trainers[0]->loss_of(master.rpc_sync<&trainer_forward>(rank, batch(rank, step)));
      losses[step] = losses[step].defined() ? losses[step] + part : part;
    }
  }
  for (int step = 0; step < 2; ++step) {
    autograd::backward(*contexts[size_t(step)], {losses[step]});
    const auto wanted = reference(*trainers[0], {step});
    for (const auto& trainer : trainers) {
      const auto parameters = trainer->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        CHECK(at::allclose(
            autograd::gradient(trainer->agent, contexts[size_t(step)]->id(), parameters[i]),
            wanted[i], 1e-5, 1e-6));
      }
    }
  }
  contexts.clear();
  cluster.shutdown();
}

TEST_CASE("the gradients of two Reducers of one group may arrive in different orders") {
  Cluster cluster(kTrainers);
  cluster.on_all([](rpc::Agent& agent) {
    const auto group = join_group(agent);
    const at::Tensor first = at::ones({3}).set_requires_grad(true);
    const at::Tensor second = at::ones({3}).set_requires_grad(true);
    ddp::Reducer of_first({{"w", first}}, group), of_second({{"w", second}}, group);
    for (int step = 0; step < 3; ++step) {
      // Torch computes the gradient of the most recently used tensor first.
      const double by = agent.rank() + step;
      at::Tensor a, b;
      if (agent.rank() == 0) a = (first * by).sum();
      b = (second * (10 * by)).sum();
      if (agent.rank() == 1) a = (first * by).sum();
      (a + b).backward();
      expect(at::equal(first.grad(), at::full({3}, 0.5 + step)), "the first one's mean");
      expect(at::equal(second.grad(), at::full({3}, 10 * (0.5 + step))), "the second one's");
      first.mutable_grad() = second.mutable_grad() = at::Tensor();
    }
  });
  cluster.shutdown();
}

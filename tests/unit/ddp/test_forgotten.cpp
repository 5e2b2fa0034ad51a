// Tests trainers that omit forward(), or the backward pass after it, in an autograd context.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "support/catch.h"
#include "unit/ddp/trainer.h"

using namespace distrain;
using namespace distrain::testing;

TEST_CASE("using parameters without forward() is an error on all trainers") {
  const auto forgetting = GENERATE(0, 1, 2, 3, 4);
  const bool on_both = GENERATE(false, true);
  if (forgetting == 2 && !on_both) return;  // both have announced a pass, so none is missing
  on_trainers([&](Trainer& trainer) {
    const auto forget = [&] {
      switch (forgetting) {
        case 0:  // calls the module's forward instead of the DistributedDataParallel's
          return trainer.forward_alone(2);
        case 1: {  // runs forward() outside of the context
          const rpc::ContextScope outside(0);
          return trainer.forward(2);
        }
        case 2: {  // runs forward() in another context
          autograd::Context other(trainer.agent);
          return trainer.forward(2);
        }
        case 3: {  // runs forward() in eval mode
          trainer.model->module()->eval();
          const at::Tensor loss = trainer.forward(2);
          trainer.model->module()->train();
          return loss;
        }
        default: {  // runs forward() only without gradients
          const at::NoGradGuard no_grad;
          trainer.forward(2);
        }
          return trainer.forward_alone(2);
      }
    };
    trainer.step(1);
    const bool forgets = on_both || trainer.rank() == 1;
    for (int times = 0; times < 2; ++times) {
      autograd::Context context(trainer.agent);
      const at::Tensor loss = forgets ? forget() : trainer.forward(2);
      const base::Error error = error_of([&] { autograd::backward(context, {loss}); });
      const int culprit = on_both ? trainer.rank() : 1;
      expect(error.kind == ErrorKind::kInvalid, error.message);
      expect(error.rank == culprit, "rank");
      // The error names the last layer, whose gradients arrive first.
      expect(contains(error.message, "parameter '2."), error.message);
      expect(contains(error.message, "on rank " + std::to_string(culprit)), error.message);
      expect(contains(error.message, "forward() in that context"), error.message);
    }
    trainer.step(3);
  });
}

TEST_CASE("a forward whose backward runs on no trainer is harmless") {
  on_trainers([](Trainer& trainer) {
    for (int step = 0; step < 4; ++step) {
      const auto wanted = reference(trainer, {step});
      {
        autograd::Context context(trainer.agent);
        trainer.forward(step + 10);
      }
      if (step % 2) {
        autograd::Context context(trainer.agent);
        trainer.forward(step + 20);
        trainer.forward(step + 30);
      }
      autograd::Context context(trainer.agent);
      autograd::backward(context, {trainer.forward(step)});
      expect_close(trainer.gradients(context), wanted, "the step after it");
      trainer.update(trainer.gradients(context));
    }
  });
}

TEST_CASE("if only some trainers run the backward of a forward, the missing trainer is named") {
  const bool plain = GENERATE(false, true);  // the kind of pass with which rank 1 continues
  on_trainers([=](Trainer& trainer) {
    trainer.step(1);
    for (int step = 2; step < 5; ++step) {
      {
        autograd::Context context(trainer.agent);
        const at::Tensor loss = trainer.forward(step);
        if (trainer.rank() == 0) {
          const base::Error error = error_of([&] { autograd::backward(context, {loss}); });
          expect(error.kind == ErrorKind::kRemoteFailed, error.message);
          expect(error.rank == 1, "rank");
          expect(contains(error.message, "backward pass of rank 1 never came"), error.message);
        }
      }
      if (plain) {
        trainer.forward(step).backward();
        trainer.update(trainer.grads());
      } else {
        trainer.step(step);
      }
    }
  });
}

TEST_CASE("a pass that reaches no parameter, or not all, is an error") {
  const bool none = GENERATE(false, true);
  on_trainers([=](Trainer& trainer) {
    trainer.step(1);
    autograd::Context context(trainer.agent);
    const at::Tensor x = at::ones({2}).set_requires_grad(true);
    const at::Tensor loss = trainer.forward(2);
    at::Tensor root = loss;
    if (trainer.rank() == 1) root = none ? x.sum() : trainer.parameters()[0].sum();
    const base::Error error = error_of([&] { autograd::backward(context, {root}); });
    expect(error.kind == ErrorKind::kInvalid, error.message);
    expect(error.rank == 1, "rank");
    expect(contains(error.message, "'2.bias' in the backward pass of rank 1"), error.message);
    expect(contains(error.message, "'0.weight'") == none, error.message);
  });
}

TEST_CASE("a pass that fails before it reaches a parameter notifies the others at once") {
  on_trainers([](Trainer& trainer) {
    trainer.step(1);
    {
      autograd::Context context(trainer.agent);
      const at::Tensor output = trainer.model->forward(batch(trainer.rank(), 2));
      if (trainer.rank() == 1) {
        output.register_hook([](const at::Tensor&) -> at::Tensor {
          throw base::Exception(ErrorKind::kBadData, "the user's");
        });
      }
      // Rank 0 fails at once, while rank 1's context still exists.
      const base::Error error =
          error_of([&] { autograd::backward(context, {trainer.loss_of(output)}); });
      const bool own = trainer.rank() == 1;
      expect(error.kind == (own ? ErrorKind::kBadData : ErrorKind::kRemoteFailed), error.message);
      expect(error.rank == 1, "rank");
      if (!own) expect(contains(error.message, "rank 1 failed before its end"), error.message);
    }
    trainer.step(3);
  });
}

TEST_CASE("a plain backward over the result of a call names autograd::backward") {
  const bool on_both = GENERATE(false, true);
  on_trainers([=](Trainer& trainer) {
    for (int step = 0; step < 3; ++step) {
      const bool forgets = on_both || trainer.rank() == 1;
      {
        autograd::Context context(trainer.agent);
        const at::Tensor x = batch(trainer.rank(), step).set_requires_grad(true);
        const at::Tensor y = trainer.agent.rpc_sync<&doubled>(1 - trainer.rank(), x);
        const at::Tensor loss = trainer.loss_of(trainer.model->forward(y));
        const base::Error error = error_of([&] {
          if (forgets) {
            loss.backward();
          } else {
            autograd::backward(context, {loss});
          }
        });
        if (forgets) {
          expect(error.kind == ErrorKind::kInvalid, error.message);
          expect(contains(error.message, "autograd::backward(context, {loss})"), error.message);
          expect(contains(error.message, "on rank " + std::to_string(1 - trainer.rank())),
                 error.message);
        } else if (step == 0) {
          // Rank 1 sent all gradients but does not reorder its buckets after the first pass.
          expect(error.kind == ErrorKind::kRemoteFailed && error.rank == 1, error.message);
          expect(contains(error.message, "rank 1 failed before its end"), error.message);
        } else {
          expect(error.message == kNone, error.message);
        }
      }
      for (const at::Tensor& p : trainer.parameters()) p.mutable_grad() = at::Tensor();
      trainer.step(step);
    }
  });
}

TEST_CASE("a replica that is destroyed while a pass is announced notifies the others") {
  on_trainers([](Trainer& trainer) {
    autograd::Context context(trainer.agent);
    const at::Tensor loss = trainer.forward(1);
    if (trainer.rank() == 0) {
      const base::Error error = error_of([&] { autograd::backward(context, {loss}); });
      expect(error.kind == ErrorKind::kRemoteFailed && error.rank == 1, error.message);
      expect(contains(error.message, "rank 1 ended with its Reducer"), error.message);
    }
    trainer.model.reset();
  });
}

namespace {

struct CountingHook final : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int& calls_in) : calls(calls_in) {}
  void operator()(const at::Tensor&) override { ++calls; }
  int& calls;
};

}  // namespace

TEST_CASE("a trainer whose last loss does not depend on the parameters is named when it leaves") {
  on_trainers([](Trainer& trainer) {
    trainer.forward(1).backward();
    const at::Tensor loss = trainer.forward(2);
    if (trainer.rank() == 0) {
      const base::Error error = error_of([&] { loss.backward(); });
      expect(error.kind == ErrorKind::kPeerLost, error.message);
      expect(error.rank == 1, "rank");
      expect(contains(error.message, "rank 1 has closed the group"), error.message);
    }
    trainer.model.reset();
  });
}

TEST_CASE("a post-accumulate hook is refused, because a pass of a context would not call it") {
  Cluster cluster(1, [](rpc::Agent& agent) { autograd::install(agent); });
  const at::Tensor w = at::ones({3}).set_requires_grad(true);
  int calls = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<CountingHook>(calls));
  autograd::Context context(cluster[0]);
  const base::Error error = error_of([&] { autograd::backward(context, {(w * 2).sum()}); });
  CHECK(error.kind == ErrorKind::kInvalid);
  CHECK(error.rank == 0);
  CHECK(contains(error.message, "leaf of shape [3]"));
  CHECK(contains(error.message, "on_gradient_ready"));
  int ready = 0;
  context.on_gradient_ready(w, [&](const at::Tensor&) { ++ready; });
  autograd::backward(context, {(w * 2).sum()});
  CHECK(ready == 1);
  CHECK(calls == 0);
}

#include <torch/nn/modules/batchnorm.h>

#include "unit/ddp/manual_pass.h"
#include "unit/ddp/trainer.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

// Returns torch's gradients of the sum of the losses of `steps`, for one rank or, if `rank` is -1,
// as the mean over both.
Values sums(const std::vector<int>& steps, int rank = -1) {
  auto net = make_net();
  for (const int step : steps) {
    for (int r = 0; r < kTrainers; ++r) {
      if (rank < 0 || r == rank) {
        const double share = rank < 0 ? kTrainers : 1;
        (net->forward(batch(r, step)).pow(2).mean() / share).backward();
      }
    }
  }
  Values result;
  for (const at::Tensor& p : net->parameters()) result.push_back(p.grad());
  return result;
}

void on_both(const std::function<void(Trainer&)>& fn) {
  Cluster cluster(kTrainers, [](rpc::Agent& agent) { autograd::install(agent); });
  cluster.on_all([&](rpc::Agent& agent) {
    Trainer trainer(agent);
    fn(trainer);
  });
  cluster.shutdown();
}

}  // namespace

TEST_CASE("in no_sync() gradients add up on each rank, and the next pass averages the sums") {
  on_both([](Trainer& trainer) {
    for (int round = 0; round < 3; ++round) {
      std::vector<int> steps;
      trainer.model->module()->zero_grad(/*set_to_none=*/round != 1);
      for (int i = 0; i < 3; ++i) {
        const auto guard = trainer.model->no_sync();
        steps.push_back(10 * round + i);
        trainer.forward(steps.back()).backward();
        expect_close(trainer.grads(), sums(steps, trainer.rank()), "local");
      }
      steps.push_back(10 * round + 3);
      trainer.forward(steps.back()).backward();
      expect_close(trainer.grads(), sums(steps), "averaged");
    }
  });
}

TEST_CASE("the guard of no_sync() counts for the forward pass, not for its backward pass") {
  on_both([](Trainer& trainer) {
    at::Tensor inside;
    {
      const auto guard = trainer.model->no_sync();
      const auto nested = trainer.model->no_sync();
      inside = trainer.forward(1);
    }
    inside.backward();
    expect_close(trainer.grads(), sums({1}, trainer.rank()), "forward inside, backward outside");
    const at::Tensor outside = trainer.forward(2);
    {
      const auto guard = trainer.model->no_sync();
      outside.backward();
      expect_close(trainer.grads(), sums({1, 2}), "forward outside, backward inside");
    }
    trainer.model->module()->zero_grad();
    const at::Tensor first = trainer.forward(3);
    const auto guard = trainer.model->no_sync();
    const at::Tensor second = trainer.forward(4);
    first.backward();
    expect_close(trainer.grads(), sums({3}), "of the forward outside");
    second.backward();
    for (size_t i = 0; i < trainer.grads().size(); ++i) {
      const at::Tensor wanted = sums({3})[i] + sums({4}, trainer.rank())[i];
      expect(at::allclose(trainer.grads()[i], wanted, 1e-5, 1e-6), "of the forward inside");
    }
  });
}

TEST_CASE("a parameter that only passes in no_sync() have used is averaged") {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    const at::Tensor a = at::ones({2}).set_requires_grad(true);
    const at::Tensor b = at::ones({2}).set_requires_grad(true);
    ddp::Reducer reducer({{"a", a}, {"b", b}}, group.backends[size_t(rank)],
                         {.find_unused_parameters = true});
    for (int round = 0; round < 2; ++round) {
      a.mutable_grad() = b.mutable_grad() = at::Tensor();
      reducer.count_forward(/*is_local=*/true);
      (rank == 0 ? (a + b).sum() * 2 : a.sum()).backward();
      reducer.count_forward();
      a.sum().backward();
      RANK_CHECK(at::equal(a.grad(), at::full({2}, 2.5)) && at::equal(b.grad(), at::ones({2})));
      RANK_CHECK(at::equal(reducer.used(), at::tensor({2, 1}, at::kInt)));
      reducer.count_forward();
      a.sum().backward();
      RANK_CHECK(at::equal(reducer.used(), at::tensor({2, 0}, at::kInt)));
    }
  });
}

TEST_CASE("in no_sync() the gradients of a context stay local, and a later pass averages the sum") {
  on_both([](Trainer& trainer) {
    for (int round = 0; round < 2; ++round) {
      autograd::Context context(trainer.agent);
      {
        const auto guard = trainer.model->no_sync();
        autograd::backward(context, {trainer.forward(1)});
      }
      expect_close(trainer.gradients(context), sums({1}, trainer.rank()), "local");
      autograd::backward(context, {trainer.forward(2)});
      expect_close(trainer.gradients(context), sums({1, 2}), "averaged");
      for (const at::Tensor& each : trainer.grads()) expect(!each.defined(), ".grad is untouched");
    }
    // Micro-batches in contexts of their own: the last pass averages what is moved to its context.
    using Scope = autograd::Context::Scope;
    autograd::Context last(trainer.agent, Scope::kExplicit);
    {
      const auto guard = trainer.model->no_sync();
      autograd::Context part(trainer.agent);
      autograd::backward(part, {trainer.forward(3)});
      autograd::move_gradients(trainer.agent, part.id(), last.id());
    }
    const rpc::ContextScope scope(trainer.agent, last.id());
    autograd::backward(last, {trainer.forward(4)});
    expect_close(trainer.gradients(last), sums({3, 4}), "of both contexts");
  });
}

TEST_CASE("ranks that disagree on no_sync() get an error in the next averaged pass") {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    ddp::DistributedDataParallel model(make_net(), group.backends[size_t(rank)]);
    const auto pass = [&] { model.forward(batch(rank, 1)).sum().backward(); };
    if (rank == 0) {
      const auto guard = model.no_sync();
      pass();
    }
    const base::Error error = thrown_by(pass);
    RANK_CHECK(error.kind == ErrorKind::kInvalid);
    RANK_CHECK(contains(error.message, "forward 2") && contains(error.message, "forward 1"));
  });
}

TEST_CASE("a rank that is lost in no_sync() ends the next averaged pass of the others") {
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  std::promise<void> in_guard;
  run_ranks(2, [&](int rank) {
    ddp::DistributedDataParallel model(make_net(), group.backends[size_t(rank)]);
    const auto pass = [&] { model.forward(batch(rank, 1)).sum().backward(); };
    {
      const auto guard = model.no_sync();
      pass();
      if (rank == 1) {
        in_guard.get_future().wait();
        return group.network.kill(1);
      }
      in_guard.set_value();
      pass();
    }
    RANK_CHECK(thrown_by(pass).kind == ErrorKind::kPeerLost);
  });
}

TEST_CASE("buffers are copied as torch does around no_sync(), and not without broadcast_buffers") {
  const bool broadcasts = GENERATE(true, false);
  TestGroup group(2, {.timeout = std::chrono::seconds(60)});
  run_ranks(2, [&](int rank) {
    torch::nn::BatchNorm1d net(4);
    ddp::DistributedDataParallel model(net, group.backends[size_t(rank)],
                                       {.broadcast_buffers = broadcasts});
    const auto forward = [&] { return model.forward(batch(rank, 1)).sum(); };
    const auto mark = [&] { net->running_mean.fill_(rank == 0 ? 100 : 0); };
    // The mean is about 90 after a forward pass that has copied rank 0's, and about 0 otherwise.
    const auto copied = [&] { return net->running_mean.mean().item<double>() > 50; };
    const auto check = [&](bool wanted) {
      RANK_CHECK(copied() == (rank == 0 || (wanted && broadcasts)));
    };
    mark();
    forward().backward();
    check(true);
    {
      const auto guard = model.no_sync();
      mark();
      forward().backward();
      check(true);  // the forward pass before was averaged
      mark();
      forward().backward();
      check(false);
    }
    mark();
    forward().backward();
    check(false);
    mark();
    forward().backward();
    check(true);
  });
}

#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "distrain/autograd/context.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "unit/collective/test_group.h"

namespace distrain::testing {

using base::ErrorKind;
using collective::ReduceGroup;
using Scope = autograd::Context::Scope;
using Model = ddp::DistributedDataParallel<torch::nn::Sequential>;

constexpr int kTrainers = 2;
inline const ddp::Reducer::Options kSmallBuckets{.bucket_cap_bytes = 60, .first_bucket_bytes = 30};
inline const std::string kNone = "(no error)";

inline torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::Tanh(), torch::nn::Linear(6, 2));
  auto generator = at::detail::createCPUGenerator(7);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : net->parameters()) p.copy_(at::randn(p.sizes(), generator));
  return net;
}

inline at::Tensor batch(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank));
  return at::randn({5, 4}, generator);
}

/// Wraps a StagedReduceGroup and counts the calls to refuse().
class CountingGroup final : public ReduceGroup {
  using Count = std::shared_ptr<std::atomic<int>>;
  const std::shared_ptr<ReduceGroup> group_;
  const Count count_;

 public:
  explicit CountingGroup(std::shared_ptr<ReduceGroup> group,
                         Count count = std::make_shared<std::atomic<int>>(0))
      : group_(std::move(group)), count_(std::move(count)) {}
  std::shared_ptr<ReduceGroup> duplicate() override {
    return std::make_shared<CountingGroup>(group_->duplicate(), count_);
  }
  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  int world_rank(int rank) const override { return group_->world_rank(rank); }
  std::optional<base::Error> failure() const override { return group_->failure(); }
  at::Tensor allocate(int64_t count, const at::TensorOptions& options) override {
    return group_->allocate(count, options);
  }
  WorkPtr average_async(const at::Tensor& bucket, const collective::PassNumber& pass) override {
    return group_->average_async(bucket, pass);
  }
  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    return group_->broadcast(tensor, root);
  }
  void refuse(int count, const base::Error& error) override {
    *count_ += count;
    group_->refuse(count, error);
  }

  std::atomic<int>& refused = *count_;  // includes calls on duplicates of this group
};

inline std::shared_ptr<CountingGroup> join_group(rpc::Agent& agent) {
  collective::Backend::Settings settings;
  settings.timeout = std::chrono::seconds(60);
  return std::make_shared<CountingGroup>(
      std::make_shared<collective::StagedReduceGroup>(c10::make_intrusive<collective::Backend>(
          agent.open_channel(2), agent.executor(), collective::Group{1, {0, 1}}, settings)));
}

/// A trainer rank with its DDP replica of the model.
struct Trainer {
  explicit Trainer(rpc::Agent& agent_in)
      : agent(agent_in),
        group(join_group(agent)),
        model(std::in_place, make_net(), group, kSmallBuckets) {}

  int rank() const { return agent.rank(); }
  at::Tensor loss_of(const at::Tensor& output) const { return output.pow(2).mean(); }
  at::Tensor forward(int step) { return loss_of(model->forward(batch(rank(), step))); }
  /// Returns the loss of a forward that bypasses the DistributedDataParallel.
  at::Tensor forward_alone(int step) {
    return loss_of(model->module()->forward(batch(rank(), step)));
  }

  std::vector<at::Tensor> parameters() const { return model->parameters(); }
  void update(const std::vector<at::Tensor>& gradients) {
    const at::NoGradGuard no_grad;
    const auto all = parameters();
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].sub_(gradients[i], 0.1);
      all[i].mutable_grad() = at::Tensor();
    }
  }
  std::vector<at::Tensor> gradients(const autograd::Context& context) const {
    std::vector<at::Tensor> result;
    for (const at::Tensor& p : parameters()) result.push_back(context.gradient(p));
    return result;
  }
  std::vector<at::Tensor> grads() const {
    std::vector<at::Tensor> result;
    for (const at::Tensor& p : parameters()) result.push_back(p.grad());
    return result;
  }
  void step(int step) {
    autograd::Context context(agent);
    autograd::backward(context, {forward(step)});
    update(gradients(context));
  }

  rpc::Agent& agent;
  std::shared_ptr<CountingGroup> group;
  std::optional<Model> model;
};

/// Returns torch's gradients of the mean loss of both trainers over `steps`, with the parameters of
/// `trainer`.
inline std::vector<at::Tensor> reference(const Trainer& trainer, const std::vector<int>& steps) {
  auto net = make_net();
  const auto theirs = trainer.parameters();
  const auto ours = net->parameters();
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < ours.size(); ++i) ours[i].copy_(theirs[i]);
  }
  for (int step : steps) {
    for (int rank = 0; rank < kTrainers; ++rank) {
      (trainer.loss_of(net->forward(batch(rank, step))) / kTrainers).backward();
    }
  }
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : ours) result.push_back(p.grad());
  return result;
}

inline void expect_close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                         const std::string& what) {
  expect(a.size() == b.size(), what);
  for (size_t i = 0; i < a.size(); ++i) {
    expect(a[i].defined() && at::allclose(a[i], b[i], 1e-5, 1e-6), what);
  }
}

inline bool all_same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same_bits);
}

using Values = std::vector<at::Tensor>;

inline at::Tensor doubled(const at::Tensor& x) { return x * 2; }

/// Runs `fn` on both trainers and returns their parameters. Checks that both replicas are equal bit
/// by bit at that time and after one more step.
inline Values on_trainers(const std::function<void(Trainer&)>& fn) {
  Cluster cluster(kTrainers, [](rpc::Agent& agent) {
    autograd::install(agent);
    agent.expose<&doubled>("doubled");
  });
  std::vector<Values> before(kTrainers), after(kTrainers);
  cluster.on_all([&](rpc::Agent& agent) {
    const auto values = [](const Trainer& trainer) {
      Values copies;
      for (const at::Tensor& p : trainer.parameters()) copies.push_back(p.detach().clone());
      return copies;
    };
    const auto rank = static_cast<size_t>(agent.rank());
    Trainer trainer(agent);
    fn(trainer);
    if (!trainer.model) return;
    before[rank] = values(trainer);
    trainer.step(50);
    after[rank] = values(trainer);
  });
  cluster.shutdown();
  CHECK(all_same_bits(before[0], before[1]));
  CHECK(all_same_bits(after[0], after[1]));
  if (!after[0].empty()) CHECK_FALSE(all_same_bits(before[0], after[0]));
  return before[0];
}

/// Gives each rank but the last a Trainer, as a local object that remote functions can find.
inline std::vector<std::shared_ptr<Trainer>> provide_trainers(Cluster& cluster) {
  std::vector<std::shared_ptr<Trainer>> trainers(kTrainers);
  cluster.on_all([&](rpc::Agent& agent) {
    if (agent.rank() == kTrainers) return;
    auto& mine = trainers[static_cast<size_t>(agent.rank())];
    mine = std::make_shared<Trainer>(agent);
    agent.provide(mine);
  });
  return trainers;
}

/// Runs forward() of the called rank's Trainer.
inline at::Tensor trainer_forward(rpc::CallContext& call, const at::Tensor& x) {
  return call.agent.local<Trainer>().model->forward(x);
}

}  // namespace distrain::testing

// ctest: timeout=120
// Tests lookups and updates of tables on one to three servers against a table in one tensor.
#include <thread>

#include <torch/csrc/autograd/autograd.h>

#include "tables.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using table::Pooling;

namespace {

struct Bags {
  at::Tensor ids, offsets;
};

// Bags of which some are empty. Those of step 0 and 1 repeat ids, and up to 3 servers pool them.
Bags bags_of(int trainer, int step) {
  const int64_t size = step < 2 ? 40 : 12, modulus = step < 2 ? 31 : 17;
  const at::Tensor ids = (at::arange(size) * (3 + trainer) + step * 7).remainder(modulus);
  return {ids, at::tensor({0, 0, 5, 6, 6, 12})};
}

// Returns a different number for each element, so that no gradients are equal.
at::Tensor factors(const at::Tensor& like) {
  return at::arange(like.numel(), at::kFloat).reshape(like.sizes()).mul(0.1F).sin();
}

std::vector<int> servers_from(int first, int count) {
  std::vector<int> servers(static_cast<size_t>(count));
  std::iota(servers.begin(), servers.end(), first);
  return servers;
}

// One trainer, rank 0, and tables on ranks 1 to 3.
struct OneTrainer {
  explicit OneTrainer(std::vector<TableOptions> options, int servers = 2,
                      table::LookupSettings settings = {}, optim::Sharing sharing = {})
      : tables(std::make_shared<ShardedEmbedding>(cluster[0], servers_from(1, servers),
                                                  std::move(options), sharing, settings)),
        optimizer(cluster[0], {}, optim::Sgd{.lr = 1}, sharing) {
    optimizer.add(tables);
  }

  Cluster cluster{4, set_up_tables};
  const std::shared_ptr<ShardedEmbedding> tables;
  optim::DistributedOptimizer optimizer;
};

}  // namespace

TEST_CASE("servers of three trainers in sync mode equal one table, for every optimizer") {
  const optim::OptimizerFields optimizers[] = {{"sgd", {{"lr", 0.1}}},
                                               {"adagrad", {{"lr", 0.1}, {"lr_decay", 0.1}}},
                                               {"rowwise-adagrad", {{"lr", 0.1}}},
                                               {"adam", {{"lr", 0.01}}},
                                               {"adamw", {{"lr", 0.01}, {"weight_decay", 0.1}}},
                                               {"rmsprop", {{"lr", 0.01}}}};
  constexpr int kTrainers = 3, kSteps = 3;
  Cluster cluster(kTrainers + 3, set_up_tables);
  for (const auto& fields : optimizers) {
    for (const int servers : {1, 2, 3}) {
      CAPTURE(fields.name, servers);
      const auto options = table_of(fields.name + std::to_string(servers), 5, fields);
      std::vector<std::shared_ptr<ShardedEmbedding>> tables;
      for (int p = 0; p < kTrainers; ++p) {
        tables.push_back(std::make_shared<ShardedEmbedding>(
            cluster[p], servers_from(kTrainers, servers), std::vector{options},
            optim::Sharing{Mode::kSync, kTrainers, p}));
      }
      WholeTable whole(all_rows(*tables[0]));
      std::vector<std::thread> threads;
      for (int p = 0; p < kTrainers; ++p) {
        threads.emplace_back([&, p] {
          ShardedEmbedding& its = *tables[static_cast<size_t>(p)];
          optim::DistributedOptimizer optimizer(cluster[p], {}, optim::Sgd{},
                                                optim::Sharing{Mode::kSync, kTrainers, p});
          optimizer.add(tables[static_cast<size_t>(p)]);
          for (int step = 0; step < kSteps; ++step) {
            const Bags bags = bags_of(p, step);
            autograd::Context context(cluster[p]);
            const at::Tensor pooled =
                its.bags(bags.ids, bags.offsets, {}, step == 1 ? Pooling::kMean : Pooling::kSum);
            autograd::backward(context, {(pooled * factors(pooled)).sum()});
            optimizer.step(context);
          }
          its.settle();
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (int step = 0; step < kSteps; ++step) {
        for (int p = 0; p < kTrainers; ++p) {
          const Bags bags = bags_of(p, step);
          const at::Tensor pooled = whole.bags(bags.ids, bags.offsets, {}, step == 1);
          (pooled * factors(pooled)).sum().backward();
          whole.touch(bags.ids);
        }
        whole.step(fields, 1.0 / kTrainers);
      }
      CHECK(is_close(all_rows(*tables[0]), whole.weight.detach()));
      CHECK(cluster[kTrainers].local<table::TableServer>().updates_of(options.name) == kSteps);
    }
  }
}

TEST_CASE("sums, means, weights and rows and their gradients equal torch's, pooled anywhere") {
  const int servers = GENERATE(1, 2, 3);
  const bool pools = GENERATE(false, true);
  CAPTURE(servers, pools);
  OneTrainer job({table_of("t")}, servers, {.pools_on_servers = pools});
  const WholeTable whole(all_rows(*job.tables));
  const at::Tensor ids = at::arange(40).remainder(23), offsets = at::tensor({0, 3, 3, 40});
  const at::Tensor weights = at::arange(40, at::kFloat).cos();
  const at::Tensor none = at::empty({0}, at::kLong);
  for (const bool weights_learn : {false, true}) {
    // Every second number of another tensor.
    const at::Tensor here =
        at::stack({weights, weights + 7}, 1).select(1, 0).detach().requires_grad_(weights_learn);
    const at::Tensor there = weights.to(at::kDouble).requires_grad_(weights_learn);
    const at::Tensor before = all_rows(*job.tables);
    WholeTable expected(before);
    autograd::Context context(job.cluster[0]);
    const auto found = job.tables->look_up({{0, ids, offsets, {}, Pooling::kSum},
                                            {0, ids, offsets, {}, Pooling::kMean},
                                            {0, ids, offsets, here, Pooling::kSum},
                                            {0, ids.view({8, 5})},
                                            {0, none, at::zeros({2}, at::kLong), {}, Pooling::kSum},
                                            {0, none}});
    const std::vector<at::Tensor> wanted{expected.bags(ids, offsets),
                                         expected.bags(ids, offsets, {}, true),
                                         expected.bags(ids, offsets, there),
                                         at::embedding(expected.weight, ids.view({8, 5})),
                                         at::zeros({2, 4}),
                                         at::zeros({0, 4})};
    at::Tensor loss = at::zeros({}), wanted_loss = at::zeros({}, at::kDouble);
    for (size_t i = 0; i < wanted.size(); ++i) {
      CAPTURE(i);
      REQUIRE(is_close(found[i].detach(), wanted[i].detach()));
      loss = loss + (found[i] * factors(found[i])).sum();
      wanted_loss = wanted_loss + (wanted[i] * factors(wanted[i]).to(at::kDouble)).sum();
    }
    autograd::backward(context, {loss});
    wanted_loss.backward();
    job.optimizer.step(context);
    CHECK(is_close(before - all_rows(*job.tables), expected.weight.grad(), 1e-5));
    if (weights_learn) CHECK(is_close(context.gradient(here), there.grad(), 1e-5));
  }
}

TEST_CASE("two uses of two tables in a pass and micro-batches add their gradients first") {
  // Adagrad's first step is -lr * g / |g|: it shows that each row is updated once.
  const optim::OptimizerFields adagrad{"adagrad", {{"lr", 0.1}}};
  OneTrainer job({table_of("a", 3, adagrad), table_of("b", 2, adagrad)});
  WholeTable a(all_rows(*job.tables, 0)), b(all_rows(*job.tables, 1));
  const at::Tensor ids = at::tensor({4, 9, 4, 30}, at::kLong);
  const auto loss_of = [](const at::Tensor& rows, int use) {
    return (rows * (factors(rows) + use)).sum();
  };
  autograd::Context first(job.cluster[0], autograd::Context::Scope::kExplicit);
  autograd::Context second(job.cluster[0], autograd::Context::Scope::kExplicit);
  autograd::Context moved(job.cluster[0], autograd::Context::Scope::kExplicit);
  int use = 0;
  for (autograd::Context* context : {&first, &second, &moved}) {
    const rpc::ContextScope scope(job.cluster[0], context->id());
    const auto rows = job.tables->look_up({{0, ids}, {1, ids}});
    const at::Tensor again = job.tables->forward(ids + use);
    autograd::backward(*context,
                       {loss_of(rows[0], use) + loss_of(rows[1], use) + loss_of(again, use)});
    for (const at::Tensor& loss :
         {loss_of(at::embedding(a.weight, ids), use), loss_of(at::embedding(b.weight, ids), use),
          loss_of(at::embedding(a.weight, ids + use), use)}) {
      loss.backward();
    }
    a.touch(ids);
    a.touch(ids + use);
    b.touch(ids);
    ++use;
  }
  autograd::move_gradients(job.cluster[0], moved.id(), second.id());
  job.optimizer.step({first.id(), second.id()});
  a.step(adagrad);
  b.step(adagrad);
  CHECK(is_close(all_rows(*job.tables, 0), a.weight.detach()));
  CHECK(is_close(all_rows(*job.tables, 1), b.weight.detach()));
  const base::Error again = error_of([&] { job.optimizer.step({first.id()}); });
  CHECK(again.kind == ErrorKind::kInvalid);
}

TEST_CASE("a table counts the steps that have gradients for it") {
  const optim::OptimizerFields adam{"adam", {{"lr", 0.01}}};
  OneTrainer job({table_of("a", 4, adam), table_of("b", 4, adam)});
  WholeTable a(all_rows(*job.tables, 0)), b(all_rows(*job.tables, 1));
  const auto step = [&](int table, WholeTable& whole) {
    autograd::Context context(job.cluster[0]);
    const at::Tensor rows = job.tables->look_up({{table, kIds}})[0];
    autograd::backward(context, {(rows * factors(rows)).sum()});
    job.optimizer.step(context);
    job.tables->settle();
    const at::Tensor same = at::embedding(whole.weight, kIds);
    (same * factors(same)).sum().backward();
    whole.touch(kIds);
    whole.step(adam);
  };
  for (int i = 0; i < 3; ++i) step(0, a);
  step(1, b);
  CHECK(is_close(all_rows(*job.tables, 0), a.weight.detach()));
  CHECK(is_close(all_rows(*job.tables, 1), b.weight.detach()));
  const auto& server = job.cluster[1].local<table::TableServer>();
  CHECK(server.updates_of("a") == 3);
  CHECK(server.updates_of("b") == 1);
  CHECK(*server.updates() == 4);
}

TEST_CASE("weights that are not finite are refused, pooled anywhere") {
  const bool pools = GENERATE(false, true);
  OneTrainer job({table_of("t")}, 2, {.pools_on_servers = pools});
  const at::Tensor weights = at::ones({40}, at::kFloat);
  weights[3] =
      GENERATE(std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN());
  const base::Error error =
      error_of([&] { job.tables->bags(at::arange(40), at::zeros({1}, at::kLong), weights); });
  CHECK(error.kind == ErrorKind::kNotFinite);
  CHECK(error.message == "a weight of a lookup in table t is not finite");
}

TEST_CASE("rows and gradients of half precision are rounded to it") {
  const at::ScalarType type = GENERATE(at::kBFloat16, at::kHalf);
  OneTrainer job({table_of("t")}, 2, {.wire_dtype = type});
  ShardedEmbedding exact(job.cluster[0], servers_from(1, 2), {table_of("t")}, {});
  const at::Tensor before = all_rows(exact), ids = at::arange(50);
  CHECK(at::equal(all_rows(*job.tables), before.to(type).to(at::kFloat)));
  autograd::Context context(job.cluster[0]);
  const at::Tensor rows = job.tables->forward(ids);
  autograd::backward(context, {(rows * factors(rows)).sum()});
  job.optimizer.step(context);
  job.tables->settle();
  CHECK(at::equal(all_rows(exact), before - factors(rows).to(type).to(at::kFloat)));
}

TEST_CASE("evaluations make no rows, and initial values depend on seed and id alone") {
  OneTrainer job({{.name = "any", .dim = 3, .seed = 5, .range = 0.5, .optimizer = {"sgd", {}}}});
  const at::Tensor ids = at::tensor({int64_t{-1}, int64_t{1} << 62, int64_t{0}, int64_t{77}});
  const auto count = [&] {
    uint64_t rows = 0;
    for (const int rank : {1, 2}) {
      rows += job.cluster[rank].local<table::TableServer>().store("any").rows();
    }
    return rows;
  };
  const at::Tensor initial = rows_of(*job.tables, ids);
  CHECK(count() == 0);
  CHECK(initial.abs().max().item<float>() <= 0.5F);
  {
    autograd::Context context(job.cluster[0]);
    CHECK(at::equal(job.tables->forward(ids).detach(), initial));
  }
  CHECK(count() == 4);
  table::ShardedEmbedding local(
      std::make_shared<table::TableServer>(),
      {{.name = "any", .dim = 3, .seed = 5, .range = 0.5, .optimizer = {"sgd", {}}}});
  CHECK(at::equal(rows_of(local, ids), initial));
}

TEST_CASE("wrong ids, too many rows and options that differ are refused by name") {
  auto options = table_of("t");
  options.max_rows = 10;
  OneTrainer job({options}, 1);
  autograd::Context context(job.cluster[0]);
  const base::Error outside = error_of([&] { job.tables->forward(at::tensor({3, 50})); });
  CHECK(outside.kind == ErrorKind::kInvalid);
  CHECK(outside.message == "a lookup in table t: the id 50 is not one of 0 to 49");
  const base::Error many = error_of([&] { job.tables->forward(at::arange(11)); });
  CHECK(many.kind == ErrorKind::kResources);
  CHECK(many.message.find("10 rows") != std::string::npos);
  const auto refusal = [&](const TableOptions& other, optim::Sharing sharing = {}) {
    const base::Error error =
        error_of([&] { ShardedEmbedding(job.cluster[0], {1}, {other}, sharing); });
    CHECK(error.kind == ErrorKind::kInvalid);
    return error.message;
  };
  options.dim = 5;
  CHECK(refusal(options) == "these tables are open already, with other options of table t");
  options = table_of("t", 4, {"adagrad", {}});
  CHECK(refusal(options) == "these tables are open already, with other options of table t");
  CHECK(refusal(table_of("u", 4, {"sgd", {{"momentum", 0.9}}})) ==
        "table u: sgd with momentum cannot take sparse gradients");
  CHECK(refusal(table_of("v"), {.mode = Mode::kSsp}) == "tables have no mode ssp");
  const at::NoGradGuard no_grad;
  CHECK_THROWS(job.tables->bags(at::tensor({1, 2}), at::tensor({1})));
}

TEST_CASE("an optimizer of one process updates tables as servers do, with clipping") {
  const std::string mode = GENERATE("sync", "async");
  const double max_norm = GENERATE(0.0, 3.0);
  CAPTURE(mode, max_norm);
  const optim::OptimizerFields adagrad{"adagrad", {{"lr", 0.1}}};
  const optim::Rule rule{optim::Adagrad{.lr = 0.1}, {}, max_norm};
  const auto tables = std::make_shared<ShardedEmbedding>(std::make_shared<table::TableServer>(),
                                                         std::vector{table_of("t", 4, adagrad)});
  WholeTable whole(all_rows(*tables));
  at::Tensor same = whole.weight.detach().to(at::kFloat).requires_grad_();
  at::Tensor net = at::ones({2}).requires_grad_(), same_net = net.detach().clone().requires_grad_();
  optim::SingleProcessOptimizer optimizer(rule, mode, {}, {{"net", net}});
  optim::SingleProcessOptimizer expected(rule, mode, {{"t", same}}, {{"net", same_net}});
  optimizer.add(tables);
  for (int step = 0; step < 3; ++step) {
    for (int trainer = 0; trainer < 2; ++trainer) {
      const Bags bags = bags_of(trainer, step);
      (tables->bags(bags.ids, bags.offsets) * net.sum()).sum().backward();
      optimizer.gather();
      (std::get<0>(at::embedding_bag(same, bags.ids, bags.offsets, false, 0, true)) *
       same_net.sum())
          .sum()
          .backward();
      expected.gather();
    }
    optimizer.set_lr_factor(1.0 / (step + 1));
    expected.set_lr_factor(1.0 / (step + 1));
    optimizer.step();
    expected.step();
  }
  CHECK(is_close(all_rows(*tables), same.detach(), 1e-5));
  CHECK(is_close(net.detach(), same_net.detach(), 1e-5));
}

TEST_CASE("tables in one process are destroyed with the lookups that no step took") {
  auto server = std::make_shared<table::TableServer>();
  const std::weak_ptr<table::TableServer> alive = server;
  {
    const auto tables =
        std::make_shared<ShardedEmbedding>(std::move(server), std::vector{table_of("t")});
    const at::Tensor net = at::ones({1}).requires_grad_();
    optim::SingleProcessOptimizer optimizer({optim::Sgd{.lr = 1}}, "sync", {}, {{"net", net}});
    CHECK(error_of([&] { optimizer.step(); }).kind == ErrorKind::kInvalid);
    optimizer.gather();
    optimizer.add(tables);
    CHECK(error_of([&] { optimizer.step(); }).kind == ErrorKind::kInvalid);
    tables->forward(at::arange(4));
    optimizer.gather();
    CHECK(error_of([&] { optimizer.set_lr_factor(-1); }).kind == ErrorKind::kInvalid);
    tables->forward(at::arange(4));
  }
  CHECK(alive.expired());
}

// ctest: timeout=120
// Tests when steps of tables are applied, refused and waited for.
#include <limits>
#include <thread>

#include "tables.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using base::Future;

namespace {

// Several trainers, ranks 0 to n - 1, and two servers.
struct Job {
  explicit Job(int trainers, Mode mode = Mode::kAsync,
               std::vector<TableOptions> options = {table_of("t")})
      : cluster(trainers + 2, set_up_tables) {
    for (int p = 0; p < trainers; ++p) {
      const optim::Sharing sharing{mode, trainers, p};
      tables.push_back(std::make_shared<ShardedEmbedding>(
          cluster[p], std::vector<int>{trainers, trainers + 1}, options, sharing));
      optimizers.push_back(std::make_unique<optim::DistributedOptimizer>(
          cluster[p], std::vector<optim::ParameterGroup>{}, sharing));
      optimizers.back()->add(tables.back());
    }
  }

  // Makes a step in which each number of the rows has the gradient `gradient`.
  void step(int trainer, const at::Tensor& ids, double gradient) {
    const auto at = static_cast<size_t>(trainer);
    autograd::Context context(cluster[trainer]);
    autograd::backward(context, {(tables[at]->forward(ids) * gradient).sum()});
    optimizers[at]->step(context);
  }
  table::TableServer& server(int number) {
    return cluster[cluster.size() - 2 + number].local<table::TableServer>();
  }
  size_t kept() { return server(0).kept_lookups() + server(1).kept_lookups(); }

  Cluster cluster;
  std::vector<std::shared_ptr<ShardedEmbedding>> tables;
  std::vector<std::unique_ptr<optim::DistributedOptimizer>> optimizers;
};

// Waits until one of the ranks reports a wait with this text.
void await_wait(Job& job, const std::string& text) {
  const auto has_come = [&] {
    for (int rank = 0; rank < job.cluster.size(); ++rank) {
      for (const rpc::Wait& wait : job.cluster[rank].waits()) {
        if (wait.what.find(text) != std::string::npos) return true;
      }
    }
    return false;
  };
  while (!has_come()) std::this_thread::yield();
}

// Makes participant 0 wait in its step. Then destroys the tables of participant 1 by an exception,
// and catches the exception.
void unwind_participant_1(Job& job) {
  job.step(0, kIds, 1);
  await_wait(job, "wants participant 1");
  try {
    const auto optimizer = std::move(job.optimizers[1]);
    const auto tables = std::move(job.tables[1]);
    throw std::runtime_error("caught below");
  } catch (const std::runtime_error&) {
  }
}

}  // namespace

TEST_CASE("clipping counts two tables and a net, with one and several participants") {
  const Mode mode = GENERATE(Mode::kAsync, Mode::kSync);
  const int trainers = GENERATE(1, 2);
  CAPTURE(static_cast<int>(mode), trainers);
  Job job(trainers, mode, {table_of("a"), table_of("b", 2)});
  const at::Tensor before_a = all_rows(*job.tables[0], 0), before_b = all_rows(*job.tables[0], 1);
  const double max_norm = 2;
  std::vector<at::Tensor> nets;
  for (int p = 0; p < trainers; ++p) nets.push_back(at::zeros({2}).requires_grad_());
  const auto train = [&](int p) {
    const auto at = static_cast<size_t>(p);
    const optim::Sharing sharing{mode, trainers, p};
    optim::DistributedOptimizer optimizer(job.cluster[p], {}, {nets[at]},
                                          optim::Rule{optim::Sgd{.lr = 1}, {}, max_norm}, sharing);
    optimizer.add(job.tables[at]);
    autograd::Context context(job.cluster[p]);
    const auto rows = job.tables[at]->look_up({{0, at::tensor({1, 1, 2 + p})}, {1, kIds}});
    autograd::backward(context, {(rows[0] * (p + 1)).sum() + rows[1].sum() + nets[at].sum() * 3});
    optimizer.step(context);
    job.tables[at]->settle();
  };
  std::vector<std::thread> threads;
  for (int p = 0; p < trainers; ++p) {
    if (mode == Mode::kSync) {
      threads.emplace_back(train, p);
    } else {
      train(p);
    }
  }
  for (std::thread& thread : threads) thread.join();

  at::Tensor sum_a = at::zeros({50, 4}), sum_b = at::zeros({50, 2});
  const auto scale_of = [&](const at::Tensor& a, const at::Tensor& b, double net) {
    return max_norm /
           (std::sqrt((a * a).sum().item<double>() + (b * b).sum().item<double>() + net) + 1e-6);
  };
  for (int p = 0; p < trainers; ++p) {
    at::Tensor a = at::zeros({50, 4}), b = at::zeros({50, 2});
    a.index_add_(0, at::tensor({1, 1, 2 + p}, at::kLong), at::full({3, 4}, p + 1.0F));
    b.index_add_(0, kIds, at::ones({4, 2}));
    const double scale = mode == Mode::kAsync ? scale_of(a, b, 18) : 1.0 / trainers;
    sum_a += a * scale;
    sum_b += b * scale;
  }
  double scale = mode == Mode::kSync ? scale_of(sum_a, sum_b, 18) : 1;
  CHECK(is_close(before_a - all_rows(*job.tables[0], 0), sum_a * scale, 1e-5));
  CHECK(is_close(before_b - all_rows(*job.tables[0], 1), sum_b * scale, 1e-5));
  if (mode == Mode::kAsync)
    scale = trainers == 1 ? scale_of(sum_a, sum_b, 18) : 2 / std::sqrt(18.0);
  if (mode == Mode::kSync) CHECK(is_close(nets[0].detach(), at::full({2}, -3 * scale), 1e-5));
  for (const at::Tensor& net : nets) CHECK(at::equal(net.detach(), nets[0].detach()));
}

TEST_CASE("a failed pass, a dropped context and a gradient that is not finite change nothing") {
  Job job(1);
  const at::Tensor before = all_rows(*job.tables[0]);
  {
    autograd::Context context(job.cluster[0]);
    const at::Tensor rows = job.tables[0]->forward(kIds);
    CHECK(job.kept() == 2);
    const at::Tensor net = at::ones({1}).requires_grad_();
    context.on_gradient_ready(net, [](const at::Tensor&) { throw std::runtime_error("broken"); });
    const at::Tensor loss = (rows * net).sum();
    const autograd::PassOptions keeps_graph{.retain_graph = true};
    CHECK_THROWS(autograd::backward(context, {loss}, keeps_graph));
    const auto step = [&] { job.optimizers[0]->step(context); };
    CHECK(error_of(step).kind == ErrorKind::kInvalid);
    autograd::backward(context, {loss}, keeps_graph);  // adds to a part of the failed pass
    CHECK(error_of(step).kind == ErrorKind::kInvalid);
  }
  {
    autograd::Context context(job.cluster[0]);
    autograd::backward(context, {job.tables[0]->forward(kIds).sum()});
  }
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    const base::Error error = error_of([&] { job.step(0, kIds, bad); });
    CHECK(error.kind == ErrorKind::kNotFinite);
    CHECK(error.message.find("table t") != std::string::npos);
  }
  // The next lookup tells the servers that the lookups before it are released.
  job.step(0, kIds, 1);
  job.tables[0]->settle();
  CHECK(job.kept() == 0);
  CHECK(is_close(before - all_rows(*job.tables[0]), before.zero_().index_fill(0, kIds, 1)));
  CHECK(job.server(1).updates_of("t") == 1);
}

TEST_CASE("in sync mode pushes that exceed the servers' credit do not wait for each other") {
  constexpr int kTrainers = 3, kSteps = 2;
  constexpr int64_t kRows = 2400, kDim = 64;  // 600 KiB of gradients
  rpc::AgentOptions options;
  options.total_budget = uint64_t{1} << 20;
  Cluster cluster(kTrainers + 1, set_up_tables, options);
  auto table = table_of("t", kDim);
  table.num_rows = kRows;
  const auto train = [&](rpc::Agent& agent) {
    const int p = agent.rank();
    if (p == kTrainers) return;
    const optim::Sharing sharing{Mode::kSync, kTrainers, p};
    const auto tables = std::make_shared<ShardedEmbedding>(agent, std::vector{kTrainers},
                                                           std::vector{table}, sharing);
    optim::DistributedOptimizer optimizer(agent, std::vector<optim::ParameterGroup>{}, sharing);
    optimizer.add(tables);
    for (int step = 0; step < kSteps; ++step) {
      autograd::Context context(agent);
      autograd::backward(context, {tables->forward(at::arange(kRows)).sum()});
      optimizer.step(context);
    }
    optimizer.settle();
  };
  in_time([&] { cluster.on_all(train); });
  CHECK(cluster[kTrainers].local<table::TableServer>().updates_of("t") == kSteps);
}

TEST_CASE("a trainer sees its own updates though steps do not wait for them") {
  Job job(1);
  const at::Tensor before = rows_of(*job.tables[0], kIds);
  for (int i = 1; i <= 20; ++i) {
    job.step(0, kIds, 1);
    CHECK(is_close(before - rows_of(*job.tables[0], kIds), at::full({4, 4}, i), 1e-5));
    CHECK(job.tables[0]->staleness() == 0);
  }
}

TEST_CASE("lookups that are started early lack the steps made meanwhile") {
  Job job(1);
  const at::Tensor before = rows_of(*job.tables[0], kIds);
  const bool is_frozen = GENERATE(false, true);
  std::vector<ShardedEmbedding::Pending> ahead;
  for (int i = 0; i < 3; ++i) ahead.push_back(job.tables[0]->start({{0, kIds}}));
  for (int i = 0; i < 3; ++i) {
    autograd::Context context(job.cluster[0]);
    const at::Tensor rows = job.tables[0]->finish(std::move(ahead[static_cast<size_t>(i)]))[0];
    CHECK(job.tables[0]->staleness() == i);
    if (is_frozen) CHECK(at::equal(rows.detach(), before));
    autograd::backward(context, {(rows * (is_frozen ? 0 : 1)).sum()});
    job.optimizers[0]->step(context);
  }
  CHECK(
      is_close(before - rows_of(*job.tables[0], kIds), at::full({4, 4}, is_frozen ? 0 : 3), 1e-5));
  { const auto dropped = job.tables[0]->start({{0, kIds}}); }
  job.tables[0]->settle();
  while (job.kept() > 0) rows_of(*job.tables[0], kIds);  // until the dropped lookup is answered
}

TEST_CASE("in sync mode a step waits for all participants, and the next lookup for the step") {
  Job job(2, Mode::kSync);
  const at::Tensor before = rows_of(*job.tables[0], kIds);
  job.step(0, kIds, 1);
  auto next = std::async(std::launch::async, [&] { return rows_of(*job.tables[0], kIds); });
  await_wait(job, "a step of tables here that wants participant 1");
  await_wait(job, "distrain.table.look_up, called on rank 3");
  job.step(1, kIds, 3);
  CHECK(is_close(before - next.get(), at::full({4, 4}, 2)));
  // A lookup must not begin before the step that it follows.
  const auto early = [&] {
    auto pending = job.tables[0]->start({{0, kIds}});
    job.step(0, kIds, 1);
    job.tables[0]->finish(std::move(pending));
  };
  auto other = std::async(std::launch::async, [&] { job.step(1, kIds, 1); });
  CHECK(error_of(early).kind == ErrorKind::kInvalid);
  other.get();
}

TEST_CASE("in sync mode the order in which steps arrive does not change a bit") {
  std::vector<at::Tensor> results;
  for (const int first : {0, 1, 2}) {
    Job job(3, Mode::kSync);
    const double gradients[] = {0.1, 1e7, -1e7};  // their sum depends on the order
    for (int i = 0; i < 3; ++i) {
      const int p = (first + i) % 3;
      job.step(p, kIds, gradients[p]);
      if (i == 0) await_wait(job, "a step of tables here that wants participant ");
      if (i == 1) await_wait(job, "wants participant " + std::to_string((p + 1) % 3));
    }
    results.push_back(rows_of(*job.tables[0], kIds));
  }
  CHECK(at::equal(results[0], results[1]));
  CHECK(at::equal(results[0], results[2]));
}

TEST_CASE("in sync mode a participant that closes its tables is not waited for") {
  Job job(2, Mode::kSync);
  const bool closes_first = GENERATE(false, true);
  if (closes_first) {
    job.optimizers[1].reset();
    job.tables[1].reset();
  }
  job.step(0, kIds, 1);
  if (!closes_first) {
    await_wait(job, "wants participant 1");
    // A rank that makes no steps may come and go.
    for (int i = 0; i < 2; ++i) {
      ShardedEmbedding onlooker(job.cluster[1], {2, 3}, {table_of("t")},
                                {Mode::kSync, 2, optim::Sharing::kOnlooker});
      rows_of(onlooker, kIds);
      await_wait(job, "wants participant 1");
    }
    job.optimizers[1].reset();
    job.tables[1].reset();
  }
  const base::Error error = error_of([&] { job.tables[0]->settle(); });
  CHECK(error.kind == ErrorKind::kPeerLost);
  CHECK(error.message.find("participant 1") != std::string::npos);
}

TEST_CASE("in sync mode a training loop ends when another participant has closed its tables") {
  Job job(2, Mode::kSync);
  job.step(0, kIds, 1);
  job.optimizers[1].reset();
  job.tables[1].reset();
  for (int i = 0; i < 3; ++i) {
    const base::Error error = in_time([&] {
      return error_of([&] {
        for (int step = 0; step < 2; ++step) job.step(0, kIds, 1);
      });
    });
    CHECK(error.kind == ErrorKind::kPeerLost);
  }
}

TEST_CASE("in sync mode a participant in shutdown() is not waited for") {
  Job job(2, Mode::kSync);
  job.step(0, kIds, 1);
  auto leaves = std::async(std::launch::async, [&] { job.cluster[1].shutdown(); });
  const base::Error error = in_time([&] { return error_of([&] { job.tables[0]->settle(); }); });
  CHECK(error.kind == ErrorKind::kPeerLost);
  CHECK(error_of([&] { job.step(1, kIds, 1); }).kind == ErrorKind::kInvalid);
  in_time([&] {
    job.cluster.on_all([](rpc::Agent& agent) {
      if (agent.rank() != 1) agent.shutdown();
    });
    leaves.get();
  });
}

TEST_CASE("tables may be destroyed after their agent") {
  Job job(1);
  job.optimizers.clear();
  for (const int rank : {0, 1, 2}) job.cluster.kill(rank);
  job.tables.clear();
}

TEST_CASE("tables may be destroyed after their agent if that is their only server") {
  Cluster cluster(GENERATE(1, 2), set_up_tables);
  const auto tables = std::make_unique<ShardedEmbedding>(
      cluster[0], std::vector{0}, std::vector{table_of("t")}, optim::Sharing{});
  for (int rank = cluster.size(); rank-- > 0;) cluster.kill(rank);
}

TEST_CASE("a lookup is finished by the object that started it") {
  Job job(2);
  auto lookup = job.tables[0]->start({{0, kIds}});
  const at::NoGradGuard no_grad;
  CHECK(error_of([&] { job.tables[1]->finish(lookup); }).kind == ErrorKind::kInvalid);
  CHECK(job.tables[0]->finish(lookup)[0].sizes() == at::IntArrayRef({4, 4}));
}

TEST_CASE("in sync mode a step that one server refuses fails for all participants") {
  Job job(2, Mode::kSync);
  job.server(1).on_rank_lost({9, {ErrorKind::kPeerLost, "it is lost", 9, {}}, false, 0});
  const double max_norm = GENERATE(0.0, 100.0);
  const auto train = [&](rpc::Agent& agent) {
    if (agent.rank() > 1) return;
    const auto at = static_cast<size_t>(agent.rank());
    autograd::Context context(agent);
    autograd::backward(context, {job.tables[at]->forward(kIds).sum()});
    const auto step = [&] { job.optimizers[at]->step(context, max_norm); };
    const base::Error error = error_of([&] {
      step();
      job.tables[at]->settle();
    });
    expect(error.message == "it is lost (the tables of rank 3)", error.message);
    expect(error_of(step).message == "this context has sent its step of the tables already",
           "a second step");
  };
  in_time([&] { job.cluster.on_all(train); });
}

TEST_CASE("in sync mode the cause of a failed step is preferred to a participant's close") {
  Job job(2, Mode::kSync);
  job.step(0, kIds, 1);
  job.server(1).on_rank_lost({9, {ErrorKind::kNotFinite, "the cause", 9, {}}, false, 0});
  job.optimizers[1].reset();
  job.tables[1].reset();  // ends the step on the other server
  CHECK(error_of([&] { job.tables[0]->settle(); }).message == "the cause (the tables of rank 3)");
}

TEST_CASE("in sync mode an error that unwinds the stack of a participant reaches the others") {
  Job job(2, Mode::kSync);
  unwind_participant_1(job);
  job.cluster[1].abort({ErrorKind::kNotFinite, "the loss is not finite"});
  CHECK(error_of([&] { job.tables[0]->settle(); }).kind == ErrorKind::kNotFinite);
}

TEST_CASE("after an exception has destroyed tables, the agent's shutdown closes them") {
  Job job(2, Mode::kSync);
  unwind_participant_1(job);
  std::vector<std::future<void>> ends;
  const auto shut_down = [&](int rank) {
    ends.push_back(std::async(std::launch::async, [&, rank] { job.cluster[rank].shutdown(); }));
  };
  shut_down(1);
  CHECK(error_of([&] { job.tables[0]->settle(); }).kind == ErrorKind::kPeerLost);
  for (const int rank : {0, 2, 3}) shut_down(rank);
  for (auto& end : ends) end.get();
}

TEST_CASE("a lost trainer's lookups are dropped and its steps refused") {
  Job job(2);
  job.cluster[0].go_on_without({1}, 0, "", false);
  autograd::Context context(job.cluster[1], autograd::Context::Scope::kExplicit);
  {
    const rpc::ContextScope scope(job.cluster[1], context.id());
    job.tables[1]->forward(kIds);
  }
  CHECK(job.kept() == 2);
  job.server(0).on_rank_lost(
      {1, {ErrorKind::kPeerLost, "it is lost", 1, {}}, /*job_goes_on=*/true, 0});
  CHECK(job.kept() == 1);
  CHECK(error_of([&] { rows_of(*job.tables[1], kIds); }).kind == ErrorKind::kPeerLost);
  job.step(0, kIds, 1);
  job.tables[0]->settle();
}

TEST_CASE("in sync mode a lost rank ends the steps that wait") {
  Job job(2, Mode::kSync);
  job.step(0, kIds, 1);
  auto next = std::async(std::launch::async, [&] { return rows_of(*job.tables[0], kIds); });
  await_wait(job, "distrain.table.look_up, called on rank");
  for (const int number : {0, 1}) {
    job.server(number).on_rank_lost(
        {1, {ErrorKind::kPeerLost, "it is lost", 1, {}}, /*job_goes_on=*/false, 0});
  }
  CHECK(in_time([&] { return error_of([&] { next.get(); }); }).kind == ErrorKind::kPeerLost);
  CHECK(error_of([&] { job.tables[0]->settle(); }).kind == ErrorKind::kPeerLost);
}

TEST_CASE("in sync mode a norm that is not finite fails the steps of all participants") {
  Job job(2, Mode::kSync);
  const at::Tensor before = rows_of(*job.tables[0], kIds);
  const auto train = [&](rpc::Agent& agent) {
    const int p = agent.rank();
    if (p > 1) return;
    const auto& tables = job.tables[static_cast<size_t>(p)];
    const at::Tensor own = at::zeros({1}).requires_grad_();
    optim::DistributedOptimizer optimizer(agent, {}, {own}, optim::Rule{optim::Sgd{.lr = 1}, {}, 0},
                                          {Mode::kSync, 2, p});
    optimizer.add(tables);
    for (const float factor : {std::numeric_limits<float>::infinity(), 1.0F}) {
      autograd::Context context(agent);
      autograd::backward(context, {tables->forward(kIds).sum() + own.sum() * factor});
      const base::Error error = error_of([&] { optimizer.step(context, 100); });
      expect(error.kind == ErrorKind::kNotFinite, error.message);
    }
  };
  in_time([&] { job.cluster.on_all(train); });
  CHECK(at::equal(before, rows_of(*job.tables[0], kIds)));
}

namespace {

// Throws when a step asks for its norm, after the tables have staged theirs.
struct BadNorm final : optim::StepTarget {
  std::string where() const override { return "the bad norm"; }
  Future<optim::Norms> norm(const std::vector<uint64_t>&, const optim::NormArguments&) override {
    base::bad_data("there is no norm");
  }
  Future<uint64_t> apply(const std::vector<uint64_t>&, const optim::StepOptions&) override {
    return Future<uint64_t>::ready(0);
  }
};

}  // namespace

TEST_CASE("in sync mode the steps of all fail when a participant leaves out one that it staged") {
  Job job(2, Mode::kSync);
  const at::Tensor before = rows_of(*job.tables[0], kIds);
  const auto step = [&](int p, bool is_bad) {
    optim::DistributedOptimizer optimizer(job.cluster[p], {}, optim::Sgd{},
                                          optim::Sharing{Mode::kSync, 2, p});
    optimizer.add(job.tables[static_cast<size_t>(p)]);
    if (is_bad) optimizer.add(std::make_shared<BadNorm>());
    autograd::Context context(job.cluster[p]);
    autograd::backward(context, {job.tables[static_cast<size_t>(p)]->forward(kIds).sum()});
    return error_of([&] { optimizer.step(context, 100); });
  };
  auto other = std::async(std::launch::async, [&] {
    expect(step(1, false).message == "(no error)", "the step that 0 leaves out");
    return error_of([&] { job.tables[1]->settle(); });
  });
  in_time([&] {
    expect(step(0, true).kind == ErrorKind::kBadData, "the step with a bad norm");
    for (const base::Error& error : {step(0, false), other.get()}) {
      expect(error.message.find("participant 0 pushes step 2 instead") == 0, error.message);
    }
  });
  CHECK(at::equal(before, rows_of(*job.tables[0], kIds)));
}

TEST_CASE("in sync mode participants that clip differently are refused") {
  Job job(2, Mode::kSync);
  ShardedEmbedding onlooker(job.cluster[1], {2, 3}, {table_of("t")},
                            {Mode::kSync, 2, optim::Sharing::kOnlooker});
  const at::Tensor before = rows_of(onlooker, kIds);
  auto clipped = std::async(std::launch::async, [&] {
    autograd::Context context(job.cluster[0]);
    autograd::backward(context, {job.tables[0]->forward(kIds).sum()});
    job.optimizers[0]->step(context, 0.5);
  });
  job.step(1, kIds, 1);
  clipped.get();
  for (const auto& tables : job.tables) {
    const base::Error error = error_of([&] { tables->settle(); });
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(error.message.find("(the tables of rank 2)") != std::string::npos);
  }
  CHECK(at::equal(rows_of(onlooker, kIds), before));
}

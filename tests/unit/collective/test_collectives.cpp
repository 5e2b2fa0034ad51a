#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "distrain/base/executor.h"
#include "support/catch.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;

TEST_CASE("broadcast works from each root, for any dtype and strides") {
  const int size = GENERATE(1, 2, 3, 8);
  TestGroup group(size);
  run_ranks(size, [&](int rank) {
    for (int root = 0; root < size; ++root) {
      for (auto dtype : {at::kFloat, at::kLong, at::kBool, at::kBFloat16, at::kComplexFloat}) {
        const at::Tensor x = at::full({5}, rank == root, dtype);
        group[rank].broadcast(x, root).wait();
        RANK_CHECK(x.eq(1).all().item<bool>());
      }
      const at::Tensor strided = at::full({300, 200}, double(rank)).t();
      group[rank].broadcast(strided, root).wait();
      RANK_CHECK(strided.eq(root).all().item<bool>());
      group[rank].broadcast(at::empty({0}), root).wait();
    }
  });
}

TEST_CASE("a root may change its tensor once the broadcast is complete") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    for (int i = 0; i < 50; ++i) {
      const at::Tensor x = at::full({40000}, rank == 0 ? double(i) : -1.0);
      group[rank].broadcast(x).wait();
      if (rank == 0) x.fill_(-2);
      if (rank == 1) RANK_CHECK(x.eq(i).all().item<bool>());
    }
  });
}

TEST_CASE("allgather gathers the tensors of all ranks") {
  const int size = GENERATE(1, 2, 4);
  const int64_t count = GENERATE(0, 5, 30000);
  TestGroup group(size);
  run_ranks(size, [&](int rank) {
    std::vector<at::Tensor> outputs;
    for (int i = 0; i < size; ++i) outputs.push_back(at::zeros({count, 2}).t());
    group[rank].allgather(at::full({2, count}, double(rank)), outputs).wait();
    for (int i = 0; i < size; ++i) RANK_CHECK(outputs[size_t(i)].eq(i).all().item<bool>());

    at::Tensor input = at::full({count}, double(rank));
    at::Tensor output = at::empty({size * count});
    group[rank]._allgather_base(output, input, {})->wait(kNoTimeout);
    const at::Tensor wanted = at::arange(size).repeat_interleave(count).to(at::kFloat);
    RANK_CHECK(same_bits(output, wanted));
  });
}

TEST_CASE("no rank leaves a barrier before all ranks have entered it") {
  const int size = GENERATE(2, 3, 8);
  TestGroup group(size);
  std::atomic<int> inside{0};
  run_ranks(size, [&](int rank) {
    for (int round = 1; round <= 20; ++round) {
      ++inside;
      group[rank].enter_barrier().wait();
      RANK_CHECK(inside.load() >= round * size);
    }
  });
}

TEST_CASE("several groups of some of the ranks work concurrently") {
  FakeNetwork network(4);
  FakeNetwork other(4);  // each group has its own channel
  base::ThreadPool pool({.name = "test"});
  run_ranks(4, [&](int rank) {
    // One group has the ranks 3 and 1 in this order, the other the ranks 0 and 2.
    const std::vector<int> ranks = rank % 2 ? std::vector{3, 1} : std::vector{0, 2};
    auto half = c10::make_intrusive<Backend>(network.channel(rank), pool,
                                             collective::Group{uint32_t(rank % 2), ranks});
    auto all =
        c10::make_intrusive<Backend>(other.channel(rank), pool, collective::Group{9, {0, 1, 2, 3}});
    RANK_CHECK(half->getSize() == 2);
    RANK_CHECK(half->world_rank(half->getRank()) == rank);
    const at::Tensor x = at::full({3}, double(rank));
    half->allreduce(x).wait();
    RANK_CHECK(x.eq(rank % 2 ? 4 : 2).all().item<bool>());
    half->broadcast(x.fill_(double(rank)), 0).wait();
    RANK_CHECK(x.eq(rank % 2 ? 3 : 0).all().item<bool>());
    all->allreduce(x).wait();
    RANK_CHECK(x.eq(6).all().item<bool>());
    half->enter_barrier().wait();
  });
}

TEST_CASE("an impossible group is refused") {
  FakeNetwork network(3);
  base::ThreadPool pool({.name = "test"});
  const auto make = [&](std::vector<int> ranks) {
    return thrown_by([&] {
      c10::make_intrusive<Backend>(network.channel(0), pool, collective::Group{1, ranks});
    });
  };
  CHECK(make({1, 2}).kind == base::ErrorKind::kInvalid);
  CHECK(make({0, 3}).kind == base::ErrorKind::kInvalid);
  CHECK(make({0, 1, 1}).kind == base::ErrorKind::kInvalid);
  CHECK(make({}).kind == base::ErrorKind::kInvalid);
}

TEST_CASE("c10d's interface works: several tensors, futures, completion") {
  const int64_t count = GENERATE(9, 40000);
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    Backend& backend = group[rank];
    c10d::Backend& c10d_backend = backend;
    std::vector<at::Tensor> tensors = {at::ones({count}), at::ones({2}, at::kLong)};
    auto work = c10d_backend.allreduce(tensors);
    RANK_CHECK(work->wait());
    RANK_CHECK(work->isCompleted());
    RANK_CHECK(work->isSuccess());
    RANK_CHECK(work->exception() == nullptr);
    RANK_CHECK(tensors[0].eq(3).all().item<bool>());
    RANK_CHECK(tensors[1].eq(3).all().item<bool>());

    c10d::AllreduceOptions average;
    average.reduceOp = c10d::ReduceOp::AVG;
    std::vector<at::Tensor> one = {at::full({count}, double(rank))};
    auto future = c10d_backend.allreduce(one, average)->getFuture();
    future->wait();
    RANK_CHECK(one[0].eq(1).all().item<bool>());
    RANK_CHECK(future->value().toTensorVector().at(0).is_same(one[0]));

    c10d::BroadcastOptions root;
    root.rootRank = 2;
    std::vector<at::Tensor> shared = {at::full({count}, double(rank))};
    auto polled = c10d_backend.broadcast(shared, root);
    while (!polled->isCompleted()) std::this_thread::yield();
    RANK_CHECK(shared[0].eq(2).all().item<bool>());

    std::vector<at::Tensor> inputs = {at::full({count}, double(rank))};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int i = 0; i < 3; ++i) outputs[0].push_back(at::empty({count}));
    c10d_backend.allgather(outputs, inputs)->wait();
    for (int i = 0; i < 3; ++i) RANK_CHECK(outputs[0][size_t(i)].eq(i).all().item<bool>());
    c10d_backend.barrier()->wait();
    RANK_CHECK(c10d_backend.getSequenceNumberForGroup() == 6);
  });
}

TEST_CASE("our futures complete without a waiting thread of the caller") {
  const int64_t count = GENERATE(9, 40000);
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    std::vector<at::Tensor> tensors;
    std::vector<base::Future<void>> futures;
    for (int i = 0; i < 10; ++i) {
      tensors.push_back(at::full({count}, double(i)));
      futures.push_back(group[rank].allreduce(tensors.back()).future());
    }
    base::wait_all(futures);
    for (int i = 0; i < 10; ++i) RANK_CHECK(tensors[size_t(i)].eq(2 * i).all().item<bool>());
  });
}

TEST_CASE("several threads may wait for one operation") {
  const int64_t count = GENERATE(9, 200000);
  TestGroup group(2);
  for (int round = 0; round < 10; ++round) {
    run_ranks(2, [&](int rank) {
      const at::Tensor x = at::ones({count});
      const auto pending = group[rank].allreduce(x);
      run_ranks(3, [&](int) {
        pending.wait();
        RANK_CHECK(x.eq(2).all().item<bool>());
      });
    });
  }
}

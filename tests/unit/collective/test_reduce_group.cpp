#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "distrain/collective/staged_reduce_group.h"
#include "support/catch.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using collective::StagedReduceGroup;

TEST_CASE("a reduce group of CPU tensors works as the Backend") {
  const int64_t count = GENERATE(int64_t{5}, int64_t{100000});
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    StagedReduceGroup reduce(group.backends[size_t(rank)]);
    RANK_CHECK(reduce.rank() == rank);
    RANK_CHECK(reduce.size() == 3);
    RANK_CHECK(reduce.world_rank(2) == 2);
    for (int round = 0; round < 5; ++round) {
      const at::Tensor a = at::full({count}, double(rank + round));
      const at::Tensor b = at::full({count}, double(rank));
      const auto mean = reduce.average_async(a);
      const auto sent = reduce.broadcast(b, 2);
      mean->wait();
      sent->wait();
      RANK_CHECK(a.eq(1 + round).all().item<bool>());
      RANK_CHECK(b.eq(2).all().item<bool>());
      if (rank == 1) {
        reduce.refuse(1, {ErrorKind::kBadData, "the file ends here", 1, {}});
        continue;
      }
      const base::Error error = thrown_by([&] { reduce.average_async(a)->wait(); });
      RANK_CHECK(error.kind == ErrorKind::kBadData);
      RANK_CHECK(error.rank == 1);
    }
  });
}

TEST_CASE("a group reports why it has failed permanently") {
  TestGroup group(2);
  CHECK_FALSE(group[0].failure());
  group[0].abort();  // an error that is not permanent
  CHECK_FALSE(group[0].failure());
  group.network.kill(1);
  CHECK(thrown_by([&] { group[0].allreduce(at::ones({3})).wait(); }).kind == ErrorKind::kPeerLost);
  while (!group[0].failure()) std::this_thread::yield();  // a send may fail before the group does
  CHECK(group[0].failure()->kind == ErrorKind::kPeerLost);
  CHECK(group[0].failure()->rank == 1);
  group[1].shutdown();
  CHECK(group[1].failure()->kind == ErrorKind::kCancelled);
}

TEST_CASE("duplicates of a group have independent orders of operations") {
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    StagedReduceGroup reduce(group.backends[size_t(rank)]);
    const auto first = reduce.duplicate(), second = reduce.duplicate();
    for (int round = 0; round < 3; ++round) {
      const at::Tensor a = at::full({5}, double(rank)), b = a * 10, c = a * 100;
      const base::Error refused{ErrorKind::kBadData, "the file ends here", 1, {}};
      std::vector<std::pair<collective::ReduceGroup*, at::Tensor>> order = {
          {&reduce, a}, {first.get(), b}, {second.get(), c}};
      std::rotate(order.begin(), order.begin() + rank, order.end());
      std::vector<collective::ReduceGroup::WorkPtr> works;
      for (const auto& [duplicate, tensor] : order) {
        if (duplicate == first.get() && rank == 1) {
          duplicate->refuse(1, refused);
        } else {
          works.push_back(duplicate->average_async(tensor));
        }
      }
      int failed = 0;
      for (const auto& work : works) {
        try {
          work->wait();
        } catch (const base::Exception& e) {
          RANK_CHECK(e.error().message == refused.message);
          ++failed;
        }
      }
      RANK_CHECK(failed == (rank == 1 ? 0 : 1));
      RANK_CHECK(a.eq(1).all().item<bool>());
      RANK_CHECK(c.eq(100).all().item<bool>());
    }
  });
}

TEST_CASE("averaging different passes is an error that names the rank that is ahead") {
  const int64_t count = GENERATE(int64_t{5}, int64_t{100000});
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    StagedReduceGroup reduce(group.backends[size_t(rank)]);
    for (const uint64_t forward : {1, 2, 0}) {  // 0: unknown
      const at::Tensor a = at::full({count}, double(rank));
      const bool ahead = rank == 2 && forward == 2;
      const auto mean = reduce.average_async(a, {.forward = ahead ? forward + 1 : forward});
      if (forward != 2) {
        mean->wait();
        RANK_CHECK(a.eq(1).all().item<bool>());
        continue;
      }
      const base::Error error = thrown_by([&] { mean->wait(); });
      RANK_CHECK(error.kind == ErrorKind::kInvalid);
      RANK_CHECK(error.rank == 2);
      RANK_CHECK(error.message.find("rank 2 is in the backward pass of forward 3") == 0);
    }
  });
}

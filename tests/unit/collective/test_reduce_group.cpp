#include <ATen/ATen.h>

#include "distrain/collective/staged_reduce_group.h"
#include "support/catch.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using collective::StagedReduceGroup;

TEST_CASE("a reduce group of CPU tensors is the Backend's") {
  const int64_t count = GENERATE(int64_t{5}, int64_t{100000});
  TestGroup group(3, {.timeout = std::chrono::seconds(20)});
  run_ranks(3, [&](int rank) {
    StagedReduceGroup reduce(group.backends[size_t(rank)]);
    RANK_CHECK(reduce.rank() == rank);
    RANK_CHECK(reduce.size() == 3);
    RANK_CHECK(reduce.world_rank(2) == 2);
    for (int round = 0; round < 5; ++round) {
      const at::Tensor a = at::full({count}, double(rank + round));
      const at::Tensor b = at::full({count}, double(rank));
      const auto mean = reduce.start(a);
      const auto sent = reduce.broadcast(b, 2);
      mean->wait();
      sent->wait();
      RANK_CHECK(a.eq(1 + round).all().item<bool>());
      RANK_CHECK(b.eq(2).all().item<bool>());
      if (rank == 1) {
        reduce.refuse(1, {ErrorKind::kBadData, "the file ends here", 1, {}});
        continue;
      }
      const base::Error error = thrown_by([&] { reduce.start(a)->wait(); });
      RANK_CHECK(error.kind == ErrorKind::kBadData);
      RANK_CHECK(error.rank == 1);
    }
  });
}

TEST_CASE("a group tells why it has failed for good") {
  TestGroup group(2);
  CHECK_FALSE(group[0].failure());
  group[0].abort();  // not for good
  CHECK_FALSE(group[0].failure());
  group.network.kill(1);
  CHECK(thrown_by([&] { group[0].allreduce(at::ones({3})).wait(); }).kind == ErrorKind::kPeerLost);
  while (!group[0].failure()) std::this_thread::yield();  // a send may know it before the group
  CHECK(group[0].failure()->kind == ErrorKind::kPeerLost);
  CHECK(group[0].failure()->rank == 1);
  group[1].shutdown();
  CHECK(group[1].failure()->kind == ErrorKind::kCancelled);
}

// Tests the rooted algorithm, by which more than eight ranks reduce small tensors and make
// barriers.
#include <ATen/ATen.h>

#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using collective::Pending;

namespace {

constexpr int kRanks = 20;
constexpr int kNoneShared = kRanks - 1;  // messages that tell the ranks to share no memory

// Calls `call` on each rank, in the order of `order`, and returns each rank's error, if any.
std::vector<std::optional<base::Error>> errors_of(TestGroup& group,
                                                  const std::function<Pending(int rank)>& call) {
  std::vector<Pending> pending;
  for (size_t rank = 0; rank < group.backends.size(); ++rank) {
    pending.push_back(call(static_cast<int>(rank)));
  }
  std::vector<std::optional<base::Error>> errors;
  for (const Pending& each : pending) {
    try {
      each.wait();
      errors.emplace_back();
    } catch (const base::Exception& e) {
      errors.emplace_back(e.error());
    }
  }
  return errors;
}

// Checks that all ranks can still use the group.
void check_usable(TestGroup& group) {
  const std::vector<at::Tensor> ones(group.backends.size(), at::ones({3}));
  for (const auto& error : errors_of(group, [&](int rank) {
         return group[rank].allreduce(ones[static_cast<size_t>(rank)].clone());
       })) {
    CHECK_FALSE(error);
  }
}

}  // namespace

TEST_CASE("many ranks add small tensors in rank order with two messages per rank") {
  const auto dtype = GENERATE(at::kFloat, at::kHalf, at::kLong);
  TestGroup group(kRanks, {.shared_memory = false});
  std::vector<at::Tensor> values;
  for (int rank = 0; rank < kRanks; ++rank) {
    at::manual_seed(static_cast<uint64_t>(rank));
    at::Tensor value = dtype == at::kLong ? at::randint(100, {50, 3}) : at::randn({50, 3});
    values.push_back(value.to(dtype));
  }
  at::Tensor expected = values[0].to(dtype == at::kHalf ? at::kFloat : dtype);
  for (int rank = 1; rank < kRanks; ++rank) expected = expected + values[static_cast<size_t>(rank)];
  expected = expected.to(dtype);
  // Rank 3's tensor is not contiguous.
  values[3] = values[3].t().contiguous().t();
  for (const auto& error : errors_of(group, [&](int rank) {
         return group[rank].allreduce(values[static_cast<size_t>(rank)]);
       })) {
    CHECK_FALSE(error);
  }
  for (const at::Tensor& value : values) CHECK(same_bits(value, expected));
  CHECK(group.network.messages() == kNoneShared + 2 * (kRanks - 1));
}

TEST_CASE("an allreduce of 16 KiB of 64 ranks takes at most four messages per rank") {
  constexpr int kMany = 64;  // to close a group costs a message for each pair
  TestGroup group(kMany, {.shared_memory = false});
  std::vector<at::Tensor> values;
  for (int rank = 0; rank < kMany; ++rank) values.push_back(at::full({4096}, float(rank)));
  for (const auto& error : errors_of(group, [&](int rank) {
         return group[rank].allreduce(values[static_cast<size_t>(rank)]);
       })) {
    CHECK_FALSE(error);
  }
  for (const at::Tensor& value : values) CHECK(at::all(value == 2016.0).item<bool>());
  CHECK(group.network.messages() <= 4 * kMany);
}

TEST_CASE("many ranks leave a barrier only when all have entered") {
  TestGroup group(kRanks, {.shared_memory = false});
  std::vector<Pending> pending;
  for (int rank = 0; rank + 1 < kRanks; ++rank) pending.push_back(group[rank].enter_barrier());
  for (const Pending& each : pending) CHECK_FALSE(each.done());
  pending.push_back(group[kRanks - 1].enter_barrier());
  for (const Pending& each : pending) each.wait();
  CHECK(group.network.messages() == kNoneShared + 2 * (kRanks - 1));
}

TEST_CASE("a rank with another operation fails that of all ranks, which name the rank") {
  const int odd = GENERATE(0, 7);
  const int what = GENERATE(0, 1, 2, 3, 4);
  CAPTURE(odd, what);
  TestGroup group(kRanks, {.shared_memory = false});
  const auto errors = errors_of(group, [&](int rank) -> Pending {
    collective::Backend& backend = group[rank];
    if (rank != odd) return backend.allreduce(at::ones({7}));
    if (what == 0) return backend.allreduce(at::ones({8}));
    if (what == 1) return backend.broadcast(at::ones({7}), 0);
    if (what == 2) return backend.broadcast(at::ones({7}), odd);
    if (what == 3) return backend.enter_barrier();
    return backend.allreduce(at::ones({100000}));
  });
  for (const auto& error : errors) {
    REQUIRE(error);
    INFO(error->message);
    CHECK(error->kind == ErrorKind::kInvalid);
    CHECK(error->message.find("rank " + std::to_string(odd)) != std::string::npos);
  }
  check_usable(group);
}

TEST_CASE("all ranks name the rank that is missing at rank 0's deadline") {
  TestGroup group(kRanks, {.shared_memory = false});
  std::vector<Pending> pending;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == 5) continue;
    pending.push_back(group[rank].allreduce(at::ones({7})));
  }
  group.network.await_deliveries();
  expire(pending.front());
  for (const Pending& each : pending) {
    const base::Error error = thrown_by([&] { each.wait(); });
    INFO(error.message);
    CHECK(error.kind == ErrorKind::kDeadline);
    CHECK(error.rank == 5);
  }
}

TEST_CASE("a rank that closes a large group fails the operations of all others") {
  const int closing = GENERATE(0, 9);
  TestGroup group(kRanks, {.shared_memory = false});
  std::vector<Pending> pending;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank != closing) pending.push_back(group[rank].allreduce(at::ones({7})));
  }
  group.backends[static_cast<size_t>(closing)].reset();
  for (const Pending& each : pending) {
    const base::Error error = thrown_by([&] { each.wait(); });
    INFO(error.message);
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == closing);
  }
}

TEST_CASE("ranks that close a group tell only rank 0 and the ranks that they have met") {
  TestGroup group(kRanks, {.shared_memory = false});
  check_usable(group);
  const size_t before = group.network.messages();
  group.backends.clear();
  CHECK(group.network.messages() - before == 2 * (kRanks - 1));
}

TEST_CASE("the loss of a rank fails the operations of a large group") {
  const int lost = GENERATE(0, 9);
  TestGroup group(kRanks, {.shared_memory = false});
  std::vector<Pending> pending;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank != lost) pending.push_back(group[rank].allreduce(at::ones({7})));
  }
  group.network.kill(lost);
  for (const Pending& each : pending) {
    const base::Error error = thrown_by([&] { each.wait(); });
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == lost);
  }
}

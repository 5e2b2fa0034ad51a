// Tests how the messages of an operation grow with the number of ranks.
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using collective::Pending;

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SLOW_RANKS
#endif
#endif
#ifdef SLOW_RANKS
constexpr int kManyBackends = 200;
#else
constexpr int kManyBackends = 1000;
#endif

TEST_CASE("an allreduce of 16 KiB and a barrier of 1000 ranks send at most 4 messages a rank") {
  constexpr int64_t kCount = 4096;
  TestGroup group(kManyBackends, {.shared_memory = false});
  const auto messages_of = [&](const std::function<Pending(int)>& begin) {
    const size_t before = group.network.messages();
    std::vector<Pending> pending;
    for (int rank = 0; rank < kManyBackends; ++rank) pending.push_back(begin(rank));
    for (const Pending& each : pending) each.wait();
    return group.network.messages() - before;
  };
  const at::Tensor first = at::arange(kCount, at::kFloat);
  std::vector<at::Tensor> x;
  for (int rank = 0; rank < kManyBackends; ++rank) x.push_back(first + rank);
  CHECK(messages_of([&](int rank) { return group[rank].allreduce(x[size_t(rank)]); }) <=
        4 * kManyBackends);
  CHECK(messages_of([&](int rank) { return group[rank].enter_barrier(); }) <= 4 * kManyBackends);
  const at::Tensor sum =
      first * kManyBackends + kManyBackends * (kManyBackends - 1) / 2;  // exact in float32
  size_t right = 0;
  for (const at::Tensor& each : x) right += same_bits(each, sum) ? 1 : 0;
  CHECK(right == kManyBackends);
  group.network.cut();  // spares a million messages of ranks that close the group
}

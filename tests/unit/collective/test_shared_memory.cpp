// Tests collectives in shared memory; those of other files run in shared memory, too.
#include <future>

#include <ATen/ATen.h>

#include "../src/collective/core.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using collective::Pending;
using collective::SharedSpace;
using collective::SharingStep;

namespace {

// The ranks of this process each map the memory, and ThreadSanitizer has addresses for 1.5 TiB
// only.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FEW_ADDRESSES
#endif
#endif
#ifdef FEW_ADDRESSES
constexpr int kManyRanks = 4, kMostRanks = 4;
#else
constexpr int kManyRanks = 20, kMostRanks = 64;
#endif
constexpr int64_t kLarge = 300000;  // floats, above the largest tensor in a slot

at::Tensor allocate(Backend& backend, int64_t floats) {
  return backend.allocate(static_cast<size_t>(floats) * sizeof(float)).view(at::kFloat);
}

// Checks that all ranks can use the group, in all slots.
void check_slots(TestGroup& group) {
  const int size = group.network.size();
  run_ranks(size, [&](int rank) {
    for (uint64_t i = 0; i < 2 * SharedSpace::kSlots; ++i) {
      const at::Tensor x = at::full({i % 2 ? 5 : 100000}, float(rank));
      group[rank].allreduce(x).wait();
      RANK_CHECK(x.eq(size * (size - 1) / 2).all().item<bool>());
    }
  });
}

// Plays rank 1 of two, which does not keep the rules.
struct Rogue {
  explicit Rogue(base::Executor* executor = nullptr) {
    network.channel(1).set_handler({.on_message = [this](rpc::ChannelMessage message) {
      std::lock_guard lock(mutex);
      if (message.descriptor) descriptor = message.descriptor;
      steps.push_back(message.tag);
      changed.notify_all();
    }});
    backend = c10::make_intrusive<Backend>(network.channel(0), executor ? *executor : pool,
                                           collective::Group{1, {0, 1}},
                                           Backend::Settings{.timeout = kGroupTimeout});
  }
  ~Rogue() {
    backend.reset();
    network.channel(1).set_handler({});
  }
  void send(uint64_t number, uint64_t step) {
    network.channel(1).send(0, {1, number, step}, {}, {});
  }
  std::shared_ptr<SharedSpace> accept() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return descriptor != nullptr; });
    send(collective::kSharing, uint64_t(SharingStep::kAccept));
    auto memory = net::SharedMemory::open(*descriptor, SharedSpace::bytes_for(2)).value();
    return std::make_shared<SharedSpace>(std::move(memory), 1, 2);
  }

  FakeNetwork network{2};
  base::ThreadPool pool{{.name = "test"}};
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<const net::Fd> descriptor;
  std::vector<rpc::ChannelTag> steps;
  BackendPtr backend;
};

}  // namespace

TEST_CASE("tensors in shared memory are reduced where they lie") {
  const int size = GENERATE(2, 3, kManyRanks);
  TestGroup group(size);
  std::vector<at::Tensor> inputs, outputs;
  for (int rank = 0; rank < size; ++rank) {
    at::manual_seed(uint64_t(rank));
    inputs.push_back(at::randn({kLarge}));
  }
  outputs.resize(size_t(size));
  at::Tensor expected = inputs[0].clone();
  for (int rank = 1; rank < size; ++rank) expected += inputs[size_t(rank)];
  expected /= size;
  run_ranks(size, [&](int rank) {
    at::Tensor& x = outputs[size_t(rank)];
    x = allocate(group[rank], kLarge);
    void* const data = x.data_ptr();
    for (int round = 0; round < 6; ++round) {
      x.copy_(inputs[size_t(rank)]);
      group[rank].allreduce(x, ReduceOp::AVG).wait();
      RANK_CHECK(same_bits(x, expected));
      // A part of it is an ordinary tensor.
      const at::Tensor part = x.narrow(0, 0, 100000).fill_(1);
      group[rank].allreduce(part).wait();
      RANK_CHECK(part.eq(size).all().item<bool>());
    }
    x = at::Tensor();
    x = allocate(group[rank], kLarge);
    RANK_CHECK(x.data_ptr() == data);
  });
}

TEST_CASE("a tensor in shared memory outlives its group") {
  at::Tensor x;
  {
    TestGroup group(2);
    run_ranks(2, [&](int rank) {
      const at::Tensor mine = allocate(group[rank], kLarge).fill_(rank + 1);
      group[rank].allreduce(mine).wait();
      if (rank == 1) x = mine;
    });
  }
  CHECK(x.eq(3).all().item<bool>());
  x.fill_(7);
  CHECK(x.eq(7).all().item<bool>());
}

TEST_CASE("memory of a failed allreduce is reused when all ranks have left its slot") {
  TestGroup group(2);
  std::promise<void> begun;
  run_ranks(2, [&](int rank) {
    at::Tensor x = allocate(group[rank], kLarge);
    void* const data = x.data_ptr();
    if (rank == 1) {
      begun.get_future().wait();
      group[1].refuse(1, {ErrorKind::kBadData, "the file ends here", 1, {}});
    } else {
      const auto pending = group[0].allreduce(x);
      begun.set_value();
      const base::Error error = thrown_by([&] { pending.wait(); });
      RANK_CHECK(error.kind == ErrorKind::kBadData);
    }
    x = at::Tensor();
    x = allocate(group[rank], kLarge);
    RANK_CHECK((x.data_ptr() == data) == (rank == 1));
    x.fill_(1);
    group[rank].allreduce(x).wait();
    RANK_CHECK(x.eq(2).all().item<bool>());
    for (uint64_t i = 0; i < SharedSpace::kSlots; ++i) group[rank].enter_barrier().wait();
    group[rank].allreduce(x).wait();
    const at::Tensor y = allocate(group[rank], kLarge);
    RANK_CHECK(rank == 1 || y.data_ptr() == data);
  });
}

TEST_CASE("an allreduce of 16 KiB of 64 ranks in shared memory takes few messages") {
  constexpr int kMany = kMostRanks;
  const int64_t count = GENERATE(4096, 100000);
  TestGroup group(kMany);
  std::vector<at::Tensor> values;
  std::vector<Pending> pending;
  for (int rank = 0; rank < kMany; ++rank) {
    values.push_back(at::full({count}, float(rank)));
    if (rank == 0) group[0].allocate(1 << 20);  // waits until all share the memory
    pending.push_back(group[rank].allreduce(values.back()));
  }
  const size_t agreed = 3 * (kMany - 1);
  for (const Pending& each : pending) each.wait();
  for (const at::Tensor& value : values)
    CHECK(at::all(value == kMany * (kMany - 1) / 2).item<bool>());
  CHECK(group.network.messages() <= agreed + 4 * kMany);
}

TEST_CASE("operations that nobody awaits give their slots back") {
  const int64_t count = GENERATE(5, 100000);
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    const at::Tensor x = at::ones({count});
    for (int i = 0; i < 30; ++i) group[rank].allreduce(x.clone());
  });
  check_slots(group);
}

TEST_CASE("slots stay in step when a rank skips operations or calls others") {
  const int64_t count = GENERATE(5, 100000);
  const bool refuses = GENERATE(true, false);
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    for (int round = 0; round < 3; ++round) {
      const auto before = group[rank].allreduce(at::ones({count}));
      std::vector<Pending> failing;
      for (int i = 0; i < 6; ++i) {
        if (rank != 1) {
          failing.push_back(group[rank].allreduce(at::ones({count})));
        } else if (refuses) {
          group[1].refuse(1, {ErrorKind::kBadData, "no data", 1, {}});
        } else {
          failing.push_back(group[1].broadcast(at::ones({3}), 0));
        }
      }
      before.wait();
      for (const Pending& each : failing) {
        const base::Error error = thrown_by([&] { each.wait(); });
        RANK_CHECK(error.kind == (refuses ? ErrorKind::kBadData : ErrorKind::kInvalid));
      }
    }
  });
  check_slots(group);
}

TEST_CASE("a rank that shares no memory makes all ranks use messages") {
  const int isolated = GENERATE(0, 2);
  const bool by_setting = GENERATE(true, false);
  FakeNetwork network(3);
  if (!by_setting) network.isolate(isolated);
  base::ThreadPool pool({.name = "test"});
  std::vector<BackendPtr> backends;
  for (int rank = 0; rank < 3; ++rank) {
    const Backend::Settings settings{.timeout = kGroupTimeout,
                                     .shared_memory = !by_setting || rank != isolated};
    backends.push_back(c10::make_intrusive<Backend>(network.channel(rank), pool,
                                                    collective::Group{1, {0, 1, 2}}, settings));
  }
  run_ranks(3, [&](int rank) {
    for (const int64_t count : {int64_t{5}, kLarge}) {
      const at::Tensor x = allocate(*backends[size_t(rank)], count).fill_(rank + 1);
      backends[size_t(rank)]->allreduce(x).wait();
      RANK_CHECK(x.eq(6).all().item<bool>());
    }
  });
}

TEST_CASE("all of many ranks name the rank that a reducer waits for") {
  constexpr int kRanks = kManyRanks, kMissing = kRanks - 2;
  const int64_t count = GENERATE(5, 100000);
  TestGroup group(kRanks);
  std::vector<Pending> pending;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank != kMissing) pending.push_back(group[rank].allreduce(at::ones({count})));
  }
  for (const Pending& each : pending) {
    expire(each);
    const base::Error error = thrown_by([&] { each.wait(); });
    INFO(error.message);
    CHECK(error.kind == ErrorKind::kDeadline);
    CHECK(error.rank == kMissing);
  }
}

TEST_CASE("all ranks learn in shared memory that a rank has closed the group") {
  const int64_t count = GENERATE(5, 100000);
  const bool is_rank_0_late = GENERATE(false, true);
  constexpr int size = kManyRanks;
  TestGroup group(size);
  std::vector<Pending> pending;
  const auto begin = [&](int rank) { pending.push_back(group[rank].allreduce(at::ones({count}))); };
  for (int rank = is_rank_0_late ? 1 : 0; rank < size - 1; ++rank) begin(rank);
  group.backends.back().reset();
  group.network.await_deliveries();
  if (is_rank_0_late) begin(0);
  for (const Pending& each : pending) {
    const base::Error error = thrown_by([&] { each.wait(); });
    INFO(error.message);
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == size - 1);
  }
}

TEST_CASE("a rank learns in shared memory that a rank has closed the group, even without rank 0") {
  TestGroup group(3);
  const Pending first = group[0].enter_barrier(), second = group[1].enter_barrier();
  group.backends[0].reset();
  group.backends[2].reset();
  const bool polls = GENERATE(false, true);
  while (polls && !second.done()) std::this_thread::yield();
  const base::Error error = thrown_by([&] { second.wait(); });
  CHECK(error.kind == ErrorKind::kPeerLost);
  CHECK(error.rank == 2);
}

TEST_CASE("an operation that ends before it has its slot fails on all ranks") {
  TestGroup group(2);
  const at::Tensor x = at::ones({5});
  std::vector<Pending> begun;
  for (uint64_t i = 0; i < SharedSpace::kSlots; ++i) begun.push_back(group[0].allreduce(x.clone()));
  const auto queued = group[0].allreduce(x);
  queued.fail({ErrorKind::kCancelled, "enough"});
  for (uint64_t i = 0; i < SharedSpace::kSlots; ++i) group[1].allreduce(x.clone()).wait();
  for (const Pending& each : begun) each.wait();
  const base::Error error = thrown_by([&] { group[1].allreduce(x).wait(); });
  CHECK(error.kind == ErrorKind::kCancelled);
  check_slots(group);
}

TEST_CASE("a queued operation names the rank for which the operation before waits") {
  TestGroup group(3);
  const at::Tensor x = at::ones({5});
  std::vector<Pending> begun;
  for (const int rank : {0, 1}) {
    for (int i = 0; i < 6; ++i) begun.push_back(group[rank].allreduce(x.clone()));
  }
  expire(begun.back());
  const base::Error error = thrown_by([&] { begun.back().wait(); });
  INFO(error.message);
  CHECK(error.kind == ErrorKind::kDeadline);
  CHECK(error.rank == 2);
  CHECK(contains(error.message, "nothing came from rank 2"));
}

TEST_CASE("the wait for an agreement ends by abort() and at the deadline, naming the rank") {
  Rogue rogue;
  std::thread other([&] { rogue.backend->abort(); });
  auto first =
      rogue.backend->allreduce(at::ones({5}), ReduceOp::SUM, std::chrono::milliseconds(30));
  const base::Error error = thrown_by([&] { first.wait(); });
  CHECK((error.kind == ErrorKind::kDeadline || error.kind == ErrorKind::kCancelled));
  other.join();
  auto second = rogue.backend->enter_barrier(std::chrono::milliseconds(30));
  const base::Error late = thrown_by([&] { second.wait(); });
  CHECK(late.kind == ErrorKind::kDeadline);
  CHECK(late.rank == 1);
  // The other ranks learn of both, so that they stay in step.
  std::unique_lock lock(rogue.mutex);
  rogue.changed.wait(lock, [&] {
    return std::ranges::count(rogue.steps, 0U, &rpc::ChannelTag::b) == 1 &&
           std::ranges::count(rogue.steps, 1U, &rpc::ChannelTag::b) == 1;
  });
}

TEST_CASE("a rank may close the group once all have its data") {
  TestGroup group(3);
  std::vector<at::Tensor> sums;
  std::vector<Pending> pending;
  for (int rank = 0; rank < 3; ++rank) {
    sums.push_back(at::ones({5}));
    pending.push_back(group[rank].allreduce(sums.back()));
  }
  pending[1].wait();
  group.backends[1].reset();
  for (const int rank : {0, 2}) {
    pending[size_t(rank)].wait();
    CHECK(sums[size_t(rank)].eq(3).all().item<bool>());
  }
}

TEST_CASE("wrong messages about shared memory end the group") {
  const auto step = GENERATE(SharingStep::kOffer, SharingStep::kUse, SharingStep::kUseNone,
                             static_cast<SharingStep>(9));
  Rogue rogue;
  rogue.send(collective::kSharing, uint64_t(step));
  const base::Error error = thrown_by([&] { rogue.backend->enter_barrier().wait(); });
  CHECK(error.kind == ErrorKind::kProtocol);
  CHECK(error.rank == 1);
}

TEST_CASE("a place outside the shared memory is an error") {
  const uint64_t place =
      GENERATE(uint64_t{64}, uint64_t{1} << 62, UINT64_MAX, (uint64_t{64} << 30) - (2 << 20) + 1);
  Rogue rogue;
  const auto space = rogue.accept();
  const at::Tensor x = allocate(*rogue.backend, kLarge).fill_(1);
  const auto pending = rogue.backend->allreduce(x);
  const SharedSpace::Slot slot = space->slot(0, 0);
  collective::encode_header({.kind = collective::OpKind::kAllreduceInPlace,
                             .reduce_op = ReduceOp::SUM,
                             .dtype = at::kFloat,
                             .bytes = kLarge * 4,
                             .place = place},
                            0, space->header_of(slot, 1).data());
  slot.marks[0][1] = 1;
  rogue.send(collective::kLook, 0);
  const base::Error error = thrown_by([&] { pending.wait(); });
  CHECK(error.kind == ErrorKind::kProtocol);
  CHECK(error.rank == 1);
}

TEST_CASE("marks without a header are an error") {
  Rogue rogue;
  const auto space = rogue.accept();
  const auto pending = rogue.backend->allreduce(at::ones({100000}));
  space->slot(0, 0).marks[0][1] = 1;
  rogue.send(collective::kLook, 0);
  CHECK(thrown_by([&] { pending.wait(); }).kind == ErrorKind::kProtocol);
}

TEST_CASE("the wait for an agreement about shared memory ends with the group") {
  const bool is_lost = GENERATE(true, false);
  Rogue rogue;
  std::thread other([&] {
    if (is_lost) return rogue.network.kill(1);
    rogue.send(collective::kClosed, 0);
  });
  const base::Error error = thrown_by([&] { rogue.backend->enter_barrier().wait(); });
  other.join();
  CHECK(error.kind == ErrorKind::kPeerLost);
  CHECK(error.rank == 1);
}

TEST_CASE("a rank that has called another operation gets the header of the call, not its error") {
  // Keeps its tasks, because threads may run them in any order.
  struct Keeper final : base::Executor {
    void post(base::Task task) override {
      std::lock_guard lock(mutex);
      tasks.push_back(std::move(task));
    }
    std::mutex mutex;
    std::vector<base::Task> tasks;
  } keeper;
  Rogue rogue(&keeper);
  uint8_t header[collective::kHeaderBytes];
  collective::encode_header({.kind = collective::OpKind::kAllToAll, .dtype = at::kFloat}, 0,
                            header);
  const std::span<const uint8_t> piece(header);
  rogue.network.channel(1).send(0, {1, 0, 0}, std::span(&piece, 1), nullptr);
  const auto space = rogue.accept();
  const base::Error error = thrown_by([&] { rogue.backend->allreduce(at::ones({5})).wait(); });
  CHECK(error.kind == ErrorKind::kInvalid);
  CHECK(error.rank == 1);
  for (base::Task& task : keeper.tasks) task();
  rogue.backend->shutdown();
  std::unique_lock lock(rogue.mutex);
  const auto received = [&](uint64_t number) {
    return std::ranges::count(rogue.steps, number, &rpc::ChannelTag::b);
  };
  rogue.changed.wait(lock, [&] { return received(collective::kClosed) > 0; });
  CHECK(received(0) == 1);
}

// Tests collectives on device tensors over FakeNccl.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "distrain/cuda/nccl_reduce_group.h"
#include "distrain/ddp/distributed_data_parallel.h"
#include "distrain/rpc/device.h"
#include "fake_device/fake_nccl.h"
#include "support/catch.h"
#include "support/fake_device.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using collective::ReduceGroup;
using std::chrono::milliseconds;

namespace {

constexpr auto kGroupLimit = std::chrono::seconds(20);

at::Tensor filled(double value, c10::Device device, int64_t count = 100) {
  return at::full({count}, value, at::TensorOptions(device));
}

bool holds(const at::Tensor& tensor, double value) { return tensor.eq(value).all().item<bool>(); }

// Checks that an average over all ranks succeeds.
void check_mean(ReduceGroup& reduce) {
  const at::Tensor x = filled(reduce.rank(), fake(reduce.rank()));
  reduce.average_async(x)->wait();
  RANK_CHECK(holds(x * 2, reduce.size() - 1));
}

/// Waits until `condition` is true, at most kGroupLimit. Returns whether it is true.
bool comes(const std::function<bool()>& condition) {
  const auto limit = std::chrono::steady_clock::now() + kGroupLimit;
  while (!condition() && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  return condition();
}
bool comes_to(int wanted, const std::function<int()>& count) {
  return comes([&] { return count() == wanted; });
}

/// Runs `body(rank, reduce)` for each rank of a group, in a thread of its own.
void run_nccl_ranks(FakeNccl& nccl, int size,
                    const std::function<void(int rank, ReduceGroup& reduce)>& body) {
  TestGroup group(size, {.timeout = kGroupLimit});
  run_ranks(size, [&](int rank) {
    body(rank, *cuda::make_nccl_reduce_group(group.backends[size_t(rank)], nccl));
  });
}

/// Two ranks with a communicator. `timeout` is the limit of NCCL operations. If it is short, the
/// constructor runs no operation, which might exceed it.
struct Pair {
  explicit Pair(milliseconds loss_grace = milliseconds(0), milliseconds timeout = kGroupLimit)
      : group(2, {.timeout = kGroupLimit}) {
    run_ranks(2, [&](int rank) {
      group[rank].setTimeout(timeout);
      groups[rank] = cuda::make_nccl_reduce_group(group.backends[size_t(rank)], nccl,
                                                  {.loss_grace = loss_grace});
      group[rank].setTimeout(kGroupLimit);
      if (timeout == kGroupLimit) check_mean(*groups[rank]);
    });
  }

  /// Starts an average that never completes, because rank 1 stalls. Returns the tensor of rank 0.
  at::Tensor begin_and_stall() {
    nccl.stall(1, true);
    const at::Tensor x = filled(5, fake(0));
    const auto other = groups[1]->average_async(filled(1, fake(1)));
    work = groups[0]->average_async(x);
    other->wait();
    work->wait();
    nccl.stall(1, false);
    return x;
  }

  base::Error next_error(int rank) {
    return thrown_by([&] { groups[rank]->average_async(filled(0, fake(rank)))->wait(); });
  }

  FakeNccl nccl;
  TestGroup group;
  std::unique_ptr<ReduceGroup> groups[2];
  ReduceGroup::WorkPtr work;  // rank 0's stalled operation
};

}  // namespace

TEST_CASE("NCCL reduces device tensors and the Backend CPU tensors, in one order") {
  const int size = GENERATE(1, 3);
  FakeNccl nccl;
  run_nccl_ranks(nccl, size, [&](int rank, ReduceGroup& reduce) {
    RANK_CHECK(reduce.rank() == rank);
    RANK_CHECK(reduce.size() == size);
    RANK_CHECK(reduce.world_rank(rank) == rank);
    for (int round = 0; round < 10; ++round) {
      const at::Tensor a = filled(rank + round, fake(rank));
      const at::Tensor b = filled(rank, at::kCPU);
      const at::Tensor c = filled(rank + 1, fake(3));  // a second device
      const at::Tensor d = filled(rank, at::kCPU);
      const std::vector<ReduceGroup::WorkPtr> works = {
          reduce.average_async(a), reduce.average_async(b), reduce.broadcast(c, size - 1),
          reduce.broadcast(d, 0)};
      for (const auto& work : works) work->wait();
      RANK_CHECK(holds(a * 2, size - 1 + 2 * round));
      RANK_CHECK(holds(b * 2, size - 1));
      RANK_CHECK(holds(c, size));
      RANK_CHECK(holds(d, 0));
    }
  });
  CHECK(nccl.made() == 2 * size);
  CHECK(nccl.aborted() == 0);
}

TEST_CASE("NCCL's stream is in order with the streams of the caller and of the waiter") {
  FakeNccl nccl;
  run_nccl_ranks(nccl, 2, [&](int rank, ReduceGroup& reduce) {
    const c10::Device device = fake(rank);
    for (int round = 0; round < 40; ++round) {
      at::Tensor x;
      ReduceGroup::WorkPtr work;
      {
        const c10::StreamGuard guard(rpc::side_stream(device));
        x = filled(1, device) * double(rank + round);
        work = reduce.average_async(x);
      }
      const c10::Stream read_in = rpc::side_stream(device);
      const c10::StreamGuard guard(read_in);
      work->wait();
      rpc::use_on_stream(x, read_in);
      RANK_CHECK(holds(x * 2, 2 * round + 1));
    }
  });
}

TEST_CASE("memory that NCCL still uses is not reused") {
  FakeNccl nccl;
  run_nccl_ranks(nccl, 2, [&](int rank, ReduceGroup& reduce) {
    const c10::Device device = fake(rank);
    const c10::Stream made_in = rpc::side_stream(device);
    const c10::StreamGuard guard(made_in);
    for (int round = 0; round < 10; ++round) {
      const at::Tensor kept = filled(rank, device);
      {
        // No thread waits for this operation.
        const at::Tensor dropped = filled(rank, device);
        reduce.average_async(dropped);
        reduce.broadcast(filled(0, at::kCPU), 0)->wait();
      }
      // The values of the ranks differ, so an average that used this memory would change them.
      const at::Tensor next = filled(7 + rank, device);
      rpc::StreamPoint::mark(device).wait_on_host();
      reduce.average_async(kept)->wait();  // runs NCCL's stream
      RANK_CHECK(holds(kept * 2, 1));
      RANK_CHECK(holds(next, 7 + rank));
    }
  });
}

TEST_CASE("DDP over NCCL equals DDP over the Backend") {
  FakeNccl nccl;
  const auto train = [&](bool on_devices) {
    TestGroup group(2, {.timeout = kGroupLimit});
    std::vector<at::Tensor> result;
    run_ranks(2, [&](int rank) {
      const c10::Device device = on_devices ? fake(rank) : c10::Device(at::kCPU);
      std::shared_ptr<ReduceGroup> reduce;
      if (on_devices) {
        reduce = cuda::make_nccl_reduce_group(group.backends[size_t(rank)], nccl);
      } else {
        reduce = std::make_shared<collective::StagedReduceGroup>(group.backends[size_t(rank)]);
      }
      auto generator = at::detail::createCPUGenerator(uint64_t(rank + 1));
      std::vector<ddp::NamedParameter> parameters;
      std::vector<at::Tensor> values;
      for (int i = 0; i < 5; ++i) {
        values.push_back(at::randn({10, 10}, generator).to(device).set_requires_grad(true));
        parameters.push_back({std::to_string(i), values.back()});
      }
      ddp::check_same_everywhere(parameters, *reduce);
      ddp::broadcast_values(values, *reduce);
      ddp::Reducer reducer(parameters, reduce,
                           {.bucket_cap_bytes = 900, .first_bucket_bytes = 400});
      for (int step = 0; step < 5; ++step) {
        at::Tensor x = at::randn({4, 10}, generator).to(device);
        for (const at::Tensor& value : values) x = at::tanh(at::matmul(x, value));
        x.pow(2).mean().backward();
        const at::NoGradGuard no_grad;
        for (at::Tensor& value : values) {
          value.sub_(std::exchange(value.mutable_grad(), at::Tensor()));
        }
      }
      if (rank != 1) return;
      for (const at::Tensor& value : values) result.push_back(value.detach().cpu());
    });
    return result;
  };
  const auto wanted = train(false);
  const auto got = train(true);
  REQUIRE(got.size() == wanted.size());
  for (size_t i = 0; i < got.size(); ++i) CHECK(at::allclose(got[i], wanted[i], 1e-6, 1e-6));
  CHECK(nccl.made() == 2);
}

TEST_CASE("after a refusal names its rank, earlier operations complete and new ones work") {
  FakeNccl nccl;
  run_nccl_ranks(nccl, 3, [&](int rank, ReduceGroup& reduce) {
    for (int round = 0; round < 5; ++round) {
      const at::Tensor before = filled(rank, fake(rank));
      const auto work = reduce.average_async(before);
      if (rank == 1) {
        reduce.refuse(2, {ErrorKind::kBadData, "the file ends here", 1, {}});
      } else {
        const auto first = reduce.average_async(filled(rank, fake(rank)));
        const auto second = reduce.broadcast(filled(rank, fake(rank)), 0);
        for (const auto& refused : {first, second}) {
          const base::Error error = thrown_by([&] { refused->wait(); });
          RANK_CHECK(error.kind == ErrorKind::kBadData);
          RANK_CHECK(error.rank == 1);
        }
      }
      work->wait();
      RANK_CHECK(holds(before, 1));
      check_mean(reduce);
    }
  });
  CHECK(nccl.made() == 3 * 6);
  CHECK(nccl.aborted() == 0);
}

TEST_CASE("ranks that call different operations get an error before NCCL starts") {
  FakeNccl nccl;
  run_nccl_ranks(nccl, 2, [&](int rank, ReduceGroup& reduce) {
    const c10::Device device = fake(rank);
    check_mean(reduce);
    const auto fails = [&](const ReduceGroup::WorkPtr& work, const std::string& mine,
                           const std::string& theirs) {
      const base::Error error = thrown_by([&] { work->wait(); });
      RANK_CHECK(error.kind == ErrorKind::kInvalid);
      RANK_CHECK(error.rank == 1 - rank);
      RANK_CHECK(contains(error.message, rank ? theirs : mine));
      RANK_CHECK(contains(error.message, rank ? mine : theirs));
      check_mean(reduce);
    };
    fails(reduce.average_async(filled(0, device, 10 + rank)), "mean of 40 bytes",
          "mean of 44 bytes");
    fails(reduce.broadcast(filled(0, device), rank), "broadcast(root 0)", "broadcast(root 1)");
    fails(reduce.average_async(filled(0, rank ? fake(3) : device)), "number 1", "number 2");
  });
}

TEST_CASE("a rank that is lost during NCCL's work, after wait() has returned, is named") {
  const bool aborts_hang = GENERATE(false, true);
  Pair pair;
  const at::Tensor x = pair.begin_and_stall();
  CHECK(pair.nccl.given(0) == 2);
  CHECK(pair.nccl.given(1) == 2);
  CHECK_FALSE(pair.groups[0]->failure());
  pair.nccl.hold_aborts(aborts_hang);
  pair.group.network.kill(1);
  REQUIRE(comes([&] { return pair.groups[0]->failure().has_value(); }));
  CHECK(pair.groups[0]->failure()->kind == ErrorKind::kPeerLost);
  CHECK(pair.groups[0]->failure()->rank == 1);
  for (const base::Error& error :
       {pair.next_error(0), pair.next_error(0), thrown_by([&] { pair.work->wait(); })}) {
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == 1);
  }
  CHECK_FALSE(pair.groups[0]->failure());  // reported once
  if (aborts_hang) CHECK(pair.nccl.aborted() == 0);
  pair.nccl.hold_aborts(false);
  CHECK(comes_to(1, [&] { return pair.nccl.aborted(); }));
  CHECK(holds(x, 5));  // the stream continues
}

TEST_CASE("an NCCL failure after wait() has returned fails the next operation on all ranks") {
  Pair pair;
  const at::Tensor x = pair.begin_and_stall();
  pair.nccl.set_failure(0, "remote process exited");
  REQUIRE(comes([&] { return pair.groups[0]->failure().has_value(); }));
  const base::Error first = *pair.groups[0]->failure();
  CHECK(first.kind == ErrorKind::kResources);
  CHECK(first.message == "NCCL: remote process exited");
  CHECK(first.rank == 0);
  CHECK(contains(first.op, "mean of 400 bytes"));
  CHECK(holds(x, 5));
  CHECK(pair.groups[0]->failure());  // failure() does not clear the failure
  run_ranks(2, [&](int rank) {
    const base::Error error = pair.next_error(rank);
    RANK_CHECK(error.kind == ErrorKind::kResources);
    RANK_CHECK(error.message == "rank 0: NCCL: remote process exited");
    RANK_CHECK(error.rank == 0);
    RANK_CHECK(!pair.groups[rank]->failure());
    check_mean(*pair.groups[rank]);
  });
  CHECK(pair.nccl.made() == 4);
}

TEST_CASE("a failure is reported even if its communicators have been replaced") {
  Pair pair;
  pair.begin_and_stall();
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      pair.groups[1]->refuse(1, {ErrorKind::kBadData, "the file ends here", 1, {}});
    } else {
      RANK_CHECK(pair.next_error(0).kind == ErrorKind::kBadData);
    }
    pair.groups[rank]->average_async(filled(rank, fake(rank)))->wait();
  });
  CHECK(pair.nccl.made() == 4);
  pair.nccl.set_failure(0, "remote process exited");
  REQUIRE(comes([&] { return pair.groups[0]->failure().has_value(); }));
  run_ranks(2, [&](int rank) {
    RANK_CHECK(contains(pair.next_error(rank).message, "remote process exited"));
    check_mean(*pair.groups[rank]);
  });
}

TEST_CASE("the lost rank is named instead of NCCL's error") {
  Pair pair(kGroupLimit);
  const bool in_the_call = GENERATE(false, true);
  if (in_the_call) {
    pair.nccl.fail_call(0);
    const auto other = pair.groups[1]->average_async(filled(1, fake(1)));
    pair.work = pair.groups[0]->average_async(filled(1, fake(0)));
    other->wait();
    pair.group.network.kill(1);
    const base::Error error = thrown_by([&] { pair.work->wait(); });
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == 1);
  } else {
    pair.begin_and_stall();
    pair.nccl.set_failure(0, "remote process exited");
    REQUIRE(comes([&] { return pair.nccl.told(0) > 1; }));
    CHECK_FALSE(pair.groups[0]->failure());
    pair.group.network.kill(1);
    REQUIRE(comes([&] { return pair.groups[0]->failure().has_value(); }));
    CHECK(pair.groups[0]->failure()->kind == ErrorKind::kPeerLost);
    CHECK(pair.groups[0]->failure()->rank == 1);
  }
}

TEST_CASE("a call that NCCL refuses is reported with its rank and operation") {
  Pair pair;
  pair.nccl.fail_call(0);
  const auto other = pair.groups[1]->average_async(filled(1, fake(1)));
  const base::Error error = pair.next_error(0);
  CHECK(error.kind == ErrorKind::kResources);
  CHECK(error.message == "the fake call failed");
  CHECK(error.rank == 0);
  CHECK(contains(error.op, "mean of 400 bytes"));
  other->wait();
  run_ranks(2, [&](int rank) {
    RANK_CHECK(contains(pair.next_error(rank).message, "rank 0 gave up"));
    check_mean(*pair.groups[rank]);
  });
}

TEST_CASE("a device that fails during NCCL's work is reported") {
  Pair pair;
  pair.nccl.break_device(0);
  pair.begin_and_stall();
  REQUIRE(comes([&] { return pair.groups[0]->failure().has_value(); }));
  CHECK(pair.groups[0]->failure()->kind == ErrorKind::kResources);
  CHECK(pair.groups[0]->failure()->rank == 0);
  CHECK(comes_to(1, [&] { return pair.nccl.aborted(); }));
  run_ranks(2, [&](int rank) {
    const base::Error error = pair.next_error(rank);
    RANK_CHECK(error.rank == 0);
    RANK_CHECK(contains(error.message, "the device is broken"));
  });
}

TEST_CASE("destroying a group after a rank is lost does not wait for NCCL's work") {
  Pair pair;
  const at::Tensor x = pair.begin_and_stall();
  pair.group.network.kill(1);
  while (!pair.group[0].failure()) std::this_thread::yield();
  pair.groups[0].reset();
  CHECK(pair.nccl.aborted() == 1);
  CHECK(holds(x, 5));
}

TEST_CASE("a rank that arrives but does not take part is detected at the deadline") {
  Pair pair(milliseconds(0), milliseconds(1000));
  pair.begin_and_stall();  // rank 1 does not know that it stalls
  const bool told_by_wait = GENERATE(false, true);
  REQUIRE(comes([&] { return pair.groups[0]->failure().has_value(); }));
  if (told_by_wait) {
    CHECK(thrown_by([&] { pair.work->wait(); }).kind == ErrorKind::kDeadline);
  }
  run_ranks(2, [&](int rank) {
    // Only one of the ranks has a communicator, so both begin to create new communicators.
    const base::Error error = pair.next_error(rank);
    RANK_CHECK(error.kind == (told_by_wait ? ErrorKind::kCancelled : ErrorKind::kDeadline));
    RANK_CHECK(contains(error.message,
                        told_by_wait ? "rank 0 gave up" : "rank 0: the deadline of an operation"));
  });
  CHECK(comes_to(2, [&] { return pair.nccl.aborted(); }));
}

TEST_CASE("a rank that never arrives is named at the deadline") {
  FakeNccl nccl;
  TestGroup group(2, {.timeout = milliseconds(30)});
  const auto made = cuda::make_nccl_reduce_group(group.backends[0], nccl);
  collective::ReduceGroup& reduce = *made;
  const base::Error error = thrown_by([&] { check_mean(reduce); });
  CHECK(error.kind == ErrorKind::kDeadline);
  CHECK(error.rank == 1);
}

TEST_CASE("a communicator that one rank cannot create fails on all ranks") {
  FakeNccl nccl;
  run_nccl_ranks(nccl, 3, [&](int rank, ReduceGroup& reduce) {
    if (rank == 0) nccl.fail_id();
    const base::Error id_error = thrown_by([&] { check_mean(reduce); });
    RANK_CHECK(id_error.kind == ErrorKind::kResources);
    RANK_CHECK(contains(id_error.message, "no id today"));
    if (rank == 2) nccl.fail_making(2);
    const base::Error error = thrown_by([&] { check_mean(reduce); });
    RANK_CHECK(error.kind == ErrorKind::kResources);
    RANK_CHECK(error.message == "rank 2: no device for this rank");
    RANK_CHECK(error.rank == 2);
    if (rank == 1) nccl.fail_joining(1);
    const base::Error other = thrown_by([&] { check_mean(reduce); });
    RANK_CHECK(other.message == "rank 1: no way to the others");
    RANK_CHECK(other.rank == 1);
    check_mean(reduce);
  });
}

TEST_CASE("a communicator that cannot connect fails") {
  FakeNccl nccl;
  TestGroup group(2, {.timeout = kGroupLimit});
  const bool killed = GENERATE(false, true);
  nccl.never_join(true);
  run_ranks(2, [&](int rank) {
    const milliseconds limit = killed ? 2 * kGroupLimit : milliseconds(50);
    const auto made =
        cuda::make_nccl_reduce_group(group.backends[size_t(rank)], nccl, {.join = limit});
    collective::ReduceGroup& reduce = *made;
    const auto work = reduce.average_async(filled(0, fake(rank)));
    if (killed) {
      RANK_CHECK(comes([&] { return nccl.joining() == 2; }));
      if (rank == 1) {
        group.network.kill(1);
        return group[1].shutdown();
      }
    }
    const base::Error error = thrown_by([&] { work->wait(); });
    RANK_CHECK(error.kind == (killed ? ErrorKind::kPeerLost : ErrorKind::kResources));
    if (killed) {
      RANK_CHECK(error.rank == 1);
    } else {
      RANK_CHECK(contains(error.message, "NCCL has not connected the group's GPUs"));
    }
  });
}

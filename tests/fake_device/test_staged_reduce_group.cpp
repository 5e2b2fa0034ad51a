// Tests collectives on device tensors over our own Backend, which stages them in host memory.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "distrain/collective/staged_reduce_group.h"
#include "distrain/rpc/device.h"
#include "support/catch.h"
#include "support/fake_device.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using collective::ReduceGroup;
using collective::StagedReduceGroup;

namespace {

constexpr auto kStagedLimit = std::chrono::seconds(20);

at::Tensor values(int rank, int64_t count, c10::Device device) {
  return at::arange(count, at::kFloat).mul_(double(rank + 1)).to(device);
}

}  // namespace

TEST_CASE("many concurrent means of device tensors are right") {
  const int64_t count = GENERATE(int64_t{5}, int64_t{100000});
  run_all_fake_streams();
  TestGroup group(3, {.timeout = kStagedLimit});
  reset_fake_device_counters();
  run_ranks(3, [&](int rank) {
    StagedReduceGroup reduce(group.backends[size_t(rank)]);
    const c10::Device device = fake(rank);
    for (int round = 0; round < 3; ++round) {
      std::vector<at::Tensor> tensors;
      std::vector<ReduceGroup::WorkPtr> works;
      for (int i = 0; i < 4; ++i) {
        tensors.push_back(values(rank, count, device) + double(i + round));
        works.push_back(reduce.average_async(tensors.back()));
      }
      for (int i = 0; i < 4; ++i) {
        works[size_t(i)]->wait();
        const at::Tensor wanted = at::arange(count, at::kFloat) * 2 + double(i + round);
        RANK_CHECK(at::allclose(tensors[size_t(i)].cpu(), wanted));
      }
    }
  });
  const FakeDeviceCounters counters = fake_device_counters();
  // Each operation copies to the host and back. The test copies the input in and the result out.
  CHECK(counters.host_to_device.number == 3 * 12 * 2);
  CHECK(counters.device_to_host.number == 3 * 12 * 2);
}

TEST_CASE("a broadcast copies from the device on the root and to the device on the others") {
  run_all_fake_streams();
  TestGroup group(3, {.timeout = kStagedLimit});
  reset_fake_device_counters();
  run_ranks(3, [&](int rank) {
    StagedReduceGroup reduce(group.backends[size_t(rank)]);
    for (int root = 0; root < 3; ++root) {
      const at::Tensor x = at::full({100}, double(rank), at::TensorOptions(fake(rank)));
      const at::Tensor y = x + 5;  // enqueued, not computed yet
      reduce.broadcast(y, root)->wait();
      RANK_CHECK((y * 2).eq(10 + 2 * root).all().item<bool>());
    }
  });
  CHECK(fake_device_counters().device_to_host.number == 3);
  CHECK(fake_device_counters().host_to_device.number == 6);
}

TEST_CASE("CPU tensors, device tensors and refusals keep their order") {
  TestGroup group(2, {.timeout = kStagedLimit});
  run_ranks(2, [&](int rank) {
    StagedReduceGroup reduce(group.backends[size_t(rank)]);
    for (int round = 0; round < 20; ++round) {
      const at::Tensor a = values(rank, 100, fake());
      const at::Tensor b = values(rank, 30, at::kCPU);
      const at::Tensor c = values(rank, 40, at::kCPU);
      const auto first = reduce.average_async(a);
      const auto second = reduce.average_async(b);
      const auto third = reduce.broadcast(c, 1);
      std::vector<ReduceGroup::WorkPtr> refused;
      if (rank == 1) {
        reduce.refuse(2, {ErrorKind::kBadData, "no more", 1, {}});
      } else {
        refused = {reduce.average_async(values(rank, 10, fake())),
                   reduce.average_async(values(rank, 10, at::kCPU))};
      }
      const at::Tensor d = values(rank, 20, fake());
      const auto last = reduce.average_async(d);
      for (const auto& work : {first, second, third, last}) work->wait();
      for (const auto& work : refused) {
        const base::Error error = thrown_by([&] { work->wait(); });
        RANK_CHECK(error.kind == ErrorKind::kBadData);
        RANK_CHECK(error.rank == 1);
      }
      RANK_CHECK(at::equal(a.cpu(), at::arange(100, at::kFloat) * 1.5));
      RANK_CHECK(at::equal(b, at::arange(30, at::kFloat) * 1.5));
      RANK_CHECK(at::equal(c, at::arange(40, at::kFloat) * 2));
      RANK_CHECK(at::equal(d.cpu(), at::arange(20, at::kFloat) * 1.5));
    }
  });
}

TEST_CASE("a reduction waits for the caller's stream, and the waiter's stream for the reduction") {
  TestGroup group(2, {.timeout = kStagedLimit});
  run_ranks(2, [&](int rank) {
    StagedReduceGroup reduce(group.backends[size_t(rank)]);
    const c10::Device device = fake(rank);
    for (int round = 0; round < 40; ++round) {
      const c10::Stream made_in = rpc::side_stream(device);
      const c10::Stream read_in = rpc::side_stream(device);
      at::Tensor x;
      ReduceGroup::WorkPtr work;
      {
        const c10::StreamGuard guard(made_in);
        x = at::ones({1000}, at::TensorOptions(device)) * double(rank + round);
        work = reduce.average_async(x);
      }
      const c10::StreamGuard guard(read_in);
      work->wait();
      rpc::use_on_stream(x, read_in);
      RANK_CHECK((x * 2).eq(2 * round + 1).all().item<bool>());
    }
  });
}

TEST_CASE("earlier work still sees the values that a broadcast replaces") {
  TestGroup group(2, {.timeout = kStagedLimit});
  run_ranks(2, [&](int rank) {
    StagedReduceGroup reduce(group.backends[size_t(rank)]);
    const c10::Device device = fake(rank);
    for (int round = 0; round < 10; ++round) {
      const at::Tensor x = at::full({100}, double(rank), at::TensorOptions(device));
      const at::Tensor before = x + 1;
      reduce.broadcast(x, 0)->wait();
      // `x` already has the new values, but the earlier `x + 1` must still read the old values.
      RANK_CHECK(x.sum().item<double>() == 0);
      RANK_CHECK(before.sum().item<double>() == 100 * (rank + 1));
    }
  });
}

TEST_CASE("pinned memory is kept until the copy back has been made") {
  const bool one_group = GENERATE(true, false);
  TestGroup group(2, {.timeout = kStagedLimit});
  run_ranks(2, [&](int rank) {
    auto reduce = std::make_unique<StagedReduceGroup>(group.backends[size_t(rank)]);
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 10; ++i) {
      tensors.push_back(values(rank, 100, fake(rank)) + double(i));
      reduce->average_async(tensors.back())->wait();
      if (!one_group) {
        reduce.reset();
        reduce = std::make_unique<StagedReduceGroup>(group.backends[size_t(rank)]);
      }
    }
    for (int i = 0; i < 10; ++i) {
      const at::Tensor wanted = at::arange(100, at::kFloat) * 1.5 + double(i);
      RANK_CHECK(at::equal(tensors[size_t(i)].cpu(), wanted));
    }
  });
}

TEST_CASE("the destructor of a group waits until its copies back are made") {
  run_all_fake_streams();
  TestGroup group(1, {.timeout = kStagedLimit});
  auto reduce = std::make_unique<StagedReduceGroup>(group.backends[0]);
  const at::Tensor x = values(0, 100, fake(0));
  reduce->average_async(x)->wait();
  const int64_t waits = fake_device_counters().host_waits;
  reduce.reset();
  CHECK(fake_device_counters().host_waits == waits + 1);
  CHECK(at::equal(x.cpu(), values(0, 100, c10::kCPU)));
}

TEST_CASE("a tensor's memory is not reused before its copy back has been made") {
  TestGroup group(2, {.timeout = kStagedLimit});
  run_ranks(2, [&](int rank) {
    StagedReduceGroup reduce(group.backends[size_t(rank)]);
    const c10::Stream made_in = rpc::side_stream(fake(rank));
    const c10::Stream waits = rpc::side_stream(fake(rank));
    for (int round = 0; round < 10; ++round) {
      {
        at::Tensor x;
        {
          const c10::StreamGuard guard(made_in);
          x = values(rank, 100, fake(rank));
        }
        ReduceGroup::WorkPtr work;
        {
          const c10::StreamGuard guard(made_in);
          work = reduce.average_async(x);
        }
        const c10::StreamGuard guard(waits);
        work->wait();
      }
      const c10::StreamGuard guard(made_in);
      const at::Tensor next = at::full({100}, 7.0, at::TensorOptions(fake(rank)));
      rpc::StreamPoint::mark(made_in).wait_on_host();
      rpc::StreamPoint::mark(waits).wait_on_host();
      RANK_CHECK(next.eq(7).all().item<bool>());
    }
  });
}

TEST_CASE("wait() throws for a lost rank and at a deadline") {
  const bool killed = GENERATE(true, false);
  TestGroup group(2, {.timeout = killed ? kStagedLimit : std::chrono::milliseconds(50)});
  StagedReduceGroup reduce(group.backends[0]);
  const at::Tensor x = values(0, 100, fake());
  const auto first = reduce.average_async(x);
  const auto second = reduce.average_async(x);
  if (killed) group.network.kill(1);
  for (const auto& work : {first, second}) {
    const base::Error error = thrown_by([&] { work->wait(); });
    CHECK(error.kind == (killed ? ErrorKind::kPeerLost : ErrorKind::kDeadline));
    CHECK(error.rank == 1);
  }
}

TEST_CASE("an operation without a waiter completes, too") {
  TestGroup group(2, {.timeout = kStagedLimit});
  run_ranks(2, [&](int rank) {
    const at::Tensor kept = values(rank, 100, fake(rank));
    {
      StagedReduceGroup reduce(group.backends[size_t(rank)]);
      for (int i = 0; i < 5; ++i) {
        if (rank == 0) {
          reduce.average_async(values(rank, 100, fake()));
        } else {
          reduce.average_async(values(rank, 100, fake()))->wait();
        }
      }
    }
    StagedReduceGroup next(group.backends[size_t(rank)]);
    next.average_async(kept)->wait();
    RANK_CHECK(at::equal(kept.cpu(), at::arange(100, at::kFloat) * 1.5));
  });
}

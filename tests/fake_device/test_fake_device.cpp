// Tests the fake device itself: the properties that other tests rely on.
#include <csignal>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "distrain/rpc/device.h"
#include "support/catch.h"
#include "support/fake_device.h"

namespace distrain::testing {
namespace {

constexpr int kTimes = 20;

// Runs the pending work of earlier tests and resets the counters.
struct Drained {
  Drained() {
    run_all_fake_streams();
    reset_fake_device_counters();
  }
};

at::Tensor pinned(const at::Tensor& tensor) {
  c10::Allocator* const allocator =
      at::globalContext().getAcceleratorHooksInterface(fake().type()).getPinnedMemoryAllocator();
  auto memory = std::make_shared<c10::DataPtr>(allocator->allocate(tensor.nbytes()));
  const at::Tensor copy = at::from_blob(
      memory->get(), tensor.sizes(), [memory](void*) {}, tensor.options());
  copy.copy_(tensor);
  return copy;
}

TEST_CASE("a tensor goes to the device and back") {
  const Drained drained;
  const at::Tensor a = at::arange(6, at::kFloat);
  for (int i = 0; i < kFakeDevices; ++i) {
    const at::Tensor there = a.to(fake(i));
    CHECK(there.device() == fake(i));
    CHECK(at::equal((there * 2 + 1).cpu(), a * 2 + 1));
  }
}

TEST_CASE("reading the device's memory on the CPU is a crash") {
  const at::Tensor a = at::ones({4}).to(fake());
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    const volatile float read = *a.const_data_ptr<float>();
    (void)read;
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGSEGV);
}

// Computes a value on one stream and sums it on another.
double sum_over_two_streams(const at::Tensor& a, bool wait) {
  const c10::Stream first = rpc::side_stream(a.device());
  const c10::Stream second = rpc::side_stream(a.device());
  rpc::StreamPoint::mark(a.device()).make_wait(first);
  at::Tensor b;
  rpc::StreamPoint ready;
  {
    const c10::StreamGuard guard(first);
    b = a * 3;
    ready = rpc::StreamPoint::mark(first);
  }
  const c10::StreamGuard guard(second);
  if (wait) ready.make_wait(second);
  return (b + 1).sum().item<double>();
}

TEST_CASE("a stream that does not wait for another is wrong every time") {
  const Drained drained;
  const at::Tensor a = at::ones({1000}).to(fake(1));
  for (int i = 0; i < kTimes; ++i) {
    CHECK(sum_over_two_streams(a, true) == 4000);
    CHECK(sum_over_two_streams(a, false) != 4000);
  }
}

TEST_CASE("a host that does not wait for a copy to it is wrong every time") {
  const Drained drained;
  const at::Tensor a = at::full({100}, 7.F).to(fake());
  for (int i = 0; i < kTimes; ++i) {
    const at::Tensor host = pinned(at::zeros({100}));
    host.copy_(a, /*non_blocking=*/true);
    const rpc::StreamPoint copied = rpc::StreamPoint::mark(a.device());
    CHECK(host.sum().item<double>() == 0);
    copied.wait_on_host();
    CHECK(host.sum().item<double>() == 700);
  }
}

TEST_CASE("overwriting a pinned buffer before its copy to the device is detected") {
  const Drained drained;
  for (int i = 0; i < kTimes; ++i) {
    const at::Tensor host = pinned(at::ones({100}));
    const at::Tensor a = host.to(fake(), /*non_blocking=*/true);
    host.fill_(2);
    CHECK(a.sum().item<double>() == 200);
    const at::Tensor b = host.to(fake(), /*non_blocking=*/true);
    rpc::StreamPoint::mark(b.device()).wait_on_host();
    host.fill_(3);
    CHECK(b.sum().item<double>() == 200);
  }
}

TEST_CASE("memory that is freed while another stream uses it is overwritten, unless recorded") {
  const Drained drained;
  for (int i = 0; i < kTimes; ++i) {
    for (const bool recorded : {false, true}) {
      const c10::Stream side = rpc::side_stream(fake());
      at::Tensor a = at::ones({100}).to(fake());
      const at::Tensor host = pinned(at::zeros({100}));
      rpc::StreamPoint::mark(fake()).make_wait(side);
      {
        const c10::StreamGuard guard(side);
        host.copy_(a, /*non_blocking=*/true);
      }
      if (recorded) rpc::use_on_stream(a, side);
      const void* const memory = a.const_data_ptr();
      a.reset();
      const at::Tensor next = at::full({100}, 5.F, at::TensorOptions().device(fake()));
      CHECK((next.const_data_ptr() == memory) == !recorded);
      rpc::StreamPoint::mark(side).wait_on_host();
      CHECK((host.sum().item<double>() == 100) == recorded);
    }
  }
}

TEST_CASE("memory may be freed after a wait for the other stream that uses it") {
  const Drained drained;
  const c10::Stream side = rpc::side_stream(fake());
  at::Tensor a = at::ones({100}).to(fake());
  const at::Tensor host = pinned(at::zeros({100}));
  rpc::StreamPoint::mark(fake()).make_wait(side);
  {
    const c10::StreamGuard guard(side);
    host.copy_(a, /*non_blocking=*/true);
  }
  rpc::StreamPoint::mark(side).make_current_wait(fake());
  a.reset();
  rpc::StreamPoint::mark(side).wait_on_host();
  CHECK(host.sum().item<double>() == 100);
}

TEST_CASE("polling an event ends") {
  const Drained drained;
  at::Tensor a = at::ones({4}).to(fake());
  for (int i = 0; i < 5; ++i) a.add_(1);
  const rpc::StreamPoint point = rpc::StreamPoint::mark(fake());
  CHECK_FALSE(point.reached());
  int polls = 1;
  while (!point.reached()) ++polls;
  CHECK(polls >= 5);
  CHECK(a.sum().item<double>() == 24);
}

TEST_CASE("copies are counted by direction") {
  const Drained drained;
  const at::Tensor host = at::ones({8}, at::kFloat);
  const at::Tensor a = host.to(fake(0));
  const at::Tensor b = a.to(fake(1));
  const at::Tensor c = b.clone();
  const at::Tensor d = (c * 2).relu().add_(a.to(fake(1))).cpu();
  CHECK(d.sum().item<float>() == 24);
  const FakeDeviceCounters counted = fake_device_counters();
  CHECK(counted.host_to_device == FakeDeviceCopies{1, 32});
  CHECK(counted.device_to_device == FakeDeviceCopies{2, 64});
  CHECK(counted.within_device == FakeDeviceCopies{1, 32});
  CHECK(counted.device_to_host == FakeDeviceCopies{1, 32});
  CHECK(counted.scalars == 0);
}

TEST_CASE("the allocator reports its peak and throws when it is out of memory") {
  const Drained drained;
  { const at::Tensor a = at::empty({1 << 20}, at::TensorOptions().device(fake(3))); }
  CHECK(rpc::peak_device_bytes(fake(3)) >= 4 << 20);
  {
    const FakeDeviceMemoryLimit limit(1 << 20);
    CHECK_THROWS_AS(at::empty({1 << 22}, at::TensorOptions().device(fake(3))),
                    c10::OutOfMemoryError);
  }
  CHECK_NOTHROW(at::empty({1 << 22}, at::TensorOptions().device(fake(3))));
}

TEST_CASE("torch's own pinned memory is pinned") {
  const Drained drained;
  const at::Tensor host = at::ones({4}).pin_memory();
  REQUIRE(host.is_pinned());
  const at::Tensor a = host.to(fake(), /*non_blocking=*/true);
  host.fill_(2);
  CHECK(a.sum().item<float>() == 8);
  CHECK_FALSE(at::ones({4}).is_pinned());
}

TEST_CASE("memory that is not pinned is staged when it is copied to a device") {
  const Drained drained;
  const at::Tensor host = at::ones({4});
  const at::Tensor a = host.to(fake(), /*non_blocking=*/true);
  host.fill_(2);
  CHECK(a.sum().item<float>() == 4);
}

TEST_CASE("a random tensor depends on its generator only, which must be of its device") {
  const Drained drained;
  at::Generator first = at::globalContext()
                            .getAcceleratorHooksInterface(fake().type())
                            .getNewGenerator(fake().index());
  first.set_current_seed(7);
  at::Generator second = at::make_generator<at::CPUGeneratorImpl>(7);
  at::Tensor a = at::empty({100}, at::TensorOptions().device(fake())).uniform_(-1, 1, first);
  CHECK(at::equal(a.cpu(), at::empty({100}).uniform_(-1, 1, second)));
  CHECK_THROWS_WITH(a.uniform_(-1, 1, second), ContainsSubstring("for generator but found 'cpu'"));
  CHECK_THROWS_WITH(at::empty({3}, at::TensorOptions().device(fake(1))).uniform_(-1, 1, first),
                    ContainsSubstring("for generator but found 'fake:0'"));
}

TEST_CASE("operators whose output shape depends on values, or is not given, work") {
  const Drained drained;
  const at::Tensor a = at::tensor({1.F, 0.F, 3.F}).to(fake(1));
  CHECK(at::equal(a.nonzero().cpu(), at::tensor({0, 2}, at::kLong).unsqueeze(1)));
  CHECK(at::equal(a.masked_select(a > 0).cpu(), at::tensor({1.F, 3.F})));
  CHECK(at::equal(at::arange(5, a.options()).cpu(), at::arange(5, at::kFloat)));
  CHECK(at::equal(a, a.clone()));
  CHECK_FALSE(at::equal(a, a + 1));
}

TEST_CASE("several threads use the devices concurrently") {
  const Drained drained;
  constexpr int kThreads = 4;
  std::vector<double> sums(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t, &sums] {
      const c10::StreamGuard guard(rpc::side_stream(fake(t % 2)));
      at::Tensor sum = at::zeros({64}, at::TensorOptions().device(fake(t % 2)));
      for (int i = 0; i < 200; ++i) {
        const at::Tensor part = at::full({64}, t + 1).to(fake(t % 2), /*non_blocking=*/true);
        sum.add_(part.to(fake(2 + t % 2)).to(fake(t % 2)));
      }
      sums[static_cast<size_t>(t)] = sum.sum().item<double>();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < kThreads; ++t) CHECK(sums[static_cast<size_t>(t)] == 200 * 64 * (t + 1));
  CHECK(fake_device_counters().device_to_device.number == kThreads * 200 * 2);
}

TEST_CASE("tensors of different devices cannot be combined") {
  const Drained drained;
  const at::Tensor a = at::ones({4}).to(fake(0));
  CHECK_THROWS(a + at::ones({4}).to(fake(1)));
  CHECK_THROWS(a + at::ones({4}));
  CHECK((a + at::scalar_tensor(2.F)).sum().item<float>() == 12);
}

}  // namespace
}  // namespace distrain::testing

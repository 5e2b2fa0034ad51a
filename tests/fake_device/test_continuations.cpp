// ctest: timeout=120
// Tests values that one thread computes and another uses, each on its own stream. The consumer's
// stream waits for the producer's stream, even if then() is called after the future is complete.
#include <cstdlib>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <spawn.h>
#include <sys/wait.h>

#include "distrain/rpc/agent.h"
#include "distrain/rpc/device.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/fake_device.h"

namespace distrain::testing {
namespace {

at::Tensor numbers(int64_t n, c10::Device device) {
  return at::arange(n, at::TensorOptions(at::kFloat)).to(device);
}
at::Tensor expected(int64_t n) { return (numbers(n, c10::kCPU) + 1) * 2; }

/// Returns x + 1, enqueued on a new stream. First runs all pending work, so `x` is ready.
base::Future<at::Tensor> completed_elsewhere(const at::Tensor& x) {
  run_all_fake_streams();
  const c10::StreamGuard guard(rpc::side_stream(x.device()));
  return base::Future<at::Tensor>::ready(x + 1);
}

base::Future<at::Tensor> plus_one(at::Tensor x) { return completed_elsewhere(x); }
at::Tensor plus_one_here(at::Tensor x) { return x + 1; }

struct OnDevices : Cluster {
  OnDevices()
      : Cluster(
            2,
            [](rpc::Agent& agent) {
              agent.expose<&plus_one>("plus_one");
              agent.expose<&plus_one_here>("plus_one_here");
            },
            {}, [](rpc::AgentOptions& o) { o.device = fake(o.rank); }) {}
};

void check_continuations(rpc::Agent& agent, c10::Device device) {
  const auto twice = [](at::Tensor& x) { return (x * 2).cpu(); };
  const at::Tensor x = numbers(1000, device);
  SECTION("completed under a stream of its own, registered before") {
    base::Promise<at::Tensor> promise;
    const auto doubled = promise.future().then(agent.executor(), twice);
    run_all_fake_streams();
    {
      const c10::StreamGuard guard(rpc::side_stream(device));
      promise.set(x + 1);
    }
    CHECK(at::equal(doubled.wait(), expected(1000)));
  }
  SECTION("completed under a stream of its own, registered later") {
    const auto early = completed_elsewhere(x);
    CHECK(at::equal(early.then(agent.executor(), twice).wait(), expected(1000)));
  }
  SECTION("registered under a stream of its own") {
    base::Promise<at::Tensor> promise;
    base::Future<at::Tensor> doubled;
    {
      const c10::StreamGuard guard(rpc::side_stream(device));
      doubled = promise.future().then(agent.executor(), twice);
    }
    run_all_fake_streams();
    promise.set(x + 1);
    CHECK(at::equal(doubled.wait(), expected(1000)));
  }
}

TEST_CASE("a continuation waits for the stream that its future's value was computed on") {
  OnDevices ranks;
  check_continuations(ranks[0], fake(0));
  ranks.shutdown();
}

TEST_CASE("an inline continuation and a waiting thread wait for that stream, too") {
  OnDevices ranks;
  const at::Tensor x = numbers(1000, fake(0));
  SECTION("wait") { CHECK(at::equal((completed_elsewhere(x).wait() * 2).cpu(), expected(1000))); }
  SECTION("take") { CHECK(at::equal((completed_elsewhere(x).take() * 2).cpu(), expected(1000))); }
  SECTION("wait_result") {
    CHECK(at::equal((completed_elsewhere(x).wait_result().unchecked() * 2).cpu(), expected(1000)));
  }
  SECTION("inline") {
    const auto doubled = completed_elsewhere(x).then(ranks[0].inline_executor(),
                                                     [](at::Tensor& y) { return (y * 2).cpu(); });
    CHECK(at::equal(doubled.wait(), expected(1000)));
  }
  SECTION("a future in a continuation") {
    const auto inner = completed_elsewhere(x);
    const auto outer =
        base::Future<int>::ready(1).then(ranks[0].executor(), [inner](int) { return inner; });
    CHECK(at::equal((outer.wait() * 2).cpu(), expected(1000)));
  }
  ranks.shutdown();
}

TEST_CASE("a call's continuation may be registered after its reply has arrived") {
  OnDevices ranks;
  const at::Tensor x = numbers(1000, fake(0));
  const rpc::StreamPoint made = rpc::StreamPoint::mark(fake(0));
  base::Future<at::Tensor> reply;
  {
    const c10::StreamGuard guard(rpc::side_stream(fake(0)));
    made.make_current_wait(fake(0));
    reply = ranks[0].rpc_async<&plus_one_here>(1, x + 0);
  }
  static_cast<void>(reply.wait_until(base::kNever));  // waits without using the value
  const auto doubled = reply.then(ranks[0].executor(), [](at::Tensor& y) { return (y * 2).cpu(); });
  CHECK(at::equal(doubled.wait(), expected(1000)));
  ranks.shutdown();
}

TEST_CASE("a reply waits for the stream that the handler's future was completed on") {
  OnDevices ranks;
  CHECK(at::equal((ranks[0].rpc_sync<&plus_one>(1, numbers(1000, fake(0))) * 2).cpu(),
                  expected(1000)));
  ranks.shutdown();
}

TEST_CASE("values may be used on their owner on any stream") {
  OnDevices ranks;
  const auto made = ranks[0].remote<&plus_one_here>(0, numbers(1000, fake(0)));
  made.handle()->owned()->value.future().wait();  // enqueued, but not computed yet
  const c10::StreamGuard guard(rpc::side_stream(fake(0)));
  SECTION("local_value") { CHECK(at::equal((made.local_value() * 2).cpu(), expected(1000))); }
  SECTION("to_here") { CHECK(at::equal((made.to_here() * 2).cpu(), expected(1000))); }
  SECTION("to_here_async") {
    CHECK(at::equal((made.to_here_async().wait() * 2).cpu(), expected(1000)));
  }
  ranks.shutdown();
}

// Is rank 1 of the next test, in a child process. Uses a device only because rank 0's map names it.
TEST_CASE("the other rank of a job in two processes", "[.]") {
  const char* const port = std::getenv("DISTRAIN_TEST_PORT");
  if (!port) return;
  rpc::AgentOptions options;
  options.rank = 1;
  options.master_port = static_cast<uint16_t>(std::atoi(port));
  options.peer_timeout = std::chrono::nanoseconds(0);
  rpc::Agent agent(options);
  agent.join();
  check_continuations(agent, fake(2));
  agent.shutdown();
}

TEST_CASE("continuations are in order on a rank that has only a mapped device") {
  for (const char* const section : {"completed under a stream of its own, registered before",
                                    "completed under a stream of its own, registered later",
                                    "registered under a stream of its own"}) {
    rpc::AgentOptions options;
    options.names = {"w0", "w1"};
    options.peer_timeout = std::chrono::nanoseconds(0);
    options.device_maps = {{"w1", {{fake(1), fake(2)}}}};
    rpc::Agent agent(options);
    REQUIRE(setenv("DISTRAIN_TEST_PORT", std::to_string(agent.port()).c_str(), 1) == 0);
    std::string program = "/proc/self/exe";
    std::string name = "the other rank of a job in two processes";
    std::string flag = "-c", part = section;
    char* const arguments[] = {program.data(), name.data(), flag.data(), part.data(), nullptr};
    pid_t child = 0;
    REQUIRE(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ) == 0);
    CHECK(error_of([&] {
            agent.join();
            agent.shutdown();
          }).message == "(no error)");
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  unsetenv("DISTRAIN_TEST_PORT");
}

}  // namespace
}  // namespace distrain::testing

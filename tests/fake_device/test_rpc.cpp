// ctest: timeout=120
// Tests calls with device tensors. The fake device detects each missing wait, each extra copy and
// memory that is freed too early.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "distrain/rpc/agent.h"
#include "distrain/rpc/device.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/fake_device.h"

namespace distrain::testing {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;  // bytes, see Note [Tensors of devices]

at::Tensor doubled(at::Tensor x) { return x * 2; }
at::Tensor relay(const rpc::RRef<at::Tensor>& x) { return x.to_here(); }
at::Tensor doubled_ref(const rpc::RRef<at::Tensor>& x) { return x.to_here() * 2; }
at::Tensor sum(std::vector<at::Tensor> all) {
  at::Tensor total = all.at(0).clone();
  for (size_t i = 1; i < all.size(); ++i) total = total + all[i];
  return total;
}
std::string place(at::Tensor x) { return x.device().str(); }
std::vector<at::Tensor> same(std::vector<at::Tensor> all) { return all; }
at::Tensor on_cpu(at::Tensor x) { return x.cpu(); }
at::Tensor make(int64_t n) { return at::arange(n, at::TensorOptions(at::kFloat)).to(fake(1)) + 1; }
/// Returns x * 3, computed on a new stream, as user code may do.
at::Tensor elsewhere(at::Tensor x) {
  const rpc::StreamPoint arrived = rpc::StreamPoint::mark(x.device());
  at::Tensor y;
  rpc::StreamPoint computed;
  {
    const c10::StreamGuard guard(rpc::side_stream(x.device()));
    arrived.make_current_wait(x.device());
    y = x * 3;
    computed = rpc::StreamPoint::mark(x.device());
  }
  computed.make_current_wait(x.device());
  return y;
}
base::Future<at::Tensor> later(rpc::CallContext& call, at::Tensor x) {
  return call.agent.rpc_async<&doubled>(call.caller.rank, x);
}

/// Returns a tensor on the device fake:1, which differs from the caller's device.
at::Tensor host_to_fake1(int64_t n) { return at::ones({n}).to(fake(1)); }

struct Gate {
  base::Promise<void> entered, open;
};
/// Returns `x` when the test opens the gate of the called rank. Fails if that rank ends while the
/// gate is closed.
base::Future<at::Tensor> behind_gate(rpc::CallContext& call, at::Tensor x) {
  Gate& gate = call.agent.local<Gate>();
  gate.entered.set();
  return gate.open.future().then(call.agent.executor(), [x] { return x; });
}

/// Occupies a worker thread until the test sets `g_may_go`. `g_held` counts such threads.
std::atomic<int> g_held{0};
std::atomic<bool> g_may_go{false};
void hold() {
  ++g_held;
  while (!g_may_go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  --g_held;
}

at::Tensor ones(rpc::CallContext& call, int64_t n) { return at::ones({n}).to(call.agent.device()); }

void expose_places(rpc::Agent& agent) {
  agent.expose<&ones>("ones");
  agent.expose<&hold>("hold");
  agent.expose<&host_to_fake1>("host_to_fake1");
  agent.expose<&behind_gate>("behind_gate");
  agent.expose<&doubled>("doubled");
  agent.expose<&doubled_ref>("doubled_ref");
  agent.expose<&relay>("relay");
  agent.expose<&sum>("sum");
  agent.expose<&place>("place");
  agent.expose<&same>("same");
  agent.expose<&on_cpu>("on_cpu");
  agent.expose<&make>("make");
  agent.expose<&elsewhere>("elsewhere");
  agent.expose<&later>("later");
}

/// A cluster in which rank r uses the device fake:r.
struct DeviceCluster : Cluster {
  explicit DeviceCluster(int size, rpc::AgentOptions options = {},
                         const std::function<void(rpc::AgentOptions&)>& each = {})
      : Cluster(size, expose_places, std::move(options), [&each](rpc::AgentOptions& o) {
          o.device = fake(o.rank);
          if (each) each(o);
        }) {}
};

at::Tensor numbers_on(int64_t n, c10::Device device) {
  return at::arange(n, at::TensorOptions(at::kFloat)).to(device);
}

bool same_values(const at::Tensor& device, const at::Tensor& cpu) {
  return at::equal(device.cpu(), cpu);
}

TEST_CASE("a tensor arrives on the device of the rank that it is sent to, and comes back") {
  DeviceCluster ranks(2);
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{1000}, kChunk / 4, kChunk / 4 + 1,
                          3 * kChunk / 4 + 7, 5 * kChunk}) {
    INFO(n);
    const at::Tensor x = numbers_on(n, fake(0)) + 1;  // not computed yet
    const at::Tensor y = ranks[0].rpc_sync<&doubled>(1, x);
    CHECK(y.device() == fake(0));
    CHECK(same_values(y, (numbers_on(n, c10::kCPU) + 1) * 2));
  }
  CHECK(ranks[0].rpc_sync<&place>(1, numbers_on(3, fake(0))) == "fake:1");
  CHECK(ranks[0].rpc_sync<&place>(0, numbers_on(3, fake(2))) == "fake:2");
  CHECK(ranks[0].rpc_sync<&place>(1, numbers_on(3, c10::kCPU)) == "cpu");
  ranks.shutdown();
}

TEST_CASE("a call copies each of its tensors once from the device and once to it") {
  DeviceCluster ranks(2);
  const at::Tensor x = numbers_on(5 * kChunk / 4, fake(0));
  run_all_fake_streams();
  reset_fake_device_counters();
  const at::Tensor y = ranks[0].rpc_sync<&doubled>(1, x);
  const FakeDeviceCounters counters = fake_device_counters();
  CHECK(counters.device_to_host ==
        FakeDeviceCopies{10, 10 * kChunk});  // five chunks in each direction
  CHECK(counters.host_to_device == FakeDeviceCopies{10, 10 * kChunk});
  CHECK(counters.device_to_device == FakeDeviceCopies{});
  CHECK(counters.within_device == FakeDeviceCopies{});
  CHECK(same_values(y, numbers_on(5 * kChunk / 4, c10::kCPU) * 2));
  ranks.shutdown();
}

TEST_CASE("one message may have tensors of several kinds") {
  DeviceCluster ranks(2);
  const at::Tensor image = at::arange(2 * 3 * 4 * 5, at::kFloat).view({2, 3, 4, 5});
  const std::vector<at::Tensor> sent = {
      numbers_on(5, c10::kCPU),
      numbers_on(700000, fake(0)),
      image.to(fake(0)).contiguous(at::MemoryFormat::ChannelsLast),
      image.contiguous(at::MemoryFormat::ChannelsLast),
      at::tensor({1, 0, 1}).to(at::kBool).to(fake(0)),
      numbers_on(0, fake(0)),
      numbers_on(12, fake(0)).view({3, 4}).t(),
      numbers_on(100, fake(0)).slice(0, 3, 50, 2),
      at::Tensor(),
      at::full({3}, 2.5, at::kHalf).to(fake(0)),
      numbers_on(300000, fake(0)) + 5,
  };
  const std::vector<at::Tensor> back = ranks[0].rpc_sync<&same>(1, sent);
  REQUIRE(back.size() == sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    INFO(i);
    REQUIRE(back[i].defined() == sent[i].defined());
    if (!sent[i].defined()) continue;
    CHECK(back[i].device() == sent[i].device());
    CHECK(back[i].scalar_type() == sent[i].scalar_type());
    CHECK(at::equal(back[i].cpu(), sent[i].cpu()));
  }
  CHECK(back[2].strides() == sent[2].strides());
  CHECK(back[3].strides() == sent[3].strides());
  ranks.shutdown();
}

TEST_CASE("the reply waits for the function, even if it uses its own stream") {
  DeviceCluster ranks(2);
  const at::Tensor x = numbers_on(1000, fake(0)) * 5;
  CHECK(same_values(ranks[0].rpc_sync<&elsewhere>(1, x), numbers_on(1000, c10::kCPU) * 15));
  CHECK(same_values(ranks[0].rpc_sync<&later>(1, x), numbers_on(1000, c10::kCPU) * 10));
  ranks.shutdown();
}

TEST_CASE("a call waits for the caller's stream, which then waits for the reply") {
  DeviceCluster ranks(2);
  const c10::StreamGuard guard(rpc::side_stream(fake(0)));
  for (int i = 0; i < 5; ++i) {
    const at::Tensor x = numbers_on(kChunk, fake(0)) + i;
    CHECK(same_values(ranks[0].rpc_sync<&doubled>(1, x) + 1,
                      (numbers_on(kChunk, c10::kCPU) + i) * 2 + 1));
    const auto future = ranks[0].rpc_async<&doubled>(1, x).then(
        ranks[0].executor(), [](at::Tensor& y) { return y + 1; });
    CHECK(same_values(future.wait() * 2, ((numbers_on(kChunk, c10::kCPU) + i) * 2 + 1) * 2));
    // Rank 0 also calls itself.
    CHECK(same_values(ranks[0].rpc_sync<&doubled>(0, x) + 1,
                      (numbers_on(kChunk, c10::kCPU) + i) * 2 + 1));
  }
  ranks.shutdown();
}

TEST_CASE("a sent tensor may be overwritten after the reply and freed at once") {
  DeviceCluster ranks(2);
  std::vector<base::Future<at::Tensor>> replies;
  for (int i = 0; i < 20; ++i) {
    // This thread frees the tensor while it may still be in flight.
    replies.push_back(ranks[0].rpc_async<&doubled>(1, numbers_on(3 * kChunk / 8, fake(0)) + i));
  }
  for (int i = 0; i < 20; ++i) {
    CHECK(same_values(replies[static_cast<size_t>(i)].wait(),
                      (numbers_on(3 * kChunk / 8, c10::kCPU) + i) * 2));
  }
  const at::Tensor x = numbers_on(3 * kChunk / 8, fake(0));
  const at::Tensor y = ranks[0].rpc_sync<&doubled>(1, x);
  {
    const c10::StreamGuard guard(rpc::side_stream(fake(0)));
    x.fill_(-1);
    rpc::StreamPoint::mark(fake(0)).wait_on_host();
  }
  CHECK(same_values(y, numbers_on(3 * kChunk / 8, c10::kCPU) * 2));
  ranks.shutdown();
}

TEST_CASE("copies for a call that cannot be sent do not write to reused memory") {
  DeviceCluster ranks(3);
  ranks.kill(1);
  // The first call fails when rank 0 detects the loss, the others before their copies run.
  for (int i = 0; i < 3; ++i) {
    CHECK(error_of([&] { ranks[0].rpc_sync<&doubled>(1, numbers_on(2 * kChunk, fake(0))); }).kind ==
          base::ErrorKind::kPeerLost);
  }
  const auto reply = ranks[0].rpc_async<&ones>(2, 2 * kChunk);
  const at::Tensor arrived = reply.wait();  // uses host memory of the failed calls again
  CHECK(same_values(ranks[0].rpc_sync<&doubled>(2, numbers_on(3, fake(0))),
                    at::tensor({0.F, 2.F, 4.F})));
  CHECK(same_values(arrived, at::ones({2 * kChunk})));
}

TEST_CASE("received tensors outlive the agents that received them") {
  at::Tensor arrived;
  {
    DeviceCluster ranks(2);
    arrived = ranks[0].rpc_async<&ones>(1, 2 * kChunk).wait();
    ranks.shutdown();
  }
  std::vector<at::Tensor> others;  // reuse memory that the agents have freed
  for (int i = 0; i < 16; ++i) others.push_back(at::full({kChunk / 4}, 7.F).pin_memory());
  CHECK(same_values(arrived, at::ones({2 * kChunk})));
}

TEST_CASE("values stay on their owner's device until a rank fetches them") {
  DeviceCluster ranks(3);
  const rpc::RRef<at::Tensor> made = ranks[0].remote<&make>(1, 1000);
  const at::Tensor here = made.to_here();
  CHECK(here.device() == fake(0));
  CHECK(same_values(here, numbers_on(1000, c10::kCPU) + 1));
  const rpc::RRef<at::Tensor> more = ranks[0].remote<&doubled>(2, here);
  CHECK(same_values(more.to_here(), (numbers_on(1000, c10::kCPU) + 1) * 2));
  // The output of rank 1 for a reference to rank 0's input comes to rank 0 by way of rank 2.
  for (int i = 0; i < 10; ++i) {
    const auto input = ranks[0].make_rref(numbers_on(100000, fake(0)) + i);
    const auto output = ranks[0].remote<&doubled_ref>(1, input);
    const at::Tensor relayed = ranks[0].remote<&relay>(2, output).to_here();
    CHECK(relayed.device() == fake(0));
    CHECK(same_values(relayed, ranks[0].rpc_sync<&doubled_ref>(1, input).cpu()));
    CHECK(same_values(relayed, (numbers_on(100000, c10::kCPU) + i) * 2));
  }
  ranks.shutdown();
}

TEST_CASE("sparse tensors of devices can be sent") {
  DeviceCluster ranks(2);
  const at::Tensor cpu = at::sparse_coo_tensor(at::tensor({1, 4, 4}, at::kLong).view({1, 3}),
                                               at::arange(6, at::kFloat).view({3, 2}), {6, 2});
  const at::Tensor device = at::_sparse_coo_tensor_unsafe(
      cpu._indices().to(fake(0)), cpu._values().to(fake(0)), cpu.sizes(),
      at::TensorOptions(at::kFloat).device(fake(0)).layout(at::kSparse));
  const at::Tensor back = ranks[0].rpc_sync<&same>(1, std::vector{device}).at(0);
  CHECK(back.device() == fake(0));
  CHECK(at::equal(back._indices().cpu(), cpu._indices()));
  CHECK(at::equal(back._values().cpu(), cpu._values()));
  ranks.shutdown();
}

TEST_CASE("many threads and ranks send tensors of devices to each other") {
  DeviceCluster ranks(3);
  ranks.on_all([&](rpc::Agent& agent) {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 10; ++i) {
          const int64_t n = (i % 3 + 1) * kChunk / 5 + t;
          const int to = (agent.rank() + 1 + t) % 3;
          const at::Tensor x = numbers_on(n, fake(agent.rank())) + i;
          if (!same_values(agent.rpc_sync<&sum>(to, std::vector{x, x * 2}),
                           (numbers_on(n, c10::kCPU) + i) * 3)) {
            ++wrong;
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (wrong > 0) throw std::runtime_error("wrong sums");
  });
  ranks.shutdown();
}

TEST_CASE("a device without a map is an error that says how to add one") {
  Cluster ranks(2, expose_places, {}, [](rpc::AgentOptions& o) {
    o.device = o.rank == 0 ? fake(0) : c10::Device(c10::kCPU);
  });
  const base::Error error =
      error_of([&] { ranks[0].rpc_sync<&doubled>(1, numbers_on(3, fake(0))); });
  CHECK(error.kind == base::ErrorKind::kInvalid);
  CHECK_THAT(error.message, ContainsSubstring("rank 1 (w1)") && ContainsSubstring("device_maps") &&
                                ContainsSubstring("fake:0") && ContainsSubstring(".cpu()"));
  // A tensor on a device that is not the rank's own is refused, too.
  CHECK(error_of([&] { ranks[0].rpc_sync<&doubled>(1, numbers_on(3, fake(2))); }).kind ==
        base::ErrorKind::kInvalid);
  // A device tensor in a reply is refused, too.
  CHECK(error_of([&] { ranks[0].rpc_sync<&make>(1, 3); }).kind == base::ErrorKind::kInvalid);
  CHECK(same_values(ranks[0].rpc_sync<&doubled>(1, numbers_on(3, fake(0)).cpu()),
                    at::tensor({0.F, 2.F, 4.F})));
  ranks.shutdown();
}

TEST_CASE("maps determine where tensors arrive and return") {
  DeviceCluster ranks(2, {}, [](rpc::AgentOptions& o) {
    o.device_maps.clear();
    if (o.rank == 0) o.device_maps = {{"w1", {{fake(0), fake(3)}, {fake(2), fake(1)}}}};
  });
  CHECK(ranks[0].rpc_sync<&place>(1, numbers_on(3, fake(0))) == "fake:3");
  CHECK(ranks[0].rpc_sync<&place>(1, numbers_on(3, fake(2))) == "fake:1");
  CHECK(ranks[0].rpc_sync<&doubled>(1, numbers_on(3, fake(2))).device() == fake(2));
  CHECK(ranks[1].rpc_sync<&place>(0, numbers_on(3, fake(3))) == "fake:0");
  CHECK(ranks[0].device_of(1) == "fake:1");
  ranks.shutdown();
}

TEST_CASE("a rank's own device maps to the other's only if no map uses either of them") {
  DeviceCluster ranks(2, {}, [](rpc::AgentOptions& o) {
    o.device_maps.clear();
    if (o.rank == 0) o.device_maps = {{"w1", {{fake(2), fake(1)}}}};
  });
  const at::Tensor x = numbers_on(1000, fake(0)) + 1, y = numbers_on(1000, fake(2)) + 2;
  CHECK(error_of([&] { ranks[0].rpc_sync<&doubled>(1, x); }).kind == base::ErrorKind::kInvalid);
  CHECK(error_of([&] {
          ranks[0].rpc_sync<&same>(1, std::vector{x, y});
        }).kind == base::ErrorKind::kInvalid);
  const at::Tensor back = ranks[0].rpc_sync<&doubled>(1, y);
  CHECK(back.device() == fake(2));
  CHECK(same_values(back, (numbers_on(1000, c10::kCPU) + 2) * 2));
  ranks.shutdown();
}

TEST_CASE("a map of other devices does not change the ranks' own") {
  DeviceCluster ranks(2, {}, [](rpc::AgentOptions& o) {
    o.device_maps.clear();
    if (o.rank == 0) o.device_maps = {{"w1", {{fake(2), fake(3)}}}};
  });
  CHECK(ranks[0].rpc_sync<&place>(1, numbers_on(3, fake(0))) == "fake:1");
  CHECK(ranks[0].rpc_sync<&doubled>(1, numbers_on(3, fake(0))).device() == fake(0));
  CHECK(ranks[0].rpc_sync<&place>(1, numbers_on(3, fake(2))) == "fake:3");
  CHECK(ranks[1].rpc_sync<&place>(0, numbers_on(3, fake(1))) == "fake:0");
  ranks.shutdown();
}

TEST_CASE("a map may name a device of a rank that declares no devices") {
  Cluster ranks(2, expose_places, {}, [](rpc::AgentOptions& o) {
    o.device_maps.clear();
    if (o.rank == 0) o.device_maps = {{"w1", {{fake(1), fake(2)}}}};
  });
  CHECK(ranks[0].rpc_sync<&place>(1, numbers_on(3, fake(1))) == "fake:2");
  CHECK(ranks[0].rpc_sync<&doubled>(1, numbers_on(3, fake(1))).device() == fake(1));
  ranks.shutdown();
}

TEST_CASE("invalid maps are refused when the ranks meet") {
  const auto refused = [](std::vector<rpc::DeviceMap> first, std::vector<rpc::DeviceMap> second) {
    base::Error error = error_of([&] {
      DeviceCluster ranks(
          2, {}, [&](rpc::AgentOptions& o) { o.device_maps = o.rank == 0 ? first : second; });
    });
    CHECK(error.kind == base::ErrorKind::kInvalid);
    return error.message;
  };
  CHECK_THAT(refused({{"w1", {{fake(0), fake(9)}}}}, {}),
             ContainsSubstring("rank 1 (w1) has no fake:9"));
  CHECK_THAT(refused({{"w1", {{fake(7), fake(0)}}}}, {}),
             ContainsSubstring("rank 0 (w0) has no fake:7"));
  CHECK_THAT(refused({{"w2", {{fake(0), fake(0)}}}}, {}),
             ContainsSubstring("no rank of that name"));
  CHECK_THAT(refused({{"w0", {{fake(0), fake(0)}}}}, {}), ContainsSubstring("no map for itself"));
  CHECK_THAT(refused({{"w1", {{fake(0), fake(1)}, {fake(2), fake(1)}}}}, {}),
             ContainsSubstring("one to one"));
  CHECK_THAT(refused({{"w1", {{fake(0), fake(1)}, {fake(0), fake(3)}}}}, {}),
             ContainsSubstring("one to one"));
  CHECK_THAT(refused({{"w1", {{fake(0), fake(1)}}}}, {{"w0", {{fake(2), fake(0)}}}}),
             ContainsSubstring("no way back"));
  const c10::Device cpu(c10::kCPU);
  CHECK_THAT(refused({}, {{"w0", {{fake(0), cpu}}}}), ContainsSubstring("has no cpu"));
  CHECK_THAT(refused({{"w1", {{cpu, fake(1)}}}}, {}), ContainsSubstring("has no cpu"));
}

TEST_CASE("a map may name the CPU for CPU tensors") {
  const c10::Device cpu(c10::kCPU);
  DeviceCluster ranks(2, {}, [&](rpc::AgentOptions& o) {
    o.device_maps = {{o.rank == 0 ? "w1" : "w0", {{cpu, cpu}}}};
  });
  const at::Tensor sum_of_both =
      ranks[0].rpc_sync<&sum>(1, std::vector{at::zeros({2}), at::ones({2})});
  CHECK(sum_of_both.device() == cpu);
  CHECK(at::equal(sum_of_both, at::ones({2})));
  CHECK(ranks[0].rpc_sync<&place>(1, at::ones({2})) == "cpu");
  CHECK(ranks[0].rpc_sync<&place>(1, numbers_on(2, fake(0))) == "fake:1");  // by default
  ranks.shutdown();
}

TEST_CASE("an abandoned reply frees its device memory") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  DeviceCluster ranks(2, options);
  const auto soon = [](const auto& holds) {
    const auto deadline = base::deadline_after(std::chrono::seconds(30));
    while (!holds() && base::Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return holds();
  };
  const int64_t before = fake_bytes_in_use(0);
  const auto all_is_free = [&] {
    run_all_fake_streams();
    return fake_bytes_in_use(0) == before;
  };
  CHECK(ranks[0].rpc_sync<&host_to_fake1>(1, 3 * kChunk).numel() == 3 * kChunk);
  REQUIRE(soon(all_is_free));  // a worker may hold the reply for a moment
  g_may_go = false;
  const auto held = ranks[0].rpc_async<&hold>(0);  // occupies the only worker
  REQUIRE(soon([] { return g_held == 1; }));
  const auto reply = ranks[0].rpc_async<&host_to_fake1>(1, 3 * kChunk);
  REQUIRE(soon([&] { return ranks[0].waits().size() == 1; }));  // only hold(): the reply is here
  reply.cancel();
  g_may_go = true;
  held.wait();
  ranks[0].rpc_sync<&hold>(0);  // runs after all earlier tasks of that thread
  CHECK(soon(all_is_free));
  ranks.shutdown();
}

TEST_CASE("a device without memory for an argument fails the call, naming the rank") {
  DeviceCluster ranks(2);
  const at::Tensor x = numbers_on(kChunk, fake(0)), y = x + 1;  // eight chunks together
  run_all_fake_streams();
  {
    const FakeDeviceMemoryLimit limit(6 * kChunk);
    const base::Error error = error_of([&] { ranks[0].rpc_sync<&same>(1, std::vector{x, y}); });
    CHECK(error.kind == base::ErrorKind::kResources);
    CHECK(error.rank == 1);
  }
  CHECK(same_values(ranks[0].rpc_sync<&doubled>(1, x), numbers_on(kChunk, c10::kCPU) * 2));
  ranks.shutdown();
}

TEST_CASE("a device without memory for a reply fails the call, naming caller and function") {
  DeviceCluster ranks(2);
  const at::Tensor full = at::zeros({4 * kChunk}, at::TensorOptions().device(fake(0)));
  run_all_fake_streams();
  for (const int64_t n : {int64_t{1000}, kChunk}) {  // sent in the message, or before it in chunks
    const FakeDeviceMemoryLimit limit(fake_bytes_in_use(0));
    const base::Error error = error_of([&] { ranks[0].rpc_sync<&host_to_fake1>(1, n); });
    CAPTURE(n, error.message);
    CHECK(error.kind == base::ErrorKind::kResources);
    CHECK(error.rank == 0);
    CHECK(error.op == "host_to_fake1");
  }
  CHECK(same_values(ranks[0].rpc_sync<&ones>(1, 5), at::ones({5})));
  ranks.shutdown();
}

TEST_CASE("tensors of devices are copied to the CPU for a file") {
  const at::Tensor large =
      numbers_on(9 * kChunk / 4, fake(1)) * 2;  // not computed yet; nine pieces
  const at::Tensor some[] = {
      numbers_on(3, c10::kCPU), numbers_on(12, fake(0)).view({3, 4}).t(),       large, at::Tensor(),
      numbers_on(0, fake(2)),   at::tensor({1, 0, 1}).to(at::kBool).to(fake(0))};
  const auto host = rpc::to_host({std::begin(some), std::end(some)});
  REQUIRE(host.size() == std::size(some));
  for (size_t i = 0; i < host.size(); ++i) {
    INFO(i);
    REQUIRE(host[i].defined() == some[i].defined());
    if (!host[i].defined()) continue;
    CHECK(host[i].device().is_cpu());
    CHECK(host[i].is_contiguous());
    CHECK(same_values(some[i], host[i]));
  }
  CHECK(host[0].is_same(some[0]));
}

TEST_CASE("tensors of calls use no more device memory than the receiver's budget allows") {
  constexpr int kCalls = 40;
  constexpr int64_t kBudget = 8 * kChunk;
  rpc::AgentOptions options;
  options.total_budget = kBudget;
  DeviceCluster ranks(2, options);
  ranks[1].provide(std::make_shared<Gate>());
  run_all_fake_streams();
  const int64_t before = fake_bytes_in_use(1);
  const at::Tensor x = numbers_on(3 * kChunk / 8, fake(0));  // one and a half chunks
  std::atomic<int> sent{0};
  std::vector<base::Future<at::Tensor>> replies;
  std::thread caller([&] {
    for (; sent < kCalls; ++sent) {
      replies.push_back(ranks[0].rpc_async<&behind_gate>(rpc::To(1).without_deadline(), x));
    }
  });
  const auto waits_for_room = [&] {
    const std::vector<rpc::Wait> waits = ranks[0].waits();
    return std::ranges::any_of(
        waits, [](const auto& wait) { return wait.what.starts_with("room on rank 1"); });
  };
  // Running calls use at most the budget, and calls that wait to run use at most as much.
  while (sent < kCalls && !(sent * 3 * kChunk / 2 > kBudget && waits_for_room())) {
    CHECK(fake_bytes_in_use(1) <= before + 2 * kBudget);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(sent < kCalls / 2);
  ranks[1].local<Gate>().open.set();
  caller.join();
  for (const auto& reply : replies) CHECK(reply.wait().numel() == x.numel());
  ranks.shutdown();
}

TEST_CASE("a rank that dies while tensors are in flight fails the calls") {
  DeviceCluster ranks(2);
  ranks[1].provide(std::make_shared<Gate>());
  Gate& gate = ranks[1].local<Gate>();
  std::vector<base::Future<at::Tensor>> replies;
  for (int i = 0; i < 8; ++i) {
    replies.push_back(ranks[0].rpc_async<&behind_gate>(1, numbers_on(3 * kChunk, fake(0))));
  }
  gate.entered.future().wait();
  ranks.kill(1);
  for (const auto& reply : replies) {
    const base::Error error = error_of([&] { static_cast<void>(reply.wait()); });
    CAPTURE(error.message);
    CHECK((error.kind == base::ErrorKind::kPeerLost || error.kind == base::ErrorKind::kCancelled));
    CHECK(error.rank == 1);
  }
}

}  // namespace
}  // namespace distrain::testing

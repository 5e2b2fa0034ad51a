#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <unordered_set>

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include "distrain/rpc/agent.h"
#include "gate.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using namespace std::chrono_literals;
using base::ErrorKind;
using rpc::Agent;
using testing::add;
using testing::Cluster;
using testing::error_of;
using testing::g_gate;
using testing::nap;
using testing::wait_at_gate;

namespace {

struct Point {
  double x = 0;
  double y = 0;
  std::vector<std::string> tags;
  static constexpr auto kFields = std::tuple(&Point::x, &Point::y, &Point::tags);
};

struct Account {
  int add(int by) noexcept { return sum += by; }
  int sum = 0;
};

at::Tensor scale(at::Tensor x, double by) { return x * by; }
void nothing() {}
bool is_positive(int8_t x) noexcept { return x > 0; }
uint32_t same_count(uint32_t x) { return x; }
constexpr auto kThrice = [](int64_t x) { return 3 * x; };
constexpr auto kCaller = [](rpc::CallContext& context) noexcept { return context.caller.rank; };
struct Twice {
  int64_t operator()(int64_t x) const { return 2 * x; }
};
at::Scalar same_scalar(const at::Scalar& x) { return x; }
bool are_same(const at::Scalar& x, const at::Scalar& y) {
  if (x.type() != y.type()) return false;
  if (x.isComplex()) return x.toComplexDouble() == y.toComplexDouble();
  return x.type() == at::kUInt64 ? x.toUInt64() == y.toUInt64() : x.toDouble() == y.toDouble();
}
std::set<std::string> texts_of(const std::unordered_set<int>& numbers) {
  std::set<std::string> texts;
  for (const int number : numbers) texts.insert(std::to_string(number));
  return texts;
}
at::Tensor compressed_rows() { return at::eye(2).to_sparse_csr(); }

// Returns a text that describes the thread-local state of torch that the test changes.
std::string torch_state() {
  std::string state = at::GradMode::is_enabled() ? "grad" : "no grad";
  if (at::autocast::is_autocast_enabled(at::kCPU)) state += ", autocast";
  if (at::autocast::get_autocast_dtype(at::kCPU) != at::kBFloat16) state += " to others";
  if (!at::autocast::is_autocast_cache_enabled()) state += ", no cache";
  if (!at::SavedTensorDefaultHooks::is_enabled()) state += ", no hooks";
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView))
    state += ", no views";
  return state + ", " + std::to_string(at::get_num_threads()) + " threads";
}
void change_torch_state() {
  at::GradMode::set_enabled(false);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  at::autocast::set_autocast_cache_enabled(false);
  at::SavedTensorDefaultHooks::disable("not here");
  c10::impl::tls_set_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView, true);
  at::set_num_threads(at::get_num_threads() + 1);
}
std::string whoami(rpc::CallContext& context, int) {
  return context.agent.name() + " for " + context.caller.name;
}
Point mirror(const Point& p) { return {p.y, p.x, {p.tags.rbegin(), p.tags.rend()}}; }
std::map<std::string, std::vector<at::Tensor>> regroup(const std::optional<at::Tensor>& first,
                                                       const std::tuple<int, std::string>& second,
                                                       const std::vector<at::Tensor>& rest) {
  std::map<std::string, std::vector<at::Tensor>> result;
  result[std::get<1>(second)] = rest;
  if (first) result["first"] = {*first * std::get<0>(second)};
  return result;
}
at::Tensor identity(const at::Tensor& x) { return x; }
int64_t boom(int kind) {
  if (kind == 0) throw std::runtime_error("user code broke");
  if (kind == 1) throw base::Exception(ErrorKind::kBadData, "a bad file");
  at::ones({2}).add_(at::ones({3}));
  return 0;
}
base::Future<int64_t> later(rpc::CallContext& context, int64_t value);
// Makes nested calls A → B → A …, `depth` times; each handler waits for the next call.
int64_t bounce(rpc::CallContext& context, int64_t depth);

struct Counter {
  using Constructor = Counter(int64_t start);
  explicit Counter(int64_t start) : value(start) {}
  int64_t increment(int64_t by) { return value += by; }
  int64_t get() const { return value; }
  std::atomic<int64_t> value;
};

std::atomic<int> g_counted{0};
void count() { ++g_counted; }

int64_t draw_shared(rpc::CallContext& context, int64_t start) {
  return context.agent.shared<Counter>(start)->increment(1);
}

void expose_calls(Agent& agent) {
  agent.expose<&count>("count");
  agent.expose<&scale>("scale");
  agent.expose<&add>("add");
  agent.expose<&nothing>("nothing");
  agent.expose<&is_positive>("is_positive");
  agent.expose<&same_count>("same_count");
  agent.expose<kThrice>("thrice");
  agent.expose<kCaller>("caller");
  agent.expose<Twice{}>("twice");
  agent.expose<&same_scalar>("same_scalar");
  agent.expose<&texts_of>("texts_of");
  agent.expose<&compressed_rows>("compressed_rows");
  agent.expose<&torch_state>("torch_state");
  agent.expose<&change_torch_state>("change_torch_state");
  agent.expose<&whoami>("whoami");
  agent.expose<&mirror>("mirror");
  agent.expose<&regroup>("regroup");
  agent.expose<&identity>("identity");
  agent.expose<&boom>("boom");
  agent.expose<&nap>("nap");
  agent.expose<&wait_at_gate>("wait_at_gate");
  agent.expose<&later>("later");
  agent.expose<&bounce>("bounce");
  agent.expose_class<Counter>("Counter");
  agent.expose<&Counter::increment>("Counter.increment");
  agent.expose<&Counter::get>("Counter.get");
}

base::Future<int64_t> later(rpc::CallContext& context, int64_t value) {
  return context.agent.rpc_async<&add>(context.caller, value, 1);
}
int64_t bounce(rpc::CallContext& context, int64_t depth) {
  if (depth == 0) return 0;
  return 1 + context.agent.rpc_sync<&bounce>(context.caller, depth - 1);
}

}  // namespace

TEST_CASE("calls accept all kinds of arguments and results") {
  const std::string transport = GENERATE("unix", "tcp");
  rpc::AgentOptions options;
  options.transport = transport;
  Cluster cluster(3, expose_calls, options);
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      CAPTURE(transport, from, to);
      Agent& a = cluster[from];
      CHECK(a.rpc_sync<&add>(to, 40, 2) == 42);
      a.rpc_sync<&nothing>(to);
      CHECK(a.rpc_sync<&whoami>(to, 1) ==
            "w" + std::to_string(to) + " for w" + std::to_string(from));
      const at::Tensor x = at::arange(6, at::kDouble).view({2, 3});
      CHECK(at::equal(a.rpc_sync<&scale>("w" + std::to_string(to), x, 2), x * 2));
      // A view sends only its own elements, in its own order.
      CHECK(at::equal(a.rpc_sync<&scale>(to, x.t().select(0, 1), 3.0), x.t().select(0, 1) * 3));
      const Point p = a.rpc_sync<&mirror>(to, Point{1, 2, {"a", "b"}});
      CHECK((p.x == 2 && p.y == 1 && p.tags == std::vector<std::string>{"b", "a"}));
      auto groups = a.rpc_sync<&regroup>(to, at::ones({2}), std::tuple(5, std::string("rest")),
                                         std::vector<at::Tensor>{at::zeros({0, 3}), at::ones({})});
      CHECK(at::equal(groups.at("first")[0], at::full({2}, 5.0)));
      CHECK(groups.at("rest")[0].sizes() == at::IntArrayRef({0, 3}));
      CHECK(a.rpc_sync<&later>(to, 7) == 8);
      CHECK(a.rpc_sync<kThrice>(to, 14) == 42);
      CHECK(a.rpc_sync<kCaller>(to) == from);
      CHECK(a.rpc_sync<Twice{}>(to, 21) == 42);
      CHECK(a.rpc_sync<&texts_of>(to, std::unordered_set{7, 3}) == std::set<std::string>{"3", "7"});
      for (const at::Scalar& x : {at::Scalar(true), at::Scalar(-3), at::Scalar(UINT64_MAX),
                                  at::Scalar(0.5), at::Scalar(c10::complex<double>(1, -2))}) {
        const at::Scalar y = a.rpc_sync<&same_scalar>(to, x);
        CHECK(are_same(x, y));
      }
    }
  }
  CHECK(cluster[1].transport() == transport);
  cluster.shutdown();
}

TEST_CASE("arguments are converted without loss or refused") {
  static_assert(rpc::detail::kTruncates<int, double> && rpc::detail::kTruncates<bool, float>);
  static_assert(!rpc::detail::kTruncates<float, double> && !rpc::detail::kTruncates<double, int>);
  Cluster cluster(2, expose_calls);
  Agent& a = cluster[0];
  CHECK(a.rpc_sync<&is_positive>(1, int64_t{127}));
  CHECK_FALSE(a.rpc_sync<&is_positive>(1, -128));
  CHECK(a.rpc_sync<&same_count>(1, int64_t{UINT32_MAX}) == UINT32_MAX);
  for (const int64_t number : {int64_t{-1}, int64_t{1} << 32}) {
    const base::Error error = error_of([&] { a.rpc_sync<&same_count>(1, number); });
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(error.op == "same_count");
    CHECK(error.message.find(std::to_string(number)) != std::string::npos);
  }
  CHECK(error_of([&] { a.rpc_sync<&is_positive>(1, 128); }).kind == ErrorKind::kInvalid);
}

TEST_CASE("changes of torch's state by a function or a continuation end with it") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(2, expose_calls, options);
  const std::string state = cluster[0].rpc_sync<&torch_state>(1);
  CHECK(state.starts_with("grad, "));
  cluster[0].rpc_sync<&change_torch_state>(1);
  CHECK(cluster[0].rpc_sync<&torch_state>(1) == state);
  base::Future<void>::ready({}).then(cluster[1].executor(), &change_torch_state).wait();
  CHECK(cluster[0].rpc_sync<&torch_state>(1) == state);
}

TEST_CASE("changes of torch's state by a layer's on_rank_lost end with it") {
  struct Changing final : rpc::Layer {
    void on_rank_lost(const rpc::Loss&) override {
      found.set(torch_state());
      change_torch_state();
    }
    base::Promise<std::string> found;
  };
  Cluster cluster(2, expose_calls);
  const auto first = std::make_shared<Changing>(), second = std::make_shared<Changing>();
  cluster[0].add_layer(first);
  cluster[0].add_layer(second);
  cluster.kill(1);
  CHECK(second->found.future().wait() == first->found.future().wait());
}

TEST_CASE("tensors of every dtype, sparse and undefined ones can be sent") {
  Cluster cluster(2, expose_calls);
  for (const at::ScalarType type :
       {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat,
        at::kDouble, at::kBool, at::kComplexFloat, at::kComplexDouble, at::kComplexHalf,
        at::kFloat8_e5m2, at::kFloat8_e4m3fn, at::kFloat8_e5m2fnuz, at::kFloat8_e4m3fnuz,
        at::kFloat8_e8m0fnu}) {
    const at::Tensor x = at::ones({3, 1, 2}, at::kFloat).to(type);
    const at::Tensor y = cluster[0].rpc_sync<&identity>(1, x);
    CHECK(y.scalar_type() == type);
    CHECK(at::equal(x.view(at::kByte), y.view(at::kByte)));
  }
  CHECK_FALSE(cluster[0].rpc_sync<&identity>(1, at::Tensor()).defined());
  const at::Tensor indices = at::tensor({4, 0, 4}, at::kLong).unsqueeze(0);
  const at::Tensor sparse = at::sparse_coo_tensor(indices, at::ones({3, 2}), {6, 2});
  const at::Tensor back = cluster[0].rpc_sync<&identity>(1, sparse);
  CHECK(back.is_sparse());
  CHECK_FALSE(back.is_coalesced());
  CHECK(at::equal(back.to_dense(), sparse.to_dense()));
  CHECK(cluster[0].rpc_sync<&identity>(1, sparse.coalesce()).is_coalesced());
  const at::Tensor large = at::rand({3, 1 << 20});
  CHECK(at::equal(cluster[0].rpc_sync<&identity>(1, large), large));
  cluster.shutdown();
}

TEST_CASE("member functions of a provided object are called as functions are") {
  using rpc::of_local;
  Cluster cluster(3, [](Agent& agent) {
    if (agent.rank() != 2) agent.provide(std::make_shared<Account>());
    agent.expose<of_local<&Account::add>>("Account.add");
  });
  CHECK(cluster[0].rpc_sync<of_local<&Account::add>>(1, 2) == 2);
  CHECK(cluster[2].rpc_sync<of_local<&Account::add>>(1, 3) == 5);
  CHECK(cluster[1].local<Account>().sum == 5);
  CHECK(cluster[0].local<Account>().sum == 0);
  const auto error = error_of([&] { cluster[0].rpc_sync<of_local<&Account::add>>(2, 1); });
  CHECK(error.kind == ErrorKind::kNotFound);
}

TEST_CASE("errors keep their kind, text and rank") {
  Cluster cluster(2, [](Agent& agent) {
    if (agent.rank() == 0) {
      expose_calls(agent);
    } else {
      agent.expose<&boom>("boom");
      agent.expose<&wait_at_gate>("wait_at_gate");
      agent.expose<&compressed_rows>("compressed_rows");
    }
  });
  Agent& a = cluster[0];
  base::Error e = error_of([&] { a.rpc_sync<&boom>(1, 0); });
  CHECK(e.kind == ErrorKind::kRemoteFailed);
  CHECK(e.message == "user code broke");
  CHECK(e.rank == 1);
  CHECK(e.op == "boom");
  e = error_of([&] { a.rpc_sync<&boom>(1, 1); });
  CHECK(e.kind == ErrorKind::kBadData);
  CHECK(e.rank == 1);
  e = error_of([&] { a.rpc_sync<&boom>(1, 2); });
  CHECK(e.kind == ErrorKind::kRemoteFailed);
  CHECK(e.message.find("size") != std::string::npos);
  CHECK(e.message.find("frame #") == std::string::npos);
  e = error_of([&] { a.rpc_sync<&compressed_rows>(1); });
  CHECK(e.kind == ErrorKind::kInvalid);
  CHECK(e.rank == 1);
  CHECK(e.op == "compressed_rows");
  CHECK(error_of([&] { a.rpc_sync<&add>(1, 1, 2); }).kind == ErrorKind::kNotFound);
  CHECK(error_of([&] { cluster[1].rpc_sync<&add>(0, 1, 2); }).kind == ErrorKind::kNotFound);
  CHECK(error_of([&] { a.rpc_sync<&boom>("nobody", 0); }).kind == ErrorKind::kNotFound);
  g_gate = false;
  e = error_of([&] { a.rpc_sync<&wait_at_gate>(rpc::To(1).timeout(30ms)); });
  g_gate = true;
  CHECK(e.kind == ErrorKind::kDeadline);
  CHECK(e.rank == 1);
  CHECK(e.message.find("wait_at_gate") != std::string::npos);
}

TEST_CASE("an abandoned call does not run, nor does a call of a closing rank") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(2, expose_calls, options);
  const auto occupy = [&cluster] {
    g_gate = false;
    auto call = cluster[0].rpc_async<&wait_at_gate>(rpc::To(1).without_deadline());
    testing::wait_for_call_at_gate();
    return call;
  };
  g_counted = 0;
  auto busy = occupy();
  CHECK(error_of([&] { cluster[0].rpc_sync<&count>(rpc::To(1).timeout(30ms)); }).kind ==
        ErrorKind::kDeadline);
  auto patient = cluster[0].rpc_async<&count>(rpc::To(1).without_deadline());
  cluster[1].rpc_sync<&add>(0, 1, 1);  // its answer arrives after the abandoned call
  std::this_thread::sleep_for(31ms);
  g_gate = true;
  patient.wait();  // runs after the abandoned call would have run
  CHECK(g_counted == 1);

  busy.wait();
  busy = occupy();
  auto queued = cluster[0].rpc_async<&count>(rpc::To(1).without_deadline());
  std::thread killer([&] { cluster.kill(1); });  // returns once the call at the gate has returned
  CHECK(error_of([&] { busy.wait(); }).rank == 1);  // ensures that rank 1 is closing
  g_gate = true;
  killer.join();
  CHECK(error_of([&] { queued.wait(); }).rank == 1);
  CHECK(g_counted == 1);
}

TEST_CASE("calls of a lost rank do not run") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(3, expose_calls, options);
  g_counted = 0;
  g_gate = false;
  auto busy = cluster[0].rpc_async<&wait_at_gate>(rpc::To(1).without_deadline());
  testing::wait_for_call_at_gate();
  auto queued = cluster[2].rpc_async<&count>(rpc::To(1).without_deadline());
  cluster[1].rpc_sync<&add>(2, 1, 1);  // rank 2's answer arrives after the queued call
  cluster.kill(2);
  CHECK(error_of([&] { queued.wait(); }).kind == ErrorKind::kCancelled);
  while (error_of([&] { cluster[1].rpc_sync<&add>(2, 1, 1); }).kind != ErrorKind::kPeerLost) {
  }
  g_gate = true;
  busy.wait();
  CHECK(cluster[0].rpc_sync<&add>(1, 1, 1) == 2);  // runs after the queued call would have run
  CHECK(g_counted == 0);
}

TEST_CASE("nested calls may be deeper than the number of threads") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(2, expose_calls, options);
  CHECK(cluster[0].rpc_sync<&bounce>(1, 64) == 64);
  cluster.shutdown();
}

TEST_CASE("a rank reports what it waits for") {
  Cluster cluster(2, expose_calls);
  CHECK(cluster[0].waits().empty());
  g_gate = false;
  const auto waiting = cluster[0].rpc_async<&wait_at_gate>(rpc::To(1).without_deadline());
  const std::vector<rpc::Wait> waits = cluster[0].waits();
  REQUIRE(waits.size() == 1);
  CHECK(waits[0].what == "wait_at_gate, called on rank 1");
  CHECK(waits[0].since <= base::Clock::now());
  CHECK(cluster[1].waits().empty());
  g_gate = true;
  waiting.wait();
  CHECK(cluster[0].waits().empty());
}

TEST_CASE("a rank in shutdown() reports whom it waits for") {
  Cluster cluster(3, expose_calls);
  std::thread first([&] { cluster[0].shutdown(); });
  std::vector<rpc::Wait> waits;
  // The rank first counts itself among those whose end it waits for.
  while (waits.empty() || testing::contains(waits[0].what, "rank 0")) waits = cluster[0].waits();
  CHECK(waits[0].what == "the end of rank 1, 2");
  CHECK(cluster[1].waits().empty());
  std::thread second([&] { cluster[1].shutdown(); });
  do {
    waits = cluster[0].waits();
  } while (waits.at(0).what != "the end of rank 2");
  cluster[2].shutdown();
  first.join();
  second.join();
  CHECK(cluster[0].waits().empty());
}

TEST_CASE("many threads make many calls concurrently") {
  Cluster cluster(3, expose_calls);
  std::vector<std::thread> threads;
  std::atomic<int64_t> sum{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<base::Future<int64_t>> futures;
      for (int64_t i = 0; i < 100; ++i) {
        futures.push_back(cluster[t % 3].rpc_async<&add>((t + 1) % 3, i, t));
      }
      base::wait_all(futures);
      for (auto& future : futures) sum += future.wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(sum == 4 * 4950 + 100 * (0 + 1 + 2 + 3));
  cluster.shutdown();
  CHECK(cluster[0].traffic().calls >= 100);
}

TEST_CASE("a rank that dies fails the calls that wait for it") {
  Cluster cluster(3, expose_calls);
  g_gate = false;
  auto waiting = cluster[0].rpc_async<&wait_at_gate>(rpc::To(2).without_deadline());
  testing::wait_for_call_at_gate();
  std::thread killer([&] { cluster.kill(2); });  // returns once the call at the gate has returned
  const base::Error e = error_of([&] { waiting.wait(); });
  g_gate = true;
  killer.join();
  // The error names rank 2, which may die during the call or answer that it is shutting down.
  CHECK((e.kind == ErrorKind::kPeerLost || e.kind == ErrorKind::kCancelled));
  CHECK(e.rank == 2);
  CHECK(error_of([&] { cluster[0].rpc_sync<&add>(2, 1, 1); }).kind == ErrorKind::kPeerLost);
  CHECK(cluster[0].rpc_sync<&add>(1, 1, 1) == 2);
  CHECK(error_of([&] { cluster[1].shutdown(); }).rank == 2);
}

TEST_CASE("abort sends its reason to all ranks") {
  Cluster cluster(2, expose_calls);
  auto waiting = cluster[0].rpc_async<&nap>(rpc::To(1).without_deadline(), 100);
  cluster[1].abort(base::Error{ErrorKind::kNotFinite, "loss is NaN", -1, {}});
  const base::Error e = error_of([&] { cluster[0].shutdown(); });
  CHECK(e.kind == ErrorKind::kNotFinite);
  CHECK(e.rank == 1);
}

TEST_CASE("a shared object is created by the first thread that asks for it") {
  Cluster cluster(2, [](Agent& agent) { agent.expose<&draw_shared>("draw_shared"); });
  std::atomic<int64_t> sum = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] { sum += cluster[t % 2].rpc_sync<&draw_shared>(1, 100); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(sum == 8 * 100 + 36);  // all calls use one counter, which returns 101 to 108
  CHECK(cluster[1].local<Counter>().get() == 108);
  CHECK(cluster[1].rpc_sync<&draw_shared>(1, 0) == 109);  // later constructor arguments are ignored
  CHECK(cluster[0].rpc_sync<&draw_shared>(0, 7) == 8);
  cluster.shutdown();
}

TEST_CASE("objects live on their owner") {
  Cluster cluster(3, expose_calls);
  {
    rpc::RRef<Counter> counter = cluster[0].remote_new<Counter>(1, 5);
    CHECK(counter.rpc_sync<&Counter::increment>(2) == 7);
    CHECK(counter.rpc_async<&Counter::increment>(1).wait() == 8);
    CHECK(counter.remote<&Counter::get>().to_here() == 8);
    CHECK_FALSE(counter.is_owner());
    CHECK(error_of([&] { counter.local_value(); }).kind == ErrorKind::kInvalid);
    CHECK(error_of([&] { cluster[0].remote<&boom>(2, 0).to_here(); }).kind ==
          ErrorKind::kRemoteFailed);
    rpc::RRef<int64_t> sum = cluster[0].remote<&add>(2, 1, 2);
    CHECK(sum.to_here() == 3);
    rpc::RRef<at::Tensor> own = cluster[0].make_rref(at::ones({2}));
    CHECK(at::equal(own.to_here(), at::ones({2})));
    CHECK(cluster[0].live_rrefs() >= 3);
  }
  cluster.shutdown();
  for (int rank = 0; rank < 3; ++rank) CHECK(cluster[rank].live_rrefs() == 0);
}

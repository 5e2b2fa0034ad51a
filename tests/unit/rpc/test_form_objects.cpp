// Tests objects, continuations and functions that return futures, in all forms of calls.
#include <mutex>
#include <string>

#include "call_forms.h"
#include "gate.h"
#include "rref_support.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::testing::form_objects {
namespace {

using base::ErrorKind;
using base::Future;
using rpc::Agent;
using rpc::CallContext;
using rpc::RRef;

struct Number {
  using Constructor = Number(int64_t a);
  Number() = default;
  explicit Number(int64_t start) : a(start) {}
  int64_t get() const { return a; }
  void increment(int64_t by) { a += by; }
  int64_t plus(int64_t b) const { return a + b; }
  static bool is_large(int64_t x) { return x > 10; }
  void not_exposed() {}
  int64_t a = 0;
  static constexpr auto kFields = std::tuple(&Number::a);
};
Number make_number(int64_t a) { return Number(a); }
int64_t plus_of(const Number& number, int64_t b) { return number.plus(b); }
std::vector<RRef<Number>> make_numbers(CallContext& call, const std::vector<int64_t>& values) {
  std::vector<RRef<Number>> made;
  for (const int64_t value : values) made.push_back(call.agent.make_rref(Number(value)));
  return made;
}
void increment_ref(const RRef<Number>& ref, int64_t by) { ref.local_value().increment(by); }
int64_t get_ref(const RRef<Number>& ref) { return ref.local_value().get(); }

// Member functions of at::Tensor.
constexpr auto kTensorAdd =
    static_cast<at::Tensor (at::Tensor::*)(const at::Scalar&, const at::Scalar&) const>(
        &at::Tensor::add);
int64_t numel(const TensorRef& ref) { return ref.local_value().numel(); }
at::Tensor view_of(const TensorRef& ref, const std::vector<int64_t>& sizes) {
  return ref.local_value().view(sizes);
}

// Functions that return futures: x + y is computed on rank `to`, z is added here.
Future<at::Tensor> async_add(CallContext& call, int to, const at::Tensor& x, const at::Tensor& y) {
  return call.agent.rpc_async<kAdd>(to, x, y, 1);
}
Future<at::Tensor> chained(CallContext& call, int to, const at::Tensor& x, const at::Tensor& y,
                           const at::Tensor& z) {
  return call.agent.rpc_async<kAdd>(to, x, y, 1).then(call.agent.executor(), [z](at::Tensor& sum) {
    return sum + z;
  });
}
Future<at::Tensor> with_promise(CallContext& call, int to, const at::Tensor& x, const at::Tensor& y,
                                const at::Tensor& z) {
  const auto promise = std::make_shared<base::Promise<at::Tensor>>();
  call.agent.rpc_async<kAdd>(to, x, y, 1)
      .on_complete(call.agent.executor(),
                   [promise, z](base::Result<at::Tensor>& sum) { promise->set(sum.value() + z); });
  return promise->future();
}
Future<at::Tensor> nested(CallContext& call, int to, const at::Tensor& x, const at::Tensor& y,
                          const at::Tensor& z) {
  return call.agent.rpc_async<&async_add>(to, to, x, y)
      .then(call.agent.executor(), [z](at::Tensor& sum) { return sum + z; });
}
// The continuation makes a call, and returns its future.
Future<at::Tensor> two_calls(CallContext& call, int to, const at::Tensor& x, const at::Tensor& y,
                             const at::Tensor& z) {
  Agent& agent = call.agent;
  return agent.rpc_async<kAdd>(to, x, y, 1)
      .then(agent.executor(),
            [&agent, to, z](at::Tensor& sum) { return agent.rpc_async<kAdd>(to, sum, z, 1); });
}
// Waits in the function for a value that a continuation sets.
at::Tensor waits_for_continuation(CallContext& call, int to, const at::Tensor& x,
                                  const at::Tensor& y, const at::Tensor& z) {
  return with_promise(call, to, x, y, z).wait();
}
Future<at::Tensor> chained_often(CallContext& call, int to, const at::Tensor& x, int count,
                                 double step) {
  auto sum = call.agent.rpc_async<kAddScalar>(to, x, 0, 1);
  for (int i = 0; i < count; ++i) {
    sum = sum.then(call.agent.executor(), [step](at::Tensor& so_far) { return so_far + step; });
  }
  return sum;
}
Future<at::Tensor> fanned_out(CallContext& call, int to, const at::Tensor& x, int count,
                              double step) {
  struct State {
    std::mutex mutex;
    at::Tensor sum;
    int left;
    base::Promise<at::Tensor> done;
  };
  const auto state = std::make_shared<State>();
  state->sum = at::zeros_like(x);
  state->left = count;
  for (int i = 0; i < count; ++i) {
    call.agent.rpc_async<kAddScalar>(to, i == 0 ? x : at::zeros_like(x), step, 1)
        .on_complete(call.agent.executor(), [state](base::Result<at::Tensor>& part) {
          std::lock_guard lock(state->mutex);
          state->sum += part.value();
          if (--state->left == 0) state->done.set(state->sum);
        });
  }
  return state->done.future();
}
Future<int64_t> fails_at_once() { throw std::runtime_error("Expected error"); }
Future<int64_t> fails_later(CallContext& call) {
  return Future<void>::ready({}).then(
      call.agent.executor(), []() -> int64_t { throw std::runtime_error("Expected error"); });
}

struct Async {
  using Constructor = Async();
  static Future<at::Tensor> of_class(CallContext& call, int to, const at::Tensor& x,
                                     const at::Tensor& y, const at::Tensor& z) {
    return chained(call, to, x, y, z);
  }
  Future<at::Tensor> bound(CallContext& call, int to, const at::Tensor& x, const at::Tensor& y,
                           const at::Tensor& z) {
    return chained(call, to, x, y, z);
  }
};

// A server that averages one tensor of each trainer in each iteration.
struct Averager {
  explicit Averager(int count) : trainers(count) {}
  const int trainers;
  std::mutex mutex;
  int64_t iteration = -1;
  at::Tensor total, gradient;
  std::vector<base::Promise<at::Tensor>> waiting;

  Future<at::Tensor> average(int64_t of_iteration, const at::Tensor& tensor) {
    std::lock_guard lock(mutex);
    if (of_iteration > iteration) {
      iteration = of_iteration;
      total = at::Tensor();
      waiting.clear();
    }
    total = total.defined() ? total + tensor : tensor;
    waiting.emplace_back();
    const Future<at::Tensor> mine = waiting.back().future();
    if (static_cast<int>(waiting.size()) < trainers) return mine;
    gradient = total / trainers;
    for (auto& each : waiting) each.set(gradient);
    return mine;
  }
  at::Tensor get_gradient() {
    std::lock_guard lock(mutex);
    return gradient;
  }
};
void train(const RRef<Averager>& server, bool sparse) {
  at::Tensor weight = at::rand({10, 10}).set_requires_grad(true);
  for (int64_t i = 0; i < 10; ++i) {
    const at::Tensor offsets = at::arange(10, at::kLong) * 10;
    const at::Tensor rows = at::randint(10, {100}, at::kLong);
    const at::Tensor out =
        std::get<0>(at::embedding_bag(weight, rows, offsets, false, /*mean=*/1, sparse));
    weight.mutable_grad() = at::Tensor();
    at::mse_loss(out, at::rand({10, 10})).backward();
    expect(weight.grad().is_sparse() == sparse, "the layout of a gradient");
    const at::Tensor mean = server.rpc_async<&Averager::average>(i, weight.grad()).wait();
    const at::Tensor there = server.rpc_sync<&Averager::get_gradient>();
    expect(at::equal(mean.to_dense(), there.to_dense()), "the mean of an iteration");
  }
}

void expose(Agent& agent) {
  expose_forms(agent);
  agent.expose<&add>("add");
  agent.expose_class<Number>("Number");
  agent.expose<&Number::get>("Number.get");
  agent.expose<&Number::increment>("Number.increment");
  agent.expose<&Number::plus>("Number.plus");
  agent.expose<&Number::is_large>("Number.is_large");
  agent.expose<&make_number>("make_number");
  agent.expose<&plus_of>("plus_of");
  agent.expose<&make_numbers>("make_numbers");
  agent.expose<&increment_ref>("increment_ref");
  agent.expose<&get_ref>("get_ref");
  agent.expose<kTensorAdd>("Tensor.add");
  agent.expose<&numel>("numel");
  agent.expose<&view_of>("view_of");
  agent.expose<&async_add>("async_add");
  agent.expose<&chained>("chained");
  agent.expose<&with_promise>("with_promise");
  agent.expose<&nested>("nested");
  agent.expose<&two_calls>("two_calls");
  agent.expose<&waits_for_continuation>("waits_for_continuation");
  agent.expose<&chained_often>("chained_often");
  agent.expose<&fanned_out>("fanned_out");
  agent.expose<&fails_at_once>("fails_at_once");
  agent.expose<&fails_later>("fails_later");
  agent.expose_class<Async>("Async");
  agent.expose<&Async::of_class>("Async.of_class");
  agent.expose<&Async::bound>("Async.bound");
  agent.expose<&Averager::average>("Averager.average");
  agent.expose<&Averager::get_gradient>("Averager.get_gradient");
  agent.expose<&train>("train");
}

TEST_CASE("functions of a class are called in each form: on an object, a copy, or the class") {
  Cluster cluster(2, expose);
  Agent& agent = cluster[0];
  for (const int to : {0, 1}) {
    CHECK(agent.rpc_sync<&make_number>(to, 7).get() == 7);
    CHECK(agent.rpc_sync<&plus_of>(to, Number(2), 3) == 5);
    for (const Form form : kForms) {
      CAPTURE(to, static_cast<int>(form));
      const RRef<Number> ref = agent.remote_new<Number>(to, 7);
      CHECK(call_as<&Number::get>(form, ref) == 7);
      call_as<&Number::increment>(form, ref, 3);
      CHECK(call_as<&Number::get>(form, ref) == 10);
      CHECK(call_as<&Number::plus>(form, ref, 2) == 12);
      CHECK(call_as<&Number::is_large>(form, agent, ref.owner(), 11));
      CHECK_FALSE(call_as<&Number::is_large>(form, agent, ref.owner(), 10));
      // A function without an object takes the reference as an argument.
      call_as<&increment_ref>(form, agent, ref.owner(), ref, 5);
      CHECK(call_as<&get_ref>(form, agent, ref.owner(), ref) == 15);
      CHECK(ref.to_here().get() == 15);
      const base::Error error = error_of([&] { call_as<&Number::not_exposed>(form, ref); });
      CHECK(error.kind == ErrorKind::kNotFound);
    }
  }
  cluster.shutdown();
}

TEST_CASE("a rank may return references to its own objects") {
  Cluster cluster(2, expose);
  std::vector<int64_t> values;
  for (const auto& ref : cluster[0].rpc_sync<&make_numbers>(1, std::vector<int64_t>{1, 2, 3})) {
    CHECK(ref.owner() == 1);
    cluster[0].rpc_sync<&increment_ref>(ref.owner(), ref, 10);
    values.push_back(cluster[0].rpc_sync<&get_ref>(ref.owner(), ref));
  }
  CHECK(values == std::vector<int64_t>{11, 12, 13});
  cluster.shutdown();
}

TEST_CASE("functions of tensors are called on their owner, several times in each form") {
  Cluster cluster(2, expose);
  for (const int to : {0, 1}) {
    const at::Tensor x = at::ones({2, 2}) + 4;
    const TensorRef ref =
        cluster[0].remote<&add_three>(to, at::ones({2, 2}), at::tensor(1.F), at::tensor(3.F));
    for (const Form form : kForms) {
      for (const int by : {1, 3, 5}) {
        CHECK(at::equal(call_as<kTensorAdd>(form, ref, by, 1), x + by));
        CHECK(call_as<&numel>(form, cluster[0], to, ref) == 4);
        for (const auto& sizes : {std::vector<int64_t>{1, 4}, {4, 1}, {-1}}) {
          CHECK(at::equal(call_as<&view_of>(form, cluster[0], to, ref, sizes), x.view(sizes)));
        }
      }
    }
  }
  cluster.shutdown();
}

TEST_CASE("owners are compared by rank") {
  Cluster cluster(2, expose);
  {
    const RRef<int64_t> a = cluster[0].make_rref(int64_t{40}),
                        b = cluster[0].make_rref(int64_t{50});
    const TensorRef c = cluster[0].remote<kAddScalar>(1, at::ones({1}), 1, 1);
    const TensorRef d = cluster[0].remote<kAddScalar>(1, at::ones({1}), 1, 1);
    CHECK(a.owner() == b.owner());
    CHECK(a.owner() == cluster[0].rank());
    CHECK(a.owner() == cluster[0].worker("w0").rank);
    CHECK(c.owner() == d.owner());
    CHECK(a.owner() != c.owner());
    CHECK(a.local_value() == 40);
    CHECK(a.to_here() == 40);
    const base::Error error = error_of([&] { c.local_value(); });
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK_THAT(error.message, ContainsSubstring(c.handle()->text()));
    CHECK(a.handle()->text() == "RRef " + std::to_string(a.handle()->id()) + " on rank 0");
    CHECK_THAT(c.handle()->text(), ContainsSubstring("on rank 1"));
    // The type of a value is known from its reference, also before the value exists.
    static_assert(std::is_same_v<decltype(cluster[0].remote_new<Number>(1, 7)), RRef<Number>>);
    static_assert(std::is_same_v<decltype(cluster[0].remote<&make_number>(1, 7)), RRef<Number>>);
    static_assert(std::is_same_v<decltype(b), const RRef<int64_t>>);
    const RRef here = cluster[0].make_rref(at::ones({2}) + 1);
    static_assert(std::is_same_v<decltype(here), const RRef<at::Tensor>>);
    static_assert(std::is_same_v<decltype(cluster[0].make_rref(Number(0))), RRef<Number>>);
    // A reference that claims another type, as a peer may send it, is refused where it is used.
    const base::Error other = error_of([&] { RRef<Number>(here.handle()).local_value(); });
    CHECK(other.kind == ErrorKind::kInvalid);
  }
  cluster.shutdown();
}

TEST_CASE("a future calls its continuations once each, and stays readable") {
  Cluster cluster(2, expose);
  base::Executor& executor = cluster[0].executor();
  const at::Tensor x = at::ones({3, 3});
  const auto sum = cluster[0].rpc_async<kAdd>(1, x, x, 1);
  std::atomic<int> told{0};
  sum.on_complete(executor, [&](base::Result<at::Tensor>& result) { told += result.ok(); });
  std::vector<Future<at::Tensor>> next;
  for (int i = 0; i < 10; ++i) {
    next.push_back(sum.then(executor, [i](at::Tensor& value) { return value + i; }));
  }
  CHECK(at::equal(sum.wait(), x * 2));
  CHECK(sum.done());
  for (int i = 0; i < 10; ++i) CHECK(at::equal(next[static_cast<size_t>(i)].wait(), x * 2 + i));
  // A continuation may make a call of its own, and wait for a continuation of that one.
  const auto nested =
      cluster[0].rpc_async<kAddScalar>(1, x, 1, 1).then(executor, [&](at::Tensor& value) {
        const auto inner = cluster[0].rpc_async<kAddScalar>(1, value, 1, 1);
        return inner.then(executor, [](at::Tensor& so_far) { return so_far + 1; }).wait();
      });
  CHECK(at::equal(nested.wait(), x + 3));
  auto chain = cluster[0].rpc_async<kAddScalar>(1, x, 1, 1);
  for (int i = 0; i < 20; ++i) {
    chain = chain.then(executor, [](at::Tensor& value) { return value + 1; });
  }
  CHECK(at::equal(chain.wait(), x + 21));
  CHECK(at::equal(sum.wait(), x * 2));
  CHECK(eventually([&] { return told == 1; }));

  const auto failed = cluster[0].rpc_async<&fails_later>(1);
  CHECK(error_of([&] { failed.wait(); }).message == "Expected error");
  CHECK(failed.done());
  // then() passes an error on; on_complete() gets it, and a continuation may fail with another.
  std::atomic<bool> called{false};
  const auto skipped = failed.then(executor, [&](int64_t) { return called = true; });
  CHECK(error_of([&] { skipped.wait(); }).message == "Expected error");
  CHECK_FALSE(called);
  base::Promise<int> other_error;
  failed.on_complete(executor, [&](base::Result<int64_t>& result) {
    other_error.fail({ErrorKind::kBadData, "another for: " + result.error().message, -1, {}});
  });
  CHECK(error_of([&] { other_error.future().wait(); }).message == "another for: Expected error");
  const auto another = sum.then(
      executor, [](at::Tensor&) -> int { throw base::Exception(ErrorKind::kBadData, "another"); });
  CHECK(error_of([&] { another.wait(); }).message == "another");
  cluster.shutdown();
}

TEST_CASE("then() follows calls through an RRef, its value and its creation") {
  Cluster cluster(2, expose);
  base::Executor& executor = cluster[0].executor();
  for (const int owner : {0, 1}) {
    const RRef<Number> ref = cluster[0].remote_new<Number>(owner, 7);
    const auto twice = [](int64_t x) { return 2 * x; };
    CHECK(ref.rpc_async<&Number::get>().then(executor, twice).wait() == 14);
    CHECK(ref.to_here_async().then(executor, [](Number& here) { return here.a + 1; }).wait() == 8);
    const auto later = ref.created()
                           .then(executor, [ref] { return ref.rpc_async<&Number::plus>(1); })
                           .then(executor, twice);
    CHECK(later.wait() == 16);
    CHECK(ref.remote<&Number::get>().to_here_async().then(executor, twice).wait() == 14);
  }
  cluster.shutdown();
}

TEST_CASE("a function that returns a future is answered by its value, in each form") {
  Cluster cluster(3, expose);
  const at::Tensor x = at::ones({2, 2}), y = x + 1;
  cluster.on_all([&](Agent& agent) {
    const int to = (agent.rank() + 1) % 3, other = (agent.rank() + 2) % 3;
    const RRef<Async> object = agent.remote_new<Async>(to);
    for (const Form form : kForms) {
      const auto is_sum = [](const at::Tensor& sum) {
        expect(at::equal(sum, at::full({2, 2}, 4.F)), "a wrong sum");
      };
      expect(at::equal(call_as<&async_add>(form, agent, to, other, x, x), x * 2), "async_add");
      is_sum(call_as<&chained>(form, agent, to, other, x, x, y));
      is_sum(call_as<&with_promise>(form, agent, to, other, x, x, y));
      is_sum(call_as<&nested>(form, agent, to, other, x, x, y));
      is_sum(call_as<&two_calls>(form, agent, to, other, x, x, y));
      is_sum(call_as<&waits_for_continuation>(form, agent, to, other, x, x, y));
      is_sum(call_as<&Async::of_class>(form, agent, to, other, x, x, y));
      is_sum(call_as<&Async::bound>(form, object, other, x, x, y));
      expect(at::equal(call_as<&chained_often>(form, agent, to, other, x, 20, 3.0), x + 60),
             "a chain");
      expect(at::equal(call_as<&fanned_out>(form, agent, to, other, x, 20, 3.0), x + 60),
             "many calls at once");
    }
  });
  cluster.shutdown();
}

TEST_CASE("a function that returns a future may throw, or its future may fail, in each form") {
  Cluster cluster(2, expose);
  for (const int to : {0, 1}) {
    for (const Form form : kForms) {
      base::Error error = error_of([&] { call_as<&fails_at_once>(form, cluster[0], to); });
      CHECK((error.kind == ErrorKind::kRemoteFailed && error.message == "Expected error"));
      error = error_of([&] { call_as<&fails_later>(form, cluster[0], to); });
      CHECK((error.kind == ErrorKind::kRemoteFailed && error.message == "Expected error"));
      CHECK(error.rank == to);
    }
  }
  cluster.shutdown();
}

TEST_CASE("a server averages the gradients of the other ranks, dense or sparse") {
  Cluster cluster(3, expose);
  for (const bool sparse : {false, true}) {
    const RRef<Averager> server = cluster[0].make_rref(std::make_shared<Averager>(2));
    std::vector<Future<void>> trainers;
    for (const int rank : {1, 2}) {
      trainers.push_back(cluster[0].rpc_async<&train>(rank, server, sparse));
    }
    base::wait_all(trainers);
  }
  cluster.shutdown();
}

}  // namespace
}  // namespace distrain::testing::form_objects

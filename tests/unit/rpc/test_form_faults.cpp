// Tests errors, deadlines and ends of ranks, in all forms of calls.
#include <chrono>
#include <string>
#include <thread>

#include "call_forms.h"
#include "gate.h"
#include "rref_support.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::testing::form_faults {
namespace {

using namespace std::chrono_literals;
using base::ErrorKind;
using base::Future;
using rpc::Agent;
using rpc::RRef;
using rpc::To;

constexpr const char* kLines = "\nFirst line of error \n next line of error \n last line of error";
constexpr const char* kSpecial = "quotes \" ' and \\n, \ttabs, \xc3\xa4";

int64_t raise() { throw std::runtime_error("Expected error"); }
int64_t raise_text(const std::string& text) { throw std::runtime_error(text); }
at::Tensor raise_or_add(const at::Tensor& x) {
  if (x.numel() == 2) throw base::Exception(ErrorKind::kBadData, "Expected error");
  return x + 1;
}
int64_t only_on_rank_0() { return 0; }
at::Tensor slow_sum(const at::Tensor& x, const at::Tensor& y) {
  wait_at_gate();
  return x + y;
}
int64_t slow_seven() {
  wait_at_gate();
  return 7;
}
struct Slow {
  using Constructor = Slow(bool waits);
  explicit Slow(bool waits) {
    if (waits) wait_at_gate();
  }
  int64_t quick() { return 1; }
  int64_t slow() { return slow_seven(); }
};
int64_t value_plus(const RRef<int64_t>& ref, int64_t x) { return ref.to_here() + x; }

void expose(Agent& agent) {
  expose_forms(agent);
  agent.expose<&add>("add");
  agent.expose<&raise>("raise");
  agent.expose<&raise_text>("raise_text");
  agent.expose<&raise_or_add>("raise_or_add");
  if (agent.rank() == 0) agent.expose<&only_on_rank_0>("only_on_rank_0");
  agent.expose<&wait_at_gate>("wait_at_gate");
  agent.expose<&slow_sum>("slow_sum");
  agent.expose<&slow_seven>("slow_seven");
  agent.expose_class<Slow>("Slow");
  agent.expose<&Slow::quick>("Slow.quick");
  agent.expose<&Slow::slow>("Slow.slow");
  agent.expose<&value_plus>("value_plus");
}

template <class F>
ErrorKind kind_of(F fn) {
  return error_of(fn).kind;
}

// Closes the gate of wait_at_gate(), and opens it again at the latest when the test fails.
struct ClosedGate {
  ClosedGate() { g_gate = false; }
  ~ClosedGate() { open(); }
  static void open() { g_gate = true; }
};

TEST_CASE("an error of a function is thrown in each form, from each rank, as often as one asks") {
  Cluster cluster(2, expose);
  Agent& agent = cluster[0];
  for (const int to : {0, 1}) {
    for (const Form form : kForms) {
      CAPTURE(to, static_cast<int>(form));
      base::Error error = error_of([&] { call_as<&raise>(form, agent, to); });
      CHECK((error.kind == ErrorKind::kRemoteFailed && error.rank == to && error.op == "raise"));
      for (const char* text : {kLines, kSpecial}) {
        CHECK(error_of([&] { call_as<&raise_text>(form, agent, to, std::string(text)); }).message ==
              text);
      }
      CHECK(call_as<&raise_or_add>(form, agent, to, at::ones({3})).numel() == 3);
      error = error_of([&] { call_as<&raise_or_add>(form, agent, to, at::ones({2})); });
      CHECK((error.kind == ErrorKind::kBadData && error.message == "Expected error"));
      // Of an operator.
      error = error_of([&] { call_as<kAdd>(form, agent, to, at::ones({10}), at::ones({5}), 1); });
      CHECK(error.kind == ErrorKind::kRemoteFailed);
      CHECK_THAT(error.message, ContainsSubstring("size of tensor"));
      error = error_of([&] { call_as<&only_on_rank_0>(form, agent, to); });
      CHECK((to == 0 || error.kind == ErrorKind::kNotFound));
    }
    // A caller that has exposed another function under this name sends wrong arguments.
    const auto send = [&](const char* function, int count) {
      return kind_of([&] {
        agent
            .call_raw(to, function,
                      [&](rpc::Encoder& encoder) {
                        for (int i = 0; i < count; ++i) encoder.out.put(uint32_t{10});
                      })
            .wait();
      });
    };
    CHECK(send("raise", 1) == ErrorKind::kProtocol);
    CHECK(send("aten::add", 0) == ErrorKind::kProtocol);
    CHECK(send("raise", 0) == ErrorKind::kRemoteFailed);
    const RRef<int64_t> ref = agent.remote<&raise>(to);
    CHECK(error_of([&] { ref.created().wait(); }).message == "Expected error");
    CHECK(error_of([&] { ref.to_here(); }).message == "Expected error");
    CHECK(error_of([&] { ref.to_here_async().wait(); }).message == "Expected error");
    CHECK(error_of([&] { agent.rpc_sync<&value_plus>(1 - to, ref, 1); }).message ==
          "Expected error");
  }
  cluster.shutdown();
}

TEST_CASE("wait_all throws the first error, and each future can still be asked") {
  Cluster cluster(2, expose);
  Agent& agent = cluster[0];
  const auto many = [&](int count) {
    std::vector<Future<int64_t>> calls;
    for (int64_t i = 0; i < count; ++i) calls.push_back(agent.rpc_async<&add>(1, i, 1));
    return calls;
  };
  const auto sums = many(20);
  base::wait_all(sums);
  for (int64_t i = 0; i < 20; ++i) {
    CHECK(sums[static_cast<size_t>(i)].done());
    CHECK(sums[static_cast<size_t>(i)].wait() == i + 1);
  }
  std::vector<Future<int64_t>> failing;
  for (int i = 0; i < 20; ++i) failing.push_back(agent.rpc_async<&raise>(1));
  CHECK(error_of([&] { base::wait_all(failing); }).message == "Expected error");
  for (const auto& call : failing) {
    for (int twice = 0; twice < 2; ++twice) {
      CHECK(error_of([&] { call.wait(); }).message == "Expected error");
    }
    CHECK(call.done());
  }
  auto partly = many(10);
  partly.push_back(agent.rpc_async<&raise>(1));
  CHECK(error_of([&] { base::wait_all(partly); }).message == "Expected error");

  {  // A call that does not end does not delay the error of another one.
    const ClosedGate gate;
    const std::vector<Future<int64_t>> stuck = {
        agent.rpc_async<&slow_seven>(To(1).without_deadline()), agent.rpc_async<&raise>(1),
        agent.rpc_async<&raise>(1)};
    CHECK(error_of([&] { base::wait_all(stuck); }).message == "Expected error");
    const at::Tensor x = at::ones({10});
    const std::vector<Future<at::Tensor>> operators = {
        agent.rpc_async<&slow_sum>(To(1).without_deadline(), x, x),
        agent.rpc_async<kAdd>(1, x, at::ones({5}), 1), agent.rpc_async<kAdd>(1, x, x, 1)};
    CHECK_THAT(error_of([&] { base::wait_all(operators); }).message,
               ContainsSubstring("size of tensor"));
    const std::vector<Future<int64_t>> late = {agent.rpc_async<&slow_seven>(To(1).timeout(20ms)),
                                               agent.rpc_async<&add>(1, 1, 1)};
    CHECK(kind_of([&] { base::wait_all(late); }) == ErrorKind::kDeadline);
  }
  // An exception before wait_all() leaves the calls to themselves.
  CHECK(kind_of([&] {
          const auto calls = many(3);
          throw base::Exception(ErrorKind::kBadData, "in the body");
        }) == ErrorKind::kBadData);
  cluster.shutdown();
}

TEST_CASE("a call's timeout, else the agent's, limits each form of a call") {
  rpc::AgentOptions options;
  options.rpc_timeout = 100s;
  Cluster cluster(2, expose, options);
  Agent& agent = cluster[0];
  CHECK(agent.rpc_timeout() == 100s);
  const at::Tensor x = at::ones({2});
  const auto slow = [&](Form form, const To& to) {
    return kind_of([&] {
      if (form == Form::kSync) agent.rpc_sync<&slow_sum>(to, x, x);
      if (form == Form::kAsync) agent.rpc_async<&slow_sum>(to, x, x).wait();
      if (form == Form::kRemote) agent.remote<&slow_sum>(to, x, x).created().wait();
    });
  };
  {
    const ClosedGate gate;
    for (const int to : {0, 1}) {
      for (const Form form : kForms)
        CHECK(slow(form, To(to).timeout(10ms)) == ErrorKind::kDeadline);
    }
  }
  for (const int to : {0, 1}) {
    for (const Form form : kForms) {
      CHECK(at::equal(call_as<&slow_sum>(form, agent, to, x, x), x * 2));
    }
  }
  // A new default is for new calls.
  const ClosedGate gate;
  agent.set_rpc_timeout(1ms);
  CHECK(agent.rpc_timeout() == 1ms);
  std::vector<Future<at::Tensor>> late;
  for (int i = 0; i < 10; ++i) late.push_back(agent.rpc_async<&slow_sum>(1, x, x));
  for (const auto& call : late) CHECK(kind_of([&] { call.wait(); }) == ErrorKind::kDeadline);
  for (const Form form : kForms) CHECK(slow(form, 1) == ErrorKind::kDeadline);
  agent.set_rpc_timeout(200s);
  const auto patient = agent.rpc_async<&slow_sum>(1, x, x);
  agent.set_rpc_timeout(1ms);
  CHECK(slow(Form::kAsync, 1) == ErrorKind::kDeadline);
  const auto own_limit = agent.rpc_async<&slow_sum>(To(1).timeout(200s), x, x);
  const auto unlimited = agent.rpc_async<&slow_sum>(To(1).without_deadline(), x, x);
  agent.set_rpc_timeout(std::chrono::nanoseconds::max());
  const auto by_default = agent.rpc_async<&slow_sum>(1, x, x);
  gate.open();
  for (const auto& call : {patient, own_limit, unlimited, by_default}) {
    CHECK(at::equal(call.wait(), x * 2));
  }
  cluster.shutdown();
}

TEST_CASE("calls that are delayed in the network end at their deadlines") {
  rpc::AgentOptions options;
  options.call_delay = 200ms;
  Cluster cluster(2, expose, options);
  Agent& agent = cluster[0];
  const at::Tensor x = at::ones({2});
  for (const Form form : kForms) {
    CHECK(kind_of([&] {
            if (form != Form::kRemote) call_as<kAdd>(form, agent, To(1).timeout(10ms), x, x, 1);
            if (form == Form::kRemote)
              agent.remote<kAdd>(To(1).timeout(10ms), x, x, 1).created().wait();
          }) == ErrorKind::kDeadline);
  }
  {
    const TensorRef value = agent.remote<kAdd>(1, x, x, 1);
    CHECK(kind_of([&] { value.timeout(10ms).to_here(); }) == ErrorKind::kDeadline);
    CHECK(at::equal(value.to_here(), x * 2));
  }
  agent.set_rpc_timeout(1ms);
  CHECK(kind_of([&] { agent.rpc_async<kAdd>(1, x, x, 1).wait(); }) == ErrorKind::kDeadline);
  const auto patient = agent.rpc_async<kAdd>(To(1).without_deadline(), x, x, 1);
  agent.set_rpc_timeout(60s);
  CHECK(at::equal(agent.rpc_async<kAdd>(1, x, x, 1).wait(), x * 2));
  CHECK(at::equal(patient.wait(), x * 2));
  cluster.shutdown();
}

TEST_CASE("remote() that does not begin in time fails wherever its RRef is used") {
  constexpr uint16_t kChannel = 40;
  std::atomic<int> arrived{0};
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(2, expose, options);
  Agent& agent = cluster[0];
  for (const int rank : {0, 1}) {
    cluster[rank].open_channel(kChannel).set_handler({.on_message = [&](auto) { ++arrived; }});
  }
  for (const int to : {0, 1}) {
    CAPTURE(to);
    {
      const ClosedGate gate;
      const auto busy = agent.rpc_async<&wait_at_gate>(To(to).without_deadline());
      wait_for_call_at_gate();
      const RRef<int64_t> function = agent.remote<&slow_seven>(To(to).timeout(5ms));
      const TensorRef sum =
          agent.remote<kAdd>(To(to).timeout(5ms), at::ones({1}), at::ones({1}), 1);
      CHECK(kind_of([&] { function.created().wait(); }) == ErrorKind::kDeadline);
      CHECK(kind_of([&] { sum.created().wait(); }) == ErrorKind::kDeadline);
      CHECK(kind_of([&] { function.to_here(); }) == ErrorKind::kDeadline);
      CHECK(kind_of([&] { sum.to_here(); }) == ErrorKind::kDeadline);
      // When this message has come, the calls before it have, too. Then their deadline passes on
      // `to`, which may have received them late.
      agent.open_channel(kChannel).send(to, {}, {}, nullptr);
      CHECK(eventually([&] { return arrived > to; }));
      std::this_thread::sleep_for(10ms);
      gate.open();
      for (const int user : {0, 1}) {
        CHECK(kind_of([&] { agent.rpc_async<&value_plus>(user, function, 1).wait(); }) ==
              ErrorKind::kDeadline);
        CHECK(kind_of([&] { agent.rpc_sync<&add_to_ref>(user, sum, at::ones({1})); }) ==
              ErrorKind::kDeadline);
      }
    }
    check_all_gone(cluster);
  }
  cluster.shutdown();
}

TEST_CASE("remote() that ends too late fails for its caller") {
  Cluster cluster(2, expose);
  Agent& agent = cluster[0];
  for (const int to : {0, 1}) {
    CAPTURE(to);
    const ClosedGate gate;
    const at::Tensor x = at::ones({1});
    const RRef<int64_t> late = agent.remote<&slow_seven>(To(to).timeout(10ms));
    const TensorRef sum = agent.remote<&slow_sum>(To(to).timeout(10ms), x, x);
    CHECK(kind_of([&] { late.created().wait(); }) == ErrorKind::kDeadline);
    CHECK(kind_of([&] { late.to_here(); }) == ErrorKind::kDeadline);
    CHECK(kind_of([&] { sum.created().wait(); }) == ErrorKind::kDeadline);
    CHECK(kind_of([&] { sum.to_here(); }) == ErrorKind::kDeadline);
    // to_here() has a timeout of its own, which does not fail the value, also on its owner.
    const RRef<int64_t> slow = agent.remote<&slow_seven>(To(to).timeout(200s));
    CHECK(kind_of([&] { slow.timeout(5ms).to_here(); }) == ErrorKind::kDeadline);
    if (to == 1) {
      CHECK(kind_of([&] { slow.timeout(5ms).to_here_async().wait(); }) == ErrorKind::kDeadline);
      CHECK(kind_of([&] { slow.timeout(5ms).created().wait(); }) == ErrorKind::kDeadline);
    }
    gate.open();
    CHECK(slow.to_here() == 7);
    slow.created().wait();
    CHECK(kind_of([&] { late.to_here(); }) == ErrorKind::kDeadline);
    CHECK(kind_of([&] { sum.to_here(); }) == ErrorKind::kDeadline);
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("calls through an RRef have its timeout, also while its object is being made") {
  Cluster cluster(2, expose);
  const auto too_late = [](Form form, const RRef<Slow>& ref) {
    return kind_of([&] {
      const RRef<Slow> limited = ref.timeout(10ms);
      if (form == Form::kSync) limited.rpc_sync<&Slow::slow>();
      if (form == Form::kAsync) limited.rpc_async<&Slow::slow>().wait();
      if (form == Form::kRemote) limited.remote<&Slow::slow>().created().wait();
    });
  };
  for (const int to : {0, 1}) {
    const ClosedGate gate;
    const RRef<Slow> object = cluster[0].remote_new<Slow>(to, false);
    const RRef<Slow> unmade = cluster[0].remote_new<Slow>(To(to).without_deadline(), true);
    object.created().wait();
    for (const Form form : kForms) {
      CHECK(too_late(form, object) == ErrorKind::kDeadline);
      CHECK(too_late(form, unmade) == ErrorKind::kDeadline);
    }
    gate.open();
    unmade.created().wait();
    CHECK(unmade.rpc_sync<&Slow::quick>() == 1);
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("info() counts an agent's calls, references and threads") {
  rpc::AgentOptions options;
  options.worker_threads = 27;
  Cluster cluster(2, expose_tracked, options);
  const auto shared = [&](int rank) { return cluster[rank].info().at("rrefs.shared"); };
  const auto is_quiet = [&](int rank) {
    const auto info = cluster[rank].info();
    return info.at("rrefs.pending") == 0 && info.at("calls.waiting") == 0;
  };
  CHECK(cluster[0].info().at("threads") == 27);
  CHECK(cluster[0].info().at("contexts") == 0);
  std::string names;
  for (const auto& [name, number] : cluster[0].info()) names += name + " ";
  CHECK(names ==
        "bytes.in bytes.out calls.made calls.waiting contexts passes rrefs.owned rrefs.pending "
        "rrefs.shared rrefs.used threads ");
  {
    // A reference to a value of its own rank is not shared until another rank gets it.
    const Ref own = cluster[0].make_rref(Tracked(1));
    CHECK((shared(0) == 0 && is_quiet(0) && cluster[0].info().at("rrefs.owned") == 1));
    cluster[0].rpc_sync<&shelve>(1, own);
    CHECK(shared(0) == 1);
    CHECK(eventually([&] { return is_quiet(0); }));
    CHECK(cluster[1].info().at("rrefs.used") == 1);
    cluster[1].local<Shelf>().refs.clear();
    CHECK(eventually([&] { return shared(0) == 0; }));
    const Ref second = cluster[0].remote_new<Tracked>(1, 2),
              third = cluster[0].remote_new<Tracked>(1, 3);
    CHECK((value_of(second) == 2 && value_of(third) == 3));
    CHECK(shared(1) == 2);
    CHECK(eventually([&] { return is_quiet(0) && is_quiet(1); }));
    const auto info = cluster[0].info();
    CHECK(info.at("calls.made") == 5);
    CHECK((info.at("bytes.in") > 0 && info.at("bytes.out") > 0));
  }
  check_all_gone_and_shutdown(cluster);
}

template <class T, class F>
constexpr bool continues = requires(Future<T> future, base::Executor& executor, F fn) {
  future.then(executor, fn);
};

struct OtherOptions {
  std::string master_addr;
};
TEST_CASE("options and arguments of a wrong type do not compile") {
  static_assert(!std::is_constructible_v<Agent, std::string>);
  static_assert(!std::is_constructible_v<Agent, std::map<std::string, std::string>>);
  static_assert(!std::is_constructible_v<Agent, OtherOptions>);  // of no agent that exists
  static_assert(!std::is_assignable_v<decltype((rpc::AgentOptions().rpc_timeout)), double>);
  static_assert(!std::is_constructible_v<rpc::AgentOptions, int>);
  static_assert(!rpc::Serializable<Future<int64_t>> && !rpc::Serializable<Future<at::Tensor>>);
  static_assert(!std::is_constructible_v<RRef<int64_t>, int64_t>);  // only an agent makes an RRef
  static_assert(!std::is_constructible_v<RRef<at::Tensor>, at::Tensor>);
  static_assert(!continues<at::Tensor, decltype(&add_three)>);
  static_assert(!continues<int64_t, int64_t (*)(const std::string&)>);
  static_assert(!continues<int64_t, std::nullptr_t> && continues<int64_t, bool (*)(int64_t)>);
  static_assert(!rpc::Serializable<int64_t*> && rpc::Serializable<RRef<Slow>>);
  SUCCEED();
}

TEST_CASE("no rank can be called before join() or after the end, nor can its RRefs be used") {
  rpc::AgentOptions options;
  options.names = {"w0", "w1"};
  {
    Agent agent(options);
    expose(agent);
    CHECK(kind_of([&] { agent.rpc_sync<&add>(1, 1, 1); }) == ErrorKind::kNotFound);
    CHECK(kind_of([&] { agent.rpc_sync<&add>("w0", 1, 1); }) == ErrorKind::kNotFound);
    CHECK(kind_of([&] { agent.remote<&add>(0, 1, 1); }) == ErrorKind::kNotFound);
  }
  Cluster cluster(2, expose);
  const RRef<int64_t> ref = cluster[0].remote<&add>(1, 1, 2);
  CHECK(ref.to_here() == 3);
  cluster.shutdown();  // with a reference that is still held
  CHECK(cluster[0].rpc_timeout() == 60s);
  for (const int to : {0, 1}) {
    for (const Form form : kForms) {
      CHECK(kind_of([&] { call_as<&add>(form, cluster[0], to, 1, 1); }) == ErrorKind::kCancelled);
      CHECK(kind_of([&] { call_as<&value_plus>(form, cluster[0], to, ref, 1); }) ==
            ErrorKind::kCancelled);
    }
  }
  CHECK(kind_of([&] { ref.to_here(); }) == ErrorKind::kCancelled);
  CHECK(kind_of([&] { ref.created().wait(); }) == ErrorKind::kCancelled);
}

TEST_CASE("a rank may leave at once, with and without calls before, and start anew") {
  const base::Error reason{ErrorKind::kCancelled, "not needed any more", -1, {}};
  for (const bool calls : {false, true}) {
    Cluster cluster(2, expose);
    cluster.on_all([&](Agent& agent) {
      if (calls) expect(agent.rpc_sync<&add>(1 - agent.rank(), 1, 2) == 3, "a call");
    });
    cluster.on_all([&](Agent& agent) { agent.abort(reason); });
  }
  for (int again = 0; again < 2; ++again) {
    Cluster cluster(2, expose);
    const at::Tensor x = at::ones({2, 2});
    CHECK(at::equal(cluster[0].rpc_sync<kAdd>(1, x, x, 1), x * 2));
    cluster.shutdown();
  }
}

TEST_CASE("shutdown() ends at its timeout and names the ranks that are missing") {
  Cluster cluster(3, expose);
  base::Error of_first;
  std::thread first([&] { of_first = error_of([&] { cluster[1].shutdown(); }); });
  const base::Error error = error_of([&] { cluster[0].shutdown({}, {}, 50ms); });
  CHECK(error.kind == ErrorKind::kDeadline);
  CHECK_THAT(error.message, ContainsSubstring("2"));
  CHECK(kind_of([&] { cluster[2].shutdown(); }) == ErrorKind::kDeadline);
  first.join();
  CHECK(of_first.kind == ErrorKind::kDeadline);
}

}  // namespace
}  // namespace distrain::testing::form_faults

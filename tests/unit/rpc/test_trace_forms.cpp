// Tests the names in a trace: of calls in each form, and of the operators that they run.
#include <map>
#include <set>
#include <string>
#include <thread>

#include <ATen/record_function.h>

#include "call_forms.h"
#include "distrain/rpc/trace.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::testing::trace_forms {
namespace {

using base::RankTrace;
using base::TraceEvent;
using rpc::Agent;
using Kind = TraceEvent::Kind;

void run_operators(bool in_scope) {
  std::optional<at::RecordFunction> scope;
  if (in_scope) {
    scope.emplace(at::RecordScope::USER_SCOPE);
    scope->before("##forward##");
  }
  at::Tensor t = at::ones({1}) + at::ones({1});
  t = (t * t).relu().sigmoid();
}
const std::set<std::string> kOperators = {"aten::ones", "aten::add",     "aten::mul",
                                          "aten::relu", "aten::sigmoid", "aten::clamp_min"};
at::Tensor product(const at::Tensor& x, const at::Tensor& y) { return x * y; }
base::Future<at::Tensor> product_elsewhere(rpc::CallContext& call, int to, const at::Tensor& x) {
  return call.agent.rpc_async<&product>(to, x, x);
}

constexpr const char* kNames[] = {"rpc_sync", "rpc_async", "rpc_remote"};
std::string call_name(Form form, const std::string& function, int from, int to) {
  return std::string(kNames[static_cast<int>(form)]) + "#" + function + "(w" +
         std::to_string(from) + " -> w" + std::to_string(to) + ")";
}

struct TracedCluster : Cluster {
  explicit TracedCluster(int size, int threads = 4)
      : Cluster(
            size,
            [](Agent& agent) {
              expose_forms(agent);
              agent.expose<&run_operators>("run_operators");
              agent.expose<&product>("product");
              agent.expose<&product_elsewhere>("product_elsewhere");
            },
            {},
            [threads](rpc::AgentOptions& options) {
              options.worker_threads = threads;
              options.tracer = std::make_shared<base::Tracer>();
              options.tracer->start();
            }),
        collector((*this)[0]) {}

  /// Shuts all ranks down and returns their events, with the ranks that recorded them.
  std::vector<std::pair<int, TraceEvent>> events() {
    on_all([&](Agent& agent) {
      if (agent.rank() != 0) return agent.shutdown();
      agent.shutdown({}, [&] { ranks = collector.collect(); });
    });
    std::vector<std::pair<int, TraceEvent>> all;
    for (const RankTrace& rank : ranks) {
      for (const base::TraceTrack& track : rank.tracks) {
        for (const TraceEvent& event : track.events) all.emplace_back(rank.rank, event);
      }
    }
    return all;
  }

  rpc::TraceCollector collector;
  std::vector<RankTrace> ranks;
};

bool contains(const TraceEvent& outer, const TraceEvent& inner) {
  return outer.start <= inner.start && inner.end <= outer.end;
}

TEST_CASE("a trace names the form, function and ranks of each call, and the operators it runs") {
  TracedCluster cluster(3, GENERATE(1, 4));
  Agent& agent = cluster[1];
  const at::Tensor x = at::ones({2});
  {
    const auto operators = rpc::trace_operators();
    const base::TraceBinding binding(agent.tracer(), "main");
    for (const int to : {0, 1, 2}) {
      for (const Form form : kForms) {
        call_as<&run_operators>(form, agent, to, false);
        const base::TraceScope scope("user scope");
        if (form != Form::kRemote) {
          call_as<kAdd>(form, agent, to, x, x, 1);
          continue;
        }
        const rpc::RRef<at::Tensor> sum = agent.remote<kAdd>(to, x, x, 1);
        sum.to_here();
        sum.handle()->created().wait();  // when the call is answered, and its event recorded
      }
    }
    // Calls of several threads at once.
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&agent] { agent.rpc_async<&run_operators>(2, false).wait(); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  agent.rpc_sync<&product>(2, x, x);  // not recorded as an operator any more

  const auto events = cluster.events();
  std::map<std::string, int> calls;
  int in_user_scope = 0;
  for (const auto& [rank, call] : events) {
    if (call.kind != Kind::kAsync) continue;
    if (rank != 1 || std::string(call.name).find("#distrain.") != std::string::npos) continue;
    ++calls[call.name];
    // A scope of the caller contains the whole call, until its reply.
    for (const auto& [at, scope] : events) {
      in_user_scope += at == 1 && std::string(scope.name) == "user scope" && contains(scope, call);
    }
    // The function of the call has the call's number, and contains the operators.
    std::set<std::string> ran;
    for (const auto& [there, function] : events) {
      if (function.kind != Kind::kFlowIn || function.id != call.id) continue;
      CHECK(there == call.value);
      for (const auto& [at, slice] : events) {
        if (at == there && std::string(slice.category) == "operator" && contains(function, slice)) {
          ran.insert(slice.name);
        }
      }
    }
    const std::string name = call.name;
    CAPTURE(name, ran);
    if (name.find("run_operators") != std::string::npos) {
      CHECK(std::ranges::includes(ran, kOperators));
    } else if (name.find("aten::add") != std::string::npos) {
      CHECK(ran.contains("aten::add"));
    } else {
      CHECK(ran.empty());
    }
  }
  for (const int to : {0, 1, 2}) {
    for (const Form form : kForms) {
      CAPTURE(to, static_cast<int>(form));
      CHECK(calls[call_name(form, "aten::add", 1, to)] == 1);
      const bool by_threads = to == 2 && form == Form::kAsync;
      CHECK(calls[call_name(form, "run_operators", 1, to)] == (by_threads ? 3 : 1));
    }
  }
  CHECK(in_user_scope == 9);
}

TEST_CASE("a span ends with the future that it is given, and is given one only") {
  TracedCluster cluster(2);
  Agent& agent = cluster[1];
  const at::Tensor x = at::ones({1});
  const std::string name = "user " + call_name(Form::kAsync, "product", 1, 0);
  {  // until the end of the block
    const rpc::TraceSpan span(agent, "block");
    agent.rpc_sync<&product>(0, x, x);
  }
  base::Promise<int> open;
  base::Future<int> ended;
  {
    rpc::TraceSpan span(agent, "future");
    ended = span.end_with(open.future());
    CHECK(error_of([&] { static_cast<void>(span.end_with(open.future())); }).message ==
          "TraceSpan::end_with() can only be called once");
  }
  const int64_t left_at = base::Tracer::now();
  CHECK_FALSE(ended.done());
  open.set(7);
  CHECK(ended.wait() == 7);
  {  // a call, whose future ends the span before the block ends, and another that fails
    rpc::TraceSpan span(agent, name);
    CHECK(at::equal(span.end_with(agent.rpc_async<&product>(0, x + x, x)).wait(), x + x));
    rpc::TraceSpan of_failed(agent, "failed");
    CHECK(of_failed.end_with(agent.rpc_async<&product>(0, at::ones({2}), at::ones({3})))
              .wait_result()
              .ok() == false);
  }
  std::map<std::string, TraceEvent> spans;
  for (const auto& [rank, event] : cluster.events()) {
    if (std::string(event.category) == "span") {
      CHECK((rank == 1 && event.kind == Kind::kAsync && spans.emplace(event.name, event).second));
    }
  }
  CHECK(spans.size() == 4);
  CHECK(spans.at("future").start <= left_at);
  CHECK(spans.at("future").end >= left_at);
  CHECK(spans.at("block").end <= spans.at("future").start);
  CHECK(spans.at(name).end >= spans.at("future").end);
  CHECK(spans.contains("failed"));
}

TEST_CASE("a trace with shapes has those of the arguments of remote and local operators") {
  TracedCluster cluster(2);
  Agent& agent = cluster[1];
  const base::TraceBinding binding(agent.tracer(), "main");
  const at::Tensor x = at::ones({100});
  {
    const auto operators = rpc::trace_operators(true);
    agent.rpc_sync<kAdd>(0, x, x, 1);
    static_cast<void>(at::add(x, x));
  }
  {
    const auto operators = rpc::trace_operators();
    static_cast<void>(at::mul(x, x));
  }
  std::map<int, const char*> shapes;
  for (const auto& [rank, event] : cluster.events()) {
    if (std::string(event.category) != "operator") continue;
    if (std::string(event.name) == "aten::mul") CHECK(event.key == nullptr);
    if (std::string(event.name) != "aten::add") continue;
    CHECK(shapes.emplace(rank, event.key).second);
    CHECK(event.value == 200);
  }
  REQUIRE(shapes.size() == 2);
  CHECK(std::string(shapes.at(0)) == "elements of [100], [100], []");
  CHECK(std::string(shapes.at(1)) == shapes.at(0));
}

TEST_CASE("a trace shows the calls that a called function makes, and the scopes in it") {
  TracedCluster cluster(3, GENERATE(1, 4));
  {
    const auto operators = rpc::trace_operators();
    cluster[1].rpc_async<&product_elsewhere>(2, 0, at::ones({2})).wait();
    for (const int to : {0, 2}) cluster[1].rpc_async<&run_operators>(to, true).wait();
    const base::TraceBinding binding(cluster[1].tracer(), "main");
    run_operators(true);  // the same here
  }
  const auto events = cluster.events();
  const auto find = [&](int rank, Kind kind, const std::string& name) {
    std::vector<TraceEvent> found;
    for (const auto& [at, event] : events) {
      if (at == rank && event.kind == kind && event.name == name) found.push_back(event);
    }
    REQUIRE(found.size() == 1);
    return found[0];
  };
  const TraceEvent outer = find(1, Kind::kAsync, "rpc_async#product_elsewhere(w1 -> w2)");
  const TraceEvent inner = find(2, Kind::kAsync, "rpc_async#product(w2 -> w0)");
  CHECK(contains(outer, inner));
  const TraceEvent function = find(0, Kind::kFlowIn, "product");
  CHECK(std::ranges::any_of(events, [&](const auto& at) {
    return at.first == 0 && std::string(at.second.name) == "aten::mul" &&
           contains(function, at.second);
  }));
  std::vector<std::set<std::string>> ran_on;
  for (const int rank : {1, 0, 2}) {
    const TraceEvent scope = find(rank, Kind::kSlice, "##forward##");
    std::set<std::string> ran;
    for (const auto& [at, event] : events) {
      if (at == rank && event.kind == Kind::kSlice && contains(scope, event))
        ran.insert(event.name);
    }
    CHECK(std::ranges::includes(ran, kOperators));
    ran_on.push_back(ran);
    CHECK(ran_on[0] == ran);
  }
}

}  // namespace
}  // namespace distrain::testing::trace_forms

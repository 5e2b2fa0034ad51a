// Tests that calls work alike in all forms (rpc_sync, rpc_async, remote), to other ranks and to the
// calling rank itself, with dense and with sparse tensors, with operators and with functions.
#include <climits>
#include <functional>
#include <string>
#include <thread>

#include "call_forms.h"
#include "gate.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::testing::forms {
namespace {

using namespace std::chrono_literals;
using base::ErrorKind;
using rpc::Agent;
using rpc::RRef;

struct Chain {  // either a value or a reference to the next part
  std::vector<RRef<Chain>> next;
  std::optional<at::Tensor> value;
  static constexpr auto kFields = std::tuple(&Chain::next, &Chain::value);
};

at::Tensor nested_sum(rpc::CallContext& call, int to, const at::Tensor& x) {
  return call.agent.rpc_sync<kAdd>(to, x, x, 1);
}
at::Tensor nested_remote(rpc::CallContext& call, int to, const at::Tensor& x) {
  return call.agent.remote<kAdd>(to, x, x, 1).to_here();
}
std::vector<TensorRef> two_refs(rpc::CallContext& call, int to, const at::Tensor& x) {
  return {call.agent.remote<kAdd>(to, x, x, 1), call.agent.remote<kAdd>(to, x, x, 2)};
}
TensorRef one_ref(rpc::CallContext& call, int to, const at::Tensor& x) {
  return call.agent.remote<kAdd>(to, x, x, 1);
}
Chain forward(rpc::CallContext& call, int to, const TensorRef& ref, int left) {
  if (left == 0) return {{}, ref.to_here()};
  const int next = (to + 1) % call.agent.world_size();
  return {{call.agent.remote<&forward>(to, next, ref, left - 1)}, std::nullopt};
}
std::atomic<int> g_passed_on{0};
void pass_on(rpc::CallContext& call, int to, int left) {
  ++g_passed_on;
  if (left == 0) return;
  nap(2);  // the other ranks come to the next round of their shutdown() meanwhile
  const int next = (to + 1) % call.agent.world_size();
  static_cast<void>(call.agent.rpc_async<&pass_on>(to, next, left - 1));
}
rpc::WorkerInfo same_worker(const rpc::WorkerInfo& worker) { return worker; }
int64_t nil() { return 0; }
bool is_dense_view(const at::Tensor& x) { return x.is_contiguous(); }

void expose(Agent& agent) {
  expose_forms(agent);
  agent.expose<&nested_sum>("nested_sum");
  agent.expose<&nested_remote>("nested_remote");
  agent.expose<&two_refs>("two_refs");
  agent.expose<&one_ref>("one_ref");
  agent.expose<&forward>("forward");
  agent.expose<&pass_on>("pass_on");
  agent.expose<&same_worker>("same_worker");
  agent.expose<&nil>("nil");
  agent.expose<&is_dense_view>("is_dense_view");
}

// Calls an operator and a function in each form, and checks the sums.
void check_sums(Agent& agent, const rpc::To& to, const at::Tensor& x) {
  for (const Form form : kForms) {
    const bool right =
        same_tensor(call_as<kAdd>(form, agent, to, x, x, 1), x + x) &&
        same_tensor(call_as<&add_three>(form, agent, to, x, x, x), x + x + x) &&
        same_tensor(call_as<&sum_of_list>(form, agent, to, std::vector{x, x}), x + x);
    expect(right, "a wrong sum");
  }
}

TEST_CASE("a rank calls every rank and itself in each form, by number, name or WorkerInfo") {
  Cluster cluster(4, expose);
  cluster.on_all([](Agent& agent) {
    for (int to = 0; to < 4; ++to) {
      for (const at::Tensor& x : {at::ones({2, 2}), at::ones({to + 1, to + 1}) * (agent.rank() + 1),
                                  sparse_tensor(), sparse_tensor().coalesce() * 3}) {
        check_sums(agent, to, x);
        check_sums(agent, "w" + std::to_string(to), x);
        check_sums(agent, agent.worker(to), x);
        const TensorRef ref = agent.remote<kAdd>(to, x, x, 1);
        expect(to != agent.rank() || same_tensor(ref.local_value(), x + x), "a value that is here");
      }
      for (const Form form : kForms) {
        const at::Tensor x = at::ones({2, 2});
        expect(at::equal(call_as<kAddScalar>(form, agent, to, x, to, 1), x + to), "x + number");
        x[0][1] = 0;
        expect(at::equal(call_as<kNonzero>(form, agent, to, x), x.nonzero()), "nonzero");
        expect(call_as<&same_worker>(form, agent, to, agent.worker(to)) == agent.worker(to),
               "a WorkerInfo");
      }
    }
  });
  cluster.shutdown();
}

TEST_CASE("many calls and values in flight keep their own arguments and results") {
  Cluster cluster(3, expose);
  cluster.on_all([](Agent& agent) {
    for (const bool sparse : {false, true}) {
      const auto x = [&](int i) { return sparse ? sparse_tensor() * i : at::ones({i, i}); };
      const int to = (agent.rank() + 1) % 3;
      std::vector<base::Future<at::Tensor>> sums, called;
      std::vector<TensorRef> operators, functions;
      for (int i = 0; i < 100; ++i) {
        called.push_back(agent.rpc_async<&add_three>(to, x(i), x(i), x(i)));
      }
      base::wait_all(called);
      for (int i = 0; i < 100; ++i) {
        expect(same_tensor(called[static_cast<size_t>(i)].wait(), x(i) * 3), "a function's result");
      }
      for (int i = 0; i < 20; ++i) {
        sums.push_back(agent.rpc_async<kAdd>(to, x(i), x(i), 1));
        operators.push_back(agent.remote<kAdd>(to, x(i), x(i), 1));
        functions.push_back(agent.remote<&add_three>(to, x(i), x(i), x(i)));
      }
      base::wait_all(sums);
      for (int i = 0; i < 20; ++i) {
        const auto at = static_cast<size_t>(i);
        expect(same_tensor(sums[at].wait(), x(i) * 2), "the sum of a call");
        expect(same_tensor(operators[at].to_here(), x(i) * 2), "an operator's value");
        expect(same_tensor(functions[at].to_here(), x(i) * 3), "a function's value");
      }
    }
  });
  cluster.shutdown();
}

TEST_CASE("the only rank of a job calls itself in each form") {
  Cluster cluster(1, expose);
  for (const at::Tensor& x : {at::ones({2, 2}), sparse_tensor()}) check_sums(cluster[0], "w0", x);
  cluster.shutdown();
}

TEST_CASE("a rank that does not exist is refused in each form") {
  static_assert(!std::is_constructible_v<rpc::To, double>);  // a rank is no fraction
  static_assert(!std::is_constructible_v<rpc::To, float>);
  Cluster cluster(2, expose);
  const at::Tensor x = at::ones({2});
  const auto refuses = [&](const rpc::To& to) {
    for (const Form form : kForms) {
      CHECK(error_of([&] { call_as<kAdd>(form, cluster[0], to, x, x, 1); }).kind ==
            ErrorKind::kNotFound);
    }
  };
  for (const int rank : {2, 3, -1, INT_MAX}) refuses(rank);
  for (const int64_t rank : {(int64_t{1} << 32) + 1, int64_t{-1} << 32, INT64_MAX}) refuses(rank);
  for (const char* name : {"w2", "", "w"}) refuses(name);
  CHECK(error_of([&] { cluster[0].worker("w2"); }).kind == ErrorKind::kNotFound);
  for (const Form form : kForms) {
    CHECK(same_tensor(call_as<kAdd>(form, cluster[0], size_t{1}, x, x, 1), x + x));
  }
  cluster.shutdown();
}

TEST_CASE("the names and numbers of all ranks are known on each rank") {
  Cluster cluster(3, expose);
  for (int at = 0; at < 3; ++at) {
    CHECK(cluster[at].worker(at).name == cluster[at].name());
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(cluster[at].worker(rank).name == "w" + std::to_string(rank));
      CHECK(cluster[at].worker("w" + std::to_string(rank)).rank == rank);
      CHECK(cluster[at].worker(rank) == cluster[0].worker(rank));
    }
    CHECK(cluster[at].world_size() == 3);
    const base::Error unknown = error_of([&] { cluster[at].worker("nobody"); });
    CHECK(unknown.kind == ErrorKind::kNotFound);
    CHECK_THAT(unknown.message, ContainsSubstring("nobody"));
  }
  cluster.shutdown();
}

TEST_CASE("an RRef to a value of the caller or of another rank is an argument in each form") {
  Cluster cluster(3, expose);
  cluster.on_all([](Agent& agent) {
    for (const at::Tensor& x : {at::ones({2, 2}), sparse_tensor()}) {
      for (int owner = 0; owner < 3; ++owner) {
        // Of remote() to itself or to another rank, and of a value that is here.
        const TensorRef made = agent.remote<&add_three>(owner, x, x, x);
        const TensorRef here = agent.make_rref(x * 3);
        const TensorRef other = agent.remote<kAdd>(owner, x, x, 2);
        for (int to = 0; to < 3; ++to) {
          for (const Form form : kForms) {
            expect(same_tensor(call_as<&add_to_ref>(form, agent, to, made, x), x * 4), "made");
            expect(same_tensor(call_as<&add_to_ref>(form, agent, to, here, x), x * 4), "here");
            expect(same_tensor(call_as<&add_refs>(form, agent, to, made, other), x * 6), "two");
          }
        }
      }
    }
  });
  cluster.shutdown();
}

TEST_CASE("calls and RRefs may be nested in each form") {
  Cluster cluster(4, expose);
  cluster.on_all([](Agent& agent) {
    const int to = (agent.rank() + 1) % 4;
    for (const at::Tensor& x : {at::ones({2, 2}), sparse_tensor()}) {
      for (const int next : {agent.rank(), (agent.rank() + 2) % 4, to}) {
        std::vector<RRef<std::vector<TensorRef>>> many;
        for (int i = 0; i < 20; ++i) many.push_back(agent.remote<&two_refs>(to, next, x));
        for (const auto& refs_there : many) {
          const std::vector<TensorRef> refs = refs_there.to_here();
          expect(refs.size() == 2 && same_tensor(refs[0].to_here(), x * 2) &&
                     same_tensor(refs[1].to_here(), x * 3),
                 "a reference to references");
        }
        for (const Form form : kForms) {
          expect(same_tensor(call_as<&nested_sum>(form, agent, to, next, x), x * 2), "a call");
          expect(same_tensor(call_as<&nested_remote>(form, agent, to, next, x), x * 2), "a value");
          const TensorRef ref = call_as<&one_ref>(form, agent, to, next, x);
          expect(ref.owner() == next && same_tensor(ref.to_here(), x * 2), "an RRef");
        }
      }
    }
  });
  cluster.shutdown();
}

TEST_CASE("an RRef may be forwarded from rank to rank while each keeps a reference to the next") {
  Cluster cluster(4, expose);
  cluster.on_all([](Agent& agent) {
    const int to = (agent.rank() + 1) % 4;
    const at::Tensor x = at::ones({2, 2});
    const TensorRef ref = agent.remote<kAdd>(to, x, x, 1);
    Chain part = agent.rpc_sync<&forward>(agent.rank(), to, ref, 8);
    for (int i = 0; i < 8; ++i) {
      expect(part.next.size() == 1, "the chain ends early");
      part = part.next[0].to_here();
    }
    expect(same_tensor(part.value.value(), x * 2), "the forwarded value");
  });
  cluster.shutdown();
}

TEST_CASE("shutdown waits for calls that calls have made") {
  g_passed_on = 0;
  Cluster cluster(4, expose);
  const auto is_ending = [&](int rank) {
    for (const rpc::Wait& wait : cluster[rank].waits()) {
      if (wait.what.starts_with("the end of")) return true;
    }
    return false;
  };
  cluster.on_all([&](Agent& agent) {
    if (agent.rank() == 0) {
      // All other ranks have answered their own calls when this chain of calls begins.
      for (int rank = 1; rank < 4; ++rank) {
        while (!is_ending(rank)) std::this_thread::sleep_for(1ms);
      }
      for (int to = 1; to < 4; ++to)
        static_cast<void>(agent.rpc_async<&pass_on>(to, to % 3 + 1, 20));
    }
    agent.shutdown();
  });
  CHECK(g_passed_on == 3 * 21);
}

TEST_CASE("ranks answer many light and some heavy calls of their neighbours") {
  Cluster cluster(3, expose);
  cluster.on_all([](Agent& agent) {
    const int to = (agent.rank() + 1) % 3;
    std::vector<base::Future<int64_t>> calls;
    for (int i = 0; i < 1000; ++i) calls.push_back(agent.rpc_async<&nil>(to));
    for (int i = 0; i < 20; ++i) {
      calls.push_back(agent.rpc_async<&heavy>(to, at::ones({100, 100})));
      calls.push_back(agent.rpc_async<&heavy>(to, sparse_tensor()));
    }
    base::wait_all(calls);
    for (const auto& call : calls) expect(call.wait() == 0, "a wrong answer");
  });
  cluster.shutdown();
}

TEST_CASE("ranks in shutdown() answer the calls of a rank that still works") {
  Cluster cluster(4, expose);
  const bool sparse = GENERATE(false, true);
  cluster.on_all([sparse](Agent& agent) {
    if (agent.rank() == 0) {
      // First only rank 1 has work, then only rank 2, which is in shutdown() for long by then.
      for (const int to : {1, 2}) {
        std::vector<base::Future<int64_t>> calls;
        for (int i = 0; i < 30; ++i) {
          calls.push_back(
              agent.rpc_async<&heavy>(to, sparse ? sparse_tensor() : at::ones({100, 100})));
        }
        base::wait_all(calls);
        for (const auto& call : calls) expect(call.wait() == 0, "a wrong answer");
      }
    }
    agent.shutdown();
  });
}

TEST_CASE("a view is sent without the rest of its storage and arrives dense") {
  Cluster cluster(2, expose);
  const at::Tensor x = at::rand({5, 5});
  const at::Tensor view = x.narrow(1, 2, 2);
  CHECK_FALSE(view.is_contiguous());
  CHECK(cluster[0].rpc_sync<&is_dense_view>(1, view));
  CHECK(at::equal(cluster[0].rpc_sync<&sum_of_list>(1, std::vector{view}), view));
  cluster.shutdown();
}

}  // namespace
}  // namespace distrain::testing::forms

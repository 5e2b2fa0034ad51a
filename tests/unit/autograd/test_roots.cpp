// Tests passes that begin at values of RRefs, and the trace of a context's calls.
#include <ATen/Functions.h>

#include "distrain/autograd/context.h"
#include "distrain/rpc/trace.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::testing::roots {
namespace {

using base::ErrorKind;
using rpc::Agent;
using rpc::RRef;

at::Tensor wanted(const at::Tensor& x) { return x.to(at::kDouble).requires_grad_(); }
at::Tensor mul(const at::Tensor& x, const at::Tensor& y) { return x * y; }
at::Tensor sum_of(const at::Tensor& x) { return x.sum(); }
template <class Ref, class... Context>
concept has_backward = requires(Ref ref, Context... context) {
  autograd::backward(context..., ref);
};
void setup_traced(Agent& agent) {
  autograd::install(agent);
  agent.expose<&mul>("mul");
  agent.expose<&sum_of>("sum_of");
}

TEST_CASE("a pass may begin at the value of an RRef, on its owner or elsewhere") {
  Cluster cluster(2, setup_traced);
  const at::Tensor a = wanted(at::rand({10}));
  const at::Tensor twice = at::full({10}, 2.0, at::kDouble);
  for (const int owner : {0, 1}) {
    autograd::Context context(cluster[0]);
    const RRef<at::Tensor> loss = cluster[0].remote<&sum_of>(owner, a);
    autograd::backward(context, loss, {.retain_graph = true});
    autograd::backward(context, loss);
    CHECK(at::equal(context.gradient(a), twice));
    // A value without a gradient is refused. A pass needs a context and a tensor.
    CHECK(error_of([&] {
            autograd::backward(context, cluster[0].remote<&sum_of>(owner, at::ones({2})));
          }).message == "backward: a root does not require a gradient");
    static_assert(!has_backward<RRef<std::string>, autograd::Context>);
    static_assert(!has_backward<RRef<at::Tensor>>);
  }
  {  // A value of this rank that depends on a call.
    autograd::Context context(cluster[0]);
    const at::Tensor sum = cluster[0].rpc_sync<&mul>(1, a, at::full({}, 2.0, at::kDouble));
    const RRef<at::Tensor> loss = cluster[0].make_rref(sum.sum());
    autograd::backward(context, loss, {.retain_graph = true});
    CHECK(at::equal(context.gradient(a), twice));
    autograd::backward(context, loss);
    CHECK(at::equal(context.gradient(a), twice * 2));
  }
  CHECK_FALSE(a.grad().defined());
  cluster[0].make_rref(a.sum() * 2).local_value().backward();  // without a context
  CHECK(at::equal(a.grad(), twice));
  autograd::Context context(cluster[0]);
  CHECK(error_of([&] { autograd::backward(context, cluster[0].make_rref(at::rand({10}))); }).kind ==
        ErrorKind::kInvalid);
  // An unknown context, and passes without a context over values that torch refuses.
  CHECK(error_of([&] {
          autograd::backward(cluster[0], 100, {cluster[0].make_rref(a.sum()).local_value()});
        }).message == "backward: this rank has no autograd context 100");
  CHECK_THROWS_WITH(cluster[0].make_rref(at::rand({10})).local_value().backward(),
                    ContainsSubstring("does not require grad"));
  CHECK_THROWS_WITH(cluster[0].make_rref(a).local_value().backward(),
                    ContainsSubstring("can be implicitly created only for scalar outputs"));
}

TEST_CASE("a trace names the calls of a context and their operators") {
  Cluster cluster(2, setup_traced, {}, [](rpc::AgentOptions& options) {
    options.worker_threads = options.rank == 0 ? 4 : 1;
    options.tracer = std::make_shared<base::Tracer>();
    options.tracer->start();
  });
  const at::Tensor a = wanted(at::ones({2}));
  {
    autograd::Context context(cluster[0]);
    const auto operators = rpc::trace_operators();
    cluster[0].rpc_async<&mul>(1, a, a).wait();
  }
  {
    const auto operators = rpc::trace_operators();
    autograd::Context context(cluster[0]);
    cluster[0].rpc_async<&mul>(1, a, a).wait();
  }
  const auto count = [&](int rank, const std::string& name) {
    int found = 0;
    for (const base::TraceTrack& track : cluster[rank].tracer()->tracks()) {
      for (const base::TraceEvent& event : track.events) found += event.name == name;
    }
    return found;
  };
  CHECK(count(0, "rpc_async#mul(w0 -> w1)") == 2);
  CHECK(count(1, "aten::mul") == 2);
  CHECK(count(1, "mul") >= 1);  // the second one may still be open
}

}  // namespace
}  // namespace distrain::testing::roots

// Tests RRefs of calls that fail or arrive late, and of ranks that die.
#include <chrono>
#include <stdexcept>
#include <thread>

#include "gate.h"
#include "rref_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::Agent;
using rpc::RRef;

namespace {

int64_t fail_with(const Ref&) { throw std::runtime_error("broke after reading"); }
Ref echo_late(const Ref& ref) {
  wait_at_gate();
  return ref;
}
int64_t with_tensor(const Ref& ref, const at::Tensor&) { return value_of(ref); }
std::tuple<Ref, at::Tensor> result_that_cannot_travel(const Ref& ref) {
  return {ref, at::empty({2}, at::kBits8)};
}
int64_t seven_late() {
  wait_at_gate();
  return 7;
}
void want_no_more(const RRef<int64_t>& ref) { ref.to_here_async().cancel(); }
Tracked fail_to_make(int64_t) { throw base::Exception(ErrorKind::kBadData, "cannot be made"); }
void not_exposed_there(const Ref&) {}
Tracked also_not_there(int64_t value) { return Tracked(value); }

void expose_faults(Agent& agent) {
  expose_tracked(agent);
  agent.expose<&fail_with>("fail_with");
  agent.expose<&wait_at_gate>("wait_at_gate");
  agent.expose<&echo_late>("echo_late");
  agent.expose<&nap>("nap");
  agent.expose<&seven_late>("seven_late");
  agent.expose<&want_no_more>("want_no_more");
  agent.expose<&with_tensor>("with_tensor");
  agent.expose<&result_that_cannot_travel>("result_that_cannot_travel");
  agent.expose<&fail_to_make>("fail_to_make");
  if (agent.rank() == 0) {
    agent.expose<&not_exposed_there>("not_exposed_there");
    agent.expose<&also_not_there>("also_not_there");
  }
}

}  // namespace

TEST_CASE("RRefs of failed calls are released") {
  Cluster cluster(3, expose_faults);
  for (int owner = 0; owner < 3; ++owner) {
    for (int to = 0; to < 3; ++to) {
      CAPTURE(owner, to);
      Agent& agent = cluster[0];
      const Ref ref = agent.remote_new<Tracked>(owner, 1);
      CHECK(error_of([&] { agent.rpc_sync<&fail_with>(to, ref); }).kind ==
            ErrorKind::kRemoteFailed);
      if (to != 0) {
        CHECK(error_of([&] { agent.rpc_sync<&not_exposed_there>(to, ref); }).kind ==
              ErrorKind::kNotFound);
      }
      // The call fails after its RRef has been encoded, because the tensor cannot be sent.
      const at::Tensor csr = at::eye(2).to_sparse_csr();
      CHECK(error_of([&] { agent.rpc_sync<&with_tensor>(to, ref, csr); }).kind ==
            ErrorKind::kInvalid);
      if (to != 0) {
        const at::Tensor half = at::empty({2}, at::kBits8);
        CHECK(error_of([&] { agent.rpc_sync<&with_tensor>(to, ref, half); }).kind ==
              ErrorKind::kInvalid);
        CHECK(error_of([&] { agent.rpc_sync<&result_that_cannot_travel>(to, ref); }).kind ==
              ErrorKind::kInvalid);
      }
      CHECK(value_of(ref) == 1);
    }
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("a call that cannot be sent does not wait for an answer") {
  Cluster cluster(2, expose_faults);
  Ref ref = cluster[0].make_rref(Tracked(1));
  const auto began = std::chrono::steady_clock::now();
  CHECK(error_of([&] {
          cluster[0].rpc_sync<&with_tensor>(rpc::To(1).without_deadline(), ref,
                                            at::empty({2}, at::kBits8));
        }).kind == ErrorKind::kInvalid);
  ref = Ref();
  cluster.shutdown();  // waits for all calls in flight
  CHECK(std::chrono::steady_clock::now() - began < 30s);
}

TEST_CASE("RRefs of abandoned calls are released") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(3, expose_faults, options);
  for (int owner = 0; owner < 3; ++owner) {
    for (int to = 0; to < 3; ++to) {
      CAPTURE(owner, to);
      Agent& agent = cluster[0];
      {
        // The reply with the RRef arrives after the call was abandoned.
        const Ref ref = agent.remote_new<Tracked>(owner, 1);
        CHECK(value_of(ref) == 1);
        g_gate = false;
        CHECK(error_of([&] { agent.rpc_sync<&echo_late>(rpc::To(to).timeout(5ms), ref); }).kind ==
              ErrorKind::kDeadline);
        g_gate = true;
      }
      {
        // The only worker handles the call after the caller has abandoned it and its RRefs.
        Ref ref = agent.remote_new<Tracked>(owner, 1);
        CHECK(value_of(ref) == 1);
        g_gate = false;
        auto held_up = agent.rpc_async<&wait_at_gate>(to);
        auto made = agent.remote<&make_by_value>(rpc::To(to).timeout(5ms), 1);
        CHECK(error_of([&] { agent.rpc_sync<&value_of>(rpc::To(to).timeout(5ms), ref); }).kind ==
              ErrorKind::kDeadline);
        ref = Ref();
        made = Ref();
        g_gate = true;
        held_up.wait();
      }
    }
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("RRefs in a reply are released if the call is abandoned before the reply is read") {
  rpc::AgentOptions options;
  options.worker_threads = 1;
  Cluster cluster(2, expose_faults, options);
  const int owner = GENERATE(0, 1);
  g_gate = false;
  auto held_up = cluster[0].rpc_async<&wait_at_gate>(0);  // occupies the worker that reads replies
  wait_for_call_at_gate();
  {
    const Ref ref = cluster[0].remote_new<Tracked>(1, 1);
    auto reply = owner == 1
                     ? cluster[0].rpc_async<&make>(1, 1, 5)  // a value of the answering rank
                     : cluster[0].rpc_async<&echo>(1, ref);  // an RRef that this rank has, too
    CHECK(eventually([&] { return cluster[0].waits().size() == 1; }));
    reply.cancel();
    CHECK(error_of([&] { reply.wait(); }).kind == ErrorKind::kCancelled);
  }
  g_gate = true;
  held_up.wait();
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("an owner that abandons its wait for a value leaves the value to the others") {
  Cluster cluster(2, expose_faults);
  g_gate = false;
  const auto ref = cluster[0].remote<&seven_late>(1);
  wait_for_call_at_gate();
  cluster[0].rpc_sync<&want_no_more>(1, ref);
  g_gate = true;
  CHECK(ref.to_here() == 7);
}

TEST_CASE("remote() that fails throws when its value is used") {
  Cluster cluster(3, expose_faults);
  Agent& agent = cluster[0];
  for (int to = 0; to < 3; ++to) {
    const Ref broken = agent.remote<&fail_to_make>(to, 1);
    const base::Error e = error_of([&] { broken.rpc_sync<&Tracked::get>(); });
    CHECK(e.kind == ErrorKind::kBadData);
    CHECK(e.message == "cannot be made");
    CHECK(e.rank == to);
    // Using the value also fails on another rank that receives the reference.
    CHECK(error_of([&] { agent.rpc_sync<&value_of>((to + 1) % 3, broken); }).kind ==
          ErrorKind::kBadData);
    if (to == 0) continue;
    const RRef<Tracked> unknown = agent.remote<&also_not_there>(to, 1);
    CHECK(error_of([&] { unknown.rpc_sync<&Tracked::get>(); }).kind == ErrorKind::kNotFound);
  }
  const RRef<int64_t> sum = agent.remote<&add>(1, 2, 3);
  CHECK(error_of([&] { agent.remote<&fail_with>(1, Ref()); }).kind == ErrorKind::kInvalid);
  // A reference of the wrong type is an error, not a crash.
  CHECK(error_of([&] { agent.rpc_sync<&value_of>(1, Ref(sum.handle())); }).kind ==
        ErrorKind::kInvalid);
  CHECK(sum.to_here() == 5);
}

TEST_CASE("an owner that dies fails calls that use its values") {
  Cluster cluster(3, expose_faults);
  const Ref old = cluster[0].remote_new<Tracked>(2, 1);
  CHECK(value_of(old) == 1);
  const Ref shared = cluster[1].rpc_sync<&echo>(2, cluster[1].remote_new<Tracked>(2, 2));
  g_gate = false;
  auto pending = cluster[0].rpc_async<&wait_at_gate>(rpc::To(2).without_deadline());
  wait_for_call_at_gate();
  std::thread killer([&] { cluster.kill(2); });  // returns once the call at the gate has returned
  CHECK_THROWS_AS(pending.wait(), base::Exception);
  g_gate = true;
  killer.join();
  CHECK(Tracked::alive == 0);
  eventually([&] {
    return error_of([&] { cluster[0].rpc_sync<&nap>(2, 0); }).kind == ErrorKind::kPeerLost &&
           error_of([&] { cluster[1].rpc_sync<&nap>(2, 0); }).kind == ErrorKind::kPeerLost;
  });
  CHECK(error_of([&] { value_of(old); }).kind == ErrorKind::kPeerLost);
  CHECK(error_of([&] { value_of(shared); }).rank == 2);
  const RRef<int64_t> never = cluster[0].remote<&add>(2, 1, 1);
  CHECK(error_of([&] { never.to_here(); }).kind == ErrorKind::kPeerLost);
  CHECK(error_of([&] { cluster[0].rpc_sync<&value_of>(1, old); }).kind == ErrorKind::kPeerLost);
}

TEST_CASE("the forks of a dead rank are released") {
  Cluster cluster(4, expose_faults);
  for (int owner : {0, 1}) {
    const Ref direct = cluster[3].remote_new<Tracked>(owner, 1);
    cluster[2].rpc_sync<&shelve>(3, cluster[2].remote_new<Tracked>(owner, 2));
    cluster[owner].rpc_sync<&shelve>(3, cluster[owner].make_rref(Tracked(3)));
    CHECK(value_of(direct) == 1);
    cluster[3].local<Shelf>().refs.push_back(direct);
  }
  // This value must survive the loss of rank 3, because rank 2 refers to it.
  const Ref kept = cluster[2].rpc_sync<&make>(3, 0, 4);
  CHECK(value_of(kept) == 4);  // ensures that rank 0 knows of rank 2's reference
  CHECK(eventually([] { return Tracked::alive == 7; }));
  cluster.kill(3);
  CHECK(eventually([] { return Tracked::alive == 1; }));
  CHECK(value_of(kept) == 4);
}

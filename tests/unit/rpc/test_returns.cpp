// Tests a job that continues without a lost rank, and the process that replaces it.
#include <algorithm>
#include <array>
#include <mutex>
#include <thread>

#include "join_support.h"
#include "rref_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::Agent;
using rpc::Loss;

namespace {

// Records the losses that an agent reports.
class Losses final : public rpc::Layer {
 public:
  void on_rank_lost(const Loss& loss) override {
    std::lock_guard lock(mutex_);
    heard_.push_back(loss);
  }
  std::optional<Loss> of(int rank, uint32_t incarnation) const {
    std::lock_guard lock(mutex_);
    for (const Loss& loss : heard_) {
      if (loss.rank == rank && loss.incarnation == incarnation) return loss;
    }
    return std::nullopt;
  }
  size_t count() const {
    std::lock_guard lock(mutex_);
    return heard_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Loss> heard_;
};

// Replies to calls of hold_reply(). The test sends them later, in any order.
struct HeldReplies {
  std::mutex mutex;
  std::vector<rpc::ReplyPtr> replies;

  rpc::ReplyPtr wait_for(size_t place) {
    rpc::ReplyPtr reply;
    const bool came = eventually([&] {
      std::lock_guard lock(mutex);
      if (replies.size() > place) reply = replies[place];
      return reply != nullptr;
    });
    if (!came) throw std::runtime_error("no call came");
    return reply;
  }
};

void hold_reply(rpc::CallContext& context, rpc::Decoder&, const rpc::ReplyPtr& reply) {
  HeldReplies& held = context.agent.local<HeldReplies>();
  std::lock_guard lock(held.mutex);
  held.replies.push_back(reply);
}

int64_t incarnation_of_caller(rpc::CallContext& context) { return context.caller.incarnation; }
int64_t size_of_text(const std::string& text) { return static_cast<int64_t>(text.size()); }
void wait_with(const std::string&) { wait_at_gate(); }

void expose_returns(Agent& agent) {
  expose_tracked(agent);
  agent.expose<&incarnation_of_caller>("incarnation_of_caller");
  agent.expose<&size_of_text>("size_of_text");
  agent.expose<&wait_with>("wait_with");
  agent.expose<&wait_at_gate>("wait_at_gate");
  agent.expose_raw("hold_reply", &hold_reply);
  agent.provide(std::make_shared<HeldReplies>());
  const auto losses = std::make_shared<Losses>();
  agent.provide(losses);
  agent.add_layer(losses);
}

// Kills `rank`, waits until each remaining rank has been notified, and returns the loss.
Loss lose(Cluster& cluster, int rank) {
  const uint32_t incarnation = cluster[rank].incarnation();
  cluster.kill(rank);
  for (int other = 0; other < cluster.size(); ++other) {
    if (!cluster.is_there(other)) continue;
    const Losses& losses = cluster[other].local<Losses>();
    REQUIRE(eventually([&] { return losses.of(rank, incarnation).has_value(); }));
  }
  return *cluster[0].local<Losses>().of(rank, incarnation);
}

void check_all_call_all(Cluster& cluster) {
  for (int from = 0; from < cluster.size(); ++from) {
    for (int to = 0; to < cluster.size(); ++to) {
      CAPTURE(from, to);
      CHECK(cluster[from].rpc_sync<&add>(to, from, to) == from + to);
      CHECK(cluster[from].rpc_sync<&incarnation_of_caller>(to) == cluster[from].incarnation());
      CHECK(cluster[from].worker(to).incarnation == cluster[to].incarnation());
      CHECK(cluster[from].is_here(to));
    }
  }
}

void check_call_fails(Cluster& cluster, int from, int to) {
  const base::Error error = error_of([&] { cluster[from].rpc_sync<&add>(to, 1, 1); });
  CAPTURE(from, to, error.message);
  CHECK(error.kind == ErrorKind::kPeerLost);
  CHECK(error.rank == to);
}

void wait_for_its_end(const Agent& agent) {
  const auto is_ending = [&] {
    return std::ranges::any_of(
        agent.waits(), [](const rpc::Wait& wait) { return wait.what.starts_with("the end of"); });
  };
  REQUIRE(eventually(is_ending));
}

// Returns the next frame that is not a heartbeat.
std::optional<std::pair<wire::FrameHeader, wire::Bytes>> next_word(RawRank& raw) {
  auto frame = raw.receive();
  while (frame && frame->first.kind == wire::FrameKind::kHeartbeat) frame = raw.receive();
  return frame;
}

base::Error refusal_of(int rank, Cluster& cluster) {
  return Joining(options_for(rank, cluster.size(), cluster[0].port())).result();
}

}  // namespace

TEST_CASE("a job continues without a rank, and with one new process after the other in its place") {
  Cluster cluster(3, expose_returns);
  check_all_call_all(cluster);
  cluster[0].go_on_without({2}, 0, "", true);
  for (uint32_t before = 0; before < 3; ++before) {
    CAPTURE(before);
    const Loss loss = lose(cluster, 2);
    CHECK(loss.job_goes_on);
    CHECK(loss.error.kind == ErrorKind::kPeerLost);
    CHECK(loss.process() == rpc::process_number(2, before));
    CHECK(cluster[1].local<Losses>().of(2, before)->job_goes_on);
    for (const int other : {0, 1}) {
      check_call_fails(cluster, other, 2);
      CHECK_FALSE(cluster[other].is_here(2));
    }
    CHECK(cluster[0].rpc_sync<&add>(1, 1, 2) == 3);
    CHECK(cluster[1].rpc_sync<&add>(0, 1, 2) == 3);
    cluster.bring_back(2);
    CHECK(cluster[2].incarnation() == before + 1);
    check_all_call_all(cluster);
    CHECK(cluster[2].local<Losses>().count() == 0);
  }
  CHECK(cluster[0].local<Losses>().count() == 3);
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("a place may stay empty until the end") {
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({1, 2}, 1, "", true);
  CHECK(lose(cluster, 1).job_goes_on);
  check_call_fails(cluster, 2, 1);
  cluster.shutdown();
  CHECK(cluster[0].live_rrefs() == 0);
  CHECK(cluster[2].live_rrefs() == 0);
}

TEST_CASE("a rank that is lost while others wait for the end is not waited for") {
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  std::thread ending([&] { cluster[1].shutdown(); });
  wait_for_its_end(cluster[1]);
  std::thread ending_0([&] { cluster[0].shutdown(); });
  wait_for_its_end(cluster[0]);
  cluster.kill(2);
  ending.join();
  ending_0.join();
}

TEST_CASE("a new process knows which other ranks are lost") {
  Cluster cluster(4, expose_returns);
  cluster[0].go_on_without({2, 3}, 0, "", true);
  lose(cluster, 3);
  lose(cluster, 2);
  cluster.bring_back(2);
  CHECK_FALSE(cluster[2].is_here(3));
  check_call_fails(cluster, 2, 3);
  const Losses& losses = cluster[2].local<Losses>();
  REQUIRE(eventually([&] { return losses.of(3, 0).has_value(); }));
  CHECK(losses.of(3, 0)->job_goes_on);
  cluster.bring_back(3);
  check_all_call_all(cluster);
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("references to values of a lost process do not refer to those of its successor") {
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  {
    // IDs contain the incarnation. Otherwise the successor's first value would have the same ID.
    const Ref old = cluster[2].make_rref(Tracked(1));
    cluster[2].rpc_sync<&shelve>(0, old);
    cluster[2].rpc_sync<&shelve>(1, old);
  }
  const Ref made = cluster[0].remote_new<Tracked>(2, 2);
  CHECK(value_of(made) == 2);
  std::vector<Ref> old = {cluster[0].local<Shelf>().refs.at(0), made};
  const Ref of_1 = cluster[1].local<Shelf>().refs.at(0);
  lose(cluster, 2);
  const auto check_gone = [&] {
    for (const Ref& ref : old) {
      CHECK(error_of([&] { value_of(ref); }).kind == ErrorKind::kPeerLost);
      CHECK(error_of([&] { cluster[0].rpc_sync<&value_of>(1, ref); }).kind == ErrorKind::kPeerLost);
    }
    CHECK(error_of([&] { value_of(of_1); }).kind == ErrorKind::kPeerLost);
  };
  check_gone();
  cluster[0].rpc_sync<&shelve>(1, made);  // a fork of which the dead owner is not notified
  cluster.bring_back(2);
  const Ref fresh = cluster[2].make_rref(Tracked(7));
  const Ref fresh_made = cluster[0].remote_new<Tracked>(2, 8);
  CHECK(fresh.handle()->id() != old[0].handle()->id());
  check_gone();
  CHECK(error_of([&] { cluster[0].rpc_sync<&value_of>(2, made); }).kind == ErrorKind::kPeerLost);
  CHECK(error_of([&] { value_of(cluster[1].local<Shelf>().refs.at(1)); }).kind ==
        ErrorKind::kPeerLost);
  CHECK(cluster[2].rpc_sync<&value_of>(0, fresh) == 7);
  CHECK(value_of(fresh_made) == 8);
  CHECK(cluster[1].rpc_sync<&value_of>(2, cluster[1].rpc_sync<&make>(0, 2, 9)) == 9);
}

TEST_CASE("values that only a lost process referred to are released, and none is left at the end") {
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  for (int round = 0; round < 3; ++round) {
    CAPTURE(round);
    for (const int owner : {0, 1}) {
      for (int i = 0; i < 5; ++i) {
        cluster[2].local<Shelf>().refs.push_back(cluster[2].remote_new<Tracked>(owner, i));
        cluster[owner].rpc_sync<&shelve>(2, cluster[owner].make_rref(Tracked(i)));
        cluster[1 - owner].rpc_sync<&shelve>(2, cluster[1 - owner].remote_new<Tracked>(owner, i));
      }
    }
    for (const Ref& ref : cluster[2].local<Shelf>().refs) CHECK(value_of(ref) >= 0);
    lose(cluster, 2);
    CHECK(eventually([&] {
      return Tracked::alive == 0 && cluster[0].live_rrefs() + cluster[1].live_rrefs() == 0;
    }));
    cluster.bring_back(2);
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("a reference that is passed on when its owner is lost is released") {
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  const bool comes_back = GENERATE(false, true);
  CAPTURE(comes_back);
  {
    const Ref ref = cluster[0].remote_new<Tracked>(2, 1);
    CHECK(value_of(ref) == 1);
    lose(cluster, 2);
    CHECK(error_of([&] { cluster[0].rpc_sync<&value_of>(1, ref); }).kind == ErrorKind::kPeerLost);
    cluster[0].rpc_sync<&shelve>(1, ref);
    if (comes_back) cluster.bring_back(2);
    cluster[1].local<Shelf>().refs.clear();
  }
  CHECK(eventually([&] { return cluster[0].live_rrefs() + cluster[1].live_rrefs() == 0; }));
  cluster.shutdown();
}

TEST_CASE("an answer to a call of a lost process is not delivered to the new process") {
  const std::string how = GENERATE("a value", "a reference", "an error", "none");
  CAPTURE(how);
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  const auto call = [&] {
    return cluster[2].call_raw(rpc::To(0).without_deadline(), "hold_reply", [](rpc::Encoder&) {});
  };
  HeldReplies& held = cluster[0].local<HeldReplies>();
  auto before = call();
  rpc::ReplyPtr late = held.wait_for(0);
  lose(cluster, 2);
  CHECK_FALSE(before.wait_result().ok());
  cluster.bring_back(2);
  auto after = call();
  const rpc::ReplyPtr own = held.wait_for(1);
  if (how == "a value") late->send([](rpc::Encoder& out) { out.out.put(int64_t{7}); });
  if (how == "an error") late->fail({ErrorKind::kBadData, "late", -1, {}});
  if (how == "a reference") {
    const Ref ref = cluster[0].make_rref(Tracked(7));
    late->send([&](rpc::Encoder& out) { rpc::encode_rref(out, ref.handle()); });
  }
  late.reset();
  held.replies[0].reset();
  CHECK(cluster[0].rpc_sync<&add>(2, 1, 1) == 2);  // arrives after the late answer
  CHECK_FALSE(after.done());
  own->send([](rpc::Encoder& out) { out.out.put(int64_t{8}); });
  const auto message = cluster[2].open(after.wait());
  CHECK(rpc::Decoder(*message).in.get<int64_t>() == 8);
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("a new process has the credit that its predecessor had, and no more") {
  const bool ends_late = GENERATE(false, true);  // true: the lost process ends after bring_back()
  CAPTURE(ends_late);
  rpc::AgentOptions options;
  options.peer_budget = 64 << 10;
  options.total_budget = 512 << 10;
  options.worker_threads = 2;
  Cluster cluster(3, expose_returns, options);
  cluster[0].go_on_without({2}, 0, "", true);
  const std::string text(20 << 10, 'x');

  // Each rank has calls that have begun, calls that are queued, and calls that wait for credit.
  g_gate = false;
  std::atomic<int> answered{0};
  std::vector<std::thread> callers;
  for (const auto& [from, to] : {std::pair(2, 0), std::pair(0, 2), std::pair(1, 2)}) {
    callers.emplace_back([&text, &answered, &agent = cluster[from], to = to] {
      std::vector<base::Future<void>> calls;
      for (int i = 0; i < 60; ++i) {
        calls.push_back(agent.rpc_async<&wait_with>(rpc::To(to).without_deadline(), text));
      }
      for (const auto& call : calls) answered += call.wait_result().ok() ? 1 : 0;
    });
  }
  for (const int rank : {0, 1, 2}) {
    REQUIRE(eventually([&] {
      return std::ranges::any_of(cluster[rank].waits(), [](const rpc::Wait& wait) {
        return wait.what.starts_with("room on rank");
      });
    }));
  }
  const std::unique_ptr<Agent> lost = cluster.take_out(2);
  std::thread ending([&] { lost->abort({ErrorKind::kPeerLost, "it is gone", -1, {}}); });
  for (std::thread& caller : callers) caller.join();
  CHECK(answered == 0);
  if (ends_late) {
    cluster.bring_back(2);
    g_gate = true;
    ending.join();
  } else {
    g_gate = true;
    ending.join();
    cluster.bring_back(2);
  }
  for (const auto& [from, to] :
       {std::pair(2, 0), std::pair(0, 2), std::pair(2, 1), std::pair(1, 2)}) {
    CAPTURE(from, to);
    std::vector<base::Future<int64_t>> sizes;
    for (int i = 0; i < 100; ++i) sizes.push_back(cluster[from].rpc_async<&size_of_text>(to, text));
    for (const auto& size : sizes) CHECK(size.wait() == 20 << 10);
  }
  cluster.shutdown();
}

TEST_CASE("calls are answered correctly or not at all while ranks are lost and return") {
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  std::atomic<bool> over{false};
  std::atomic<int> wrong{0}, right{0};
  std::vector<std::thread> callers;
  for (const int from : {0, 1}) {
    callers.emplace_back([&, from] {
      Agent& agent = cluster[from];
      for (int64_t i = 0; !over; ++i) {
        const base::Error error = error_of([&] {
          const bool is_right = agent.rpc_sync<&add>(2, i, 1) == i + 1 &&
                                value_of(agent.remote_new<Tracked>(2, i)) == i &&
                                agent.rpc_sync<&value_of>(2, agent.make_rref(Tracked(i))) == i &&
                                value_of(agent.rpc_sync<&make>(1 - from, 2, i)) == i;
          ++(is_right ? right : wrong);
        });
        if (error.message != "(no error)" && error.kind != ErrorKind::kPeerLost) ++wrong;
      }
    });
  }
  for (int round = 0; round < 12; ++round) {
    const int before = right;
    CHECK(eventually([&] { return right > before; }));
    lose(cluster, 2);
    cluster.bring_back(2);
    for (const int to : {0, 1}) {
      CHECK(cluster[2].rpc_sync<&value_of>(to, cluster[2].make_rref(Tracked(round))) == round);
    }
  }
  over = true;
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("two ranks that return concurrently can call each other") {
  Cluster cluster(4, expose_returns);
  cluster[0].go_on_without({2, 3}, 0, "", true);
  for (int round = 0; round < 10; ++round) {
    CAPTURE(round);
    lose(cluster, 2);
    lose(cluster, 3);
    std::array<base::Error, 2> errors;
    std::vector<std::thread> threads;
    for (const int rank : {2, 3}) {
      threads.emplace_back([&, rank] {
        const int other = 5 - rank;
        errors[static_cast<size_t>(rank - 2)] = error_of([&] {
          cluster.bring_back(rank);
          Agent& agent = cluster[rank];
          expect(eventually([&] { return agent.is_here(other); }), "the other one did not come");
          expect(agent.rpc_sync<&add>(other, rank, 1) == rank + 1, "a wrong sum");
        });
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const base::Error& error : errors) REQUIRE(error.message == "(no error)");
    check_all_call_all(cluster);
  }
  check_all_gone_and_shutdown(cluster);
}

TEST_CASE("a rank that may not return is refused, and so is a rank whose place is not empty") {
  Cluster cluster(4, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  CHECK(refusal_of(2, cluster).kind == ErrorKind::kRendezvous);  // because rank 2 is alive
  CHECK(refusal_of(1, cluster).kind == ErrorKind::kRendezvous);
  cluster[0].go_on_without({2}, 0, "", false);
  CHECK(lose(cluster, 2).job_goes_on);
  CHECK(refusal_of(2, cluster).kind == ErrorKind::kRendezvous);
  CHECK(cluster[1].rpc_sync<&add>(3, 1, 1) == 2);
  // The job cannot continue without a rank that go_on_without() did not name.
  const Loss loss = lose(cluster, 1);
  CHECK_FALSE(loss.job_goes_on);
  CHECK_FALSE(cluster[3].local<Losses>().of(1, 0)->job_goes_on);
  CHECK(refusal_of(1, cluster).kind == ErrorKind::kRendezvous);
  for (const int rank : {0, 3}) {
    const base::Error error = error_of([&] { cluster[rank].shutdown(); });
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == 1);
  }
}

TEST_CASE("a process that is lost while it prepares has used its incarnation") {
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  lose(cluster, 2);
  std::optional<RawRank> raw(cluster[0].port());
  raw->join(2);
  const auto frame = next_word(*raw);
  REQUIRE(frame);
  REQUIRE(frame->first.kind == wire::FrameKind::kDirectory);
  const wire::Directory directory = wire::decode_directory(frame->second);
  CHECK(directory.ranks.at(2).incarnation == 1);
  CHECK(directory.ranks.at(2).is_here);
  CHECK(refusal_of(2, cluster).kind == ErrorKind::kRendezvous);  // `raw` has joined as rank 2
  for (const int other : {0, 1}) CHECK_FALSE(cluster[other].is_here(2));

  SECTION("another process can take the place") {
    raw.reset();
    let_rank_0_catch_up(cluster[0].port());
    cluster.bring_back(2);
    CHECK(cluster[2].incarnation() == 2);
    check_all_call_all(cluster);
    CHECK_FALSE(cluster[0].local<Losses>().of(2, 1));  // no layer was notified of the loss
    cluster.shutdown();
  }
  SECTION("the others end without it") {
    std::vector<std::thread> ending;
    for (const int rank : {0, 1}) {
      ending.emplace_back([&, rank] { cluster[rank].shutdown(); });
      wait_for_its_end(cluster[rank]);
    }
    CHECK(eventually([&] {
      return std::ranges::any_of(cluster[0].waits(), [](const rpc::Wait& wait) {
        return wait.what == "the end of rank 2";
      });
    }));
    raw.reset();
    for (std::thread& thread : ending) thread.join();
  }
  SECTION("after it is prepared it counts as a loss") {
    raw->send(wire::FrameKind::kPrepared, no_devices());
    const auto go = next_word(*raw);
    REQUIRE(go);
    CHECK(go->first.kind == wire::FrameKind::kGo);
    for (const int other : {0, 1}) CHECK(cluster[other].worker(2).incarnation == 1);
    raw.reset();
    for (const int other : {0, 1}) {
      const Losses& losses = cluster[other].local<Losses>();
      CHECK(eventually([&] { return losses.of(2, 1).has_value(); }));
    }
    cluster.bring_back(2);
    check_all_call_all(cluster);
    cluster.shutdown();
  }
}

TEST_CASE("no process can return when all others are in shutdown") {
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  lose(cluster, 2);
  std::thread ending([&] { cluster[1].shutdown(); });
  base::Error refusal;
  cluster[0].shutdown({}, [&] { refusal = refusal_of(2, cluster); });
  ending.join();
  CHECK(refusal.kind == ErrorKind::kRendezvous);
}

TEST_CASE("before go_on_without() names a rank its loss ends the job") {
  Cluster cluster(3, expose_returns);
  CHECK_FALSE(lose(cluster, 2).job_goes_on);
  CHECK(refusal_of(2, cluster).kind == ErrorKind::kRendezvous);
  CHECK(error_of([&] { cluster[1].shutdown(); }).rank == 2);
}

TEST_CASE("a job ends with the loss after which too few are left, and reports it") {
  Cluster cluster(4, expose_returns);
  cluster[0].go_on_without({1, 2, 3}, 2, "fewer than two are left", true);
  CHECK(lose(cluster, 1).job_goes_on);
  cluster.bring_back(1);  // counts as alive from now on
  CHECK(lose(cluster, 2).job_goes_on);
  const Loss last = lose(cluster, 3);
  CHECK_FALSE(last.job_goes_on);
  CHECK(contains(last.error.message, "rank 3"));
  CHECK(contains(last.error.message, "; fewer than two are left"));
  for (const int rank : {0, 1}) {
    const base::Error error = error_of([&] { cluster[rank].shutdown(); });
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(contains(error.message, "fewer than two are left"));
  }
}

TEST_CASE("the error of an unsuitable new process ends the job only after note_of_use()") {
  const bool is_of_use = GENERATE(false, true);
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  lose(cluster, 2);
  cluster.bring_back(2);
  if (is_of_use) cluster[0].note_of_use(2);
  CHECK(cluster[2].rpc_sync<&add>(0, 1, 2) == 3);  // ensures that rank 0 has handled note_of_use()
  cluster[2].abort({ErrorKind::kBadData, "other files", -1, {}});
  const Losses& losses = cluster[0].local<Losses>();
  REQUIRE(eventually([&] { return losses.of(2, 1).has_value(); }));
  CHECK(losses.of(2, 1)->job_goes_on == !is_of_use);
  CHECK(losses.of(2, 1)->error.kind == ErrorKind::kBadData);
  cluster.kill(2);
  if (is_of_use) return;
  cluster.bring_back(2);
  check_all_call_all(cluster);
  cluster.shutdown();
}

TEST_CASE("a job continues without a rank that lacks resources, but not after bad data") {
  const auto [kind, goes_on] = GENERATE(table<ErrorKind, bool>({{ErrorKind::kPeerLost, true},
                                                                {ErrorKind::kResources, true},
                                                                {ErrorKind::kBadData, false},
                                                                {ErrorKind::kNotFinite, false}}));
  Cluster cluster(3, expose_returns);
  cluster[0].go_on_without({2}, 0, "", true);
  cluster[2].abort({kind, "no more of it", -1, {}});
  for (const int rank : {0, 1}) {
    const Losses& losses = cluster[rank].local<Losses>();
    REQUIRE(eventually([&] { return losses.of(2, 0).has_value(); }));
    CHECK(losses.of(2, 0)->job_goes_on == goes_on);
    CHECK(losses.of(2, 0)->error.kind == kind);
  }
  cluster.kill(2);
  if (!goes_on) {
    CHECK(error_of([&] { cluster[1].shutdown(); }).kind == kind);
    return;
  }
  cluster.bring_back(2);
  check_all_call_all(cluster);
  cluster.shutdown();
}

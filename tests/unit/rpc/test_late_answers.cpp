// Tests answers that arrive after the agent has ended, and calls that do not reach their peer.
#include <atomic>
#include <stdexcept>
#include <thread>

#include "gate.h"
#include "rref_support.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using rpc::Agent;

namespace {

/// A type whose user-supplied encoder throws.
struct Unwritable {};

}  // namespace

namespace distrain::rpc {

template <>
struct Serializer<Unwritable> {
  static void encode(Encoder&, const Unwritable&) { throw std::runtime_error("no ink"); }
  static Unwritable decode(Decoder&) { return {}; }
};

}  // namespace distrain::rpc

namespace {

std::vector<base::Promise<int64_t>> g_promises;
std::vector<rpc::ReplyPtr> g_replies;
std::atomic<size_t> g_asked;

base::Future<int64_t> answer_later() {
  const base::Future<int64_t> future = g_promises[g_asked].future();
  ++g_asked;
  return future;
}
void keep_reply(rpc::CallContext&, rpc::Decoder&, const rpc::ReplyPtr& reply) {
  g_replies[g_asked] = reply;
  ++g_asked;
}
void take(const Unwritable&) {}
Unwritable give_unwritable() { return {}; }
void pass_unwritable_on(rpc::CallContext& call) { call.agent.rpc_sync<&take>(2, Unwritable()); }
Tracked make_of_text(std::string) { return Tracked(1); }

void expose_late(Agent& agent) {
  expose_tracked(agent);
  agent.expose<&answer_later>("answer_later");
  agent.expose_raw("keep_reply", &keep_reply);
  agent.expose<&take>("take");
  agent.expose<&give_unwritable>("give");
  agent.expose<&pass_unwritable_on>("pass_unwritable_on");
  agent.expose<&make_of_text>("make_of_text");
}

/// Calls rank 1 `calls` times, and waits until each call runs. answer() answers them later.
std::vector<base::Future<void>> ask(Cluster& cluster, size_t calls) {
  g_promises.clear();
  g_promises.resize(calls);
  g_replies.assign(calls, nullptr);
  g_asked = 0;
  std::vector<base::Future<void>> futures;
  for (size_t i = 0; i < calls; ++i) {
    const rpc::To to = rpc::To(1).without_deadline();
    futures.push_back(i % 2 == 0 ? cluster[0].rpc_async<&answer_later>(to).then(
                                       cluster[0].inline_executor(), [](int64_t) {})
                                 : cluster[0]
                                       .call_raw(to, "keep_reply", [](rpc::Encoder&) {})
                                       .then(cluster[0].inline_executor(), [](rpc::RawReply&) {}));
    eventually([&] { return g_asked == i + 1; });
  }
  return futures;
}

/// Answers call `i`: with a value, with an error, or by destroying the reply without an answer.
void answer(size_t i) {
  if (i % 2 == 0) {
    g_promises[i].set(1);
  } else if (i % 3 == 0) {
    g_replies[i]->send([](rpc::Encoder& encoder) { encoder.out.put(int64_t{1}); });
  } else if (i % 3 == 1) {
    g_replies[i]->fail({ErrorKind::kBadData, "none", -1, {}});
  }
  g_replies[i] = nullptr;
}

}  // namespace

TEST_CASE("an answer may arrive after the agent has ended") {
  Cluster cluster(2, expose_late);
  const auto futures = ask(cluster, 12);
  cluster.kill(1);
  for (const auto& future : futures) {
    CHECK(error_of([&] { future.wait(); }).kind == ErrorKind::kPeerLost);
  }
  for (size_t i = 0; i < 12; ++i) answer(i);
}

TEST_CASE("an answer may arrive while the agent ends") {
  for (int round = 0; round < 10; ++round) {
    Cluster cluster(2, expose_late);
    const auto futures = ask(cluster, 60);
    std::atomic<bool> begun{false};
    std::thread answering([&] {
      begun = true;
      for (size_t i = 0; i < 60; ++i) answer(i);
    });
    eventually([&] { return begun.load(); });
    cluster.kill(1);
    answering.join();
    for (const auto& future : futures) CHECK(future.wait_until(base::deadline_after(20s)));
  }
}

TEST_CASE("a future may outlive the agent that made the call") {
  Cluster cluster(2, expose_late);
  const auto futures = ask(cluster, 4);
  cluster.kill(0);
  for (const auto& future : futures) {
    CHECK(error_of([&] { future.wait(); }).kind == ErrorKind::kCancelled);
  }
  for (size_t i = 0; i < 4; ++i) answer(i);
}

TEST_CASE("remote() that cannot be sent fails for all that wait for its value") {
  rpc::AgentOptions options;
  options.rpc_timeout = 10s;
  Cluster cluster(3, expose_late, options);
  const std::string too_long(wire::Limits{}.max_meta_bytes, 'x');
  const Ref broken = cluster[0].remote<&make_of_text>(1, too_long);
  const base::Error own = error_of([&] { broken.rpc_sync<&Tracked::get>(); });
  CHECK(own.kind == ErrorKind::kInvalid);
  CHECK(own.rank == 0);
  const base::Error others = error_of([&] { cluster[0].rpc_sync<&value_of>(2, broken); });
  CHECK(others.kind == ErrorKind::kInvalid);
  CHECK(others.message == own.message);
  CHECK(value_of(cluster[0].remote<&make_of_text>(1, std::string("short"))) == 1);
}

TEST_CASE("a value that cannot be encoded is the fault of its own rank") {
  Cluster cluster(3, expose_late);
  const base::Error own = error_of([&] { cluster[0].rpc_sync<&take>(1, Unwritable()); });
  CHECK(own.kind == ErrorKind::kInvalid);
  CHECK(own.message == "no ink");
  CHECK(own.rank == 0);
  CHECK(own.op == "take");
  CHECK(error_of([&] { cluster[0].rpc_sync<&pass_unwritable_on>(1); }).rank == 1);
  CHECK(error_of([&] { cluster[0].rpc_sync<&give_unwritable>(1); }).rank == 1);
  CHECK(value_of(cluster[0].remote_new<Tracked>(1, 4)) == 4);  // rank 1 is not lost
}

TEST_CASE("an error of a message handler is not the sender's fault") {
  Cluster cluster(2, expose_late);
  constexpr uint16_t kLane = 20;
  cluster[1].open_channel(kLane).set_handler(
      {[](const rpc::ChannelMessage&) { throw std::runtime_error("no room here"); }, {}});
  cluster[0].open_channel(kLane).send(1, {}, {}, nullptr);
  base::Error error;
  eventually([&] {
    error = error_of([&] { cluster[1].call_raw(0, "unknown", [](rpc::Encoder&) {}).wait(); });
    return error.kind != ErrorKind::kNotFound;
  });
  CHECK(error.rank == 1);
  CHECK(error.message == "no room here");
  cluster[1].open_channel(kLane).set_handler({});  // returns when the failed handler has ended
}

TEST_CASE("messages that arrive while a handler is replaced wait for the new handler") {
  Cluster cluster(1, expose_late);
  rpc::Channel& channel = cluster[0].open_channel(20);
  base::Promise<void> entered, go;
  std::atomic<uint64_t> to_first{0}, to_second{0};
  channel.set_handler({.on_message = [&](const rpc::ChannelMessage& message) {
    if (message.tag.a > 0) {
      ++to_first;
      return;
    }
    entered.set();
    go.future().wait();
  }});
  std::thread sender([&] { channel.send(0, {}, {}, nullptr); });
  entered.future().wait();
  std::thread replacer([&] {
    channel.set_handler({.on_message = [&](const rpc::ChannelMessage&) { ++to_second; }});
  });
  uint64_t sent = 0;
  do {
    channel.send(0, {++sent, 0, 0}, {}, nullptr);
    std::this_thread::yield();
  } while (to_first == sent);  // until set_handler() waits for the first handler to end
  go.set();
  sender.join();
  replacer.join();
  CHECK(to_first == sent - 1);
  CHECK(to_second == 1);
}

// Tests the reference counting of three RRefContexts whose messages the test delivers.
#include <array>
#include <deque>
#include <map>
#include <random>

#include "rref/rref_context.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using base::ErrorKind;
using rpc::RRefContext;
using rpc::RRefHandle;
using testing::Cluster;
using testing::error_of;
using Handle = std::shared_ptr<RRefHandle>;
using wire::FrameKind;

namespace {

constexpr int kRanks = 3;

struct Control {
  FrameKind kind;
  uint64_t id, fork, parent;
};
// A message in flight: a control message, a call with an RRef, an answer, or a result with an RRef.
struct Item {
  std::optional<Control> control;
  std::optional<rpc::InMessage> shared;
  std::vector<std::shared_ptr<const void>> holds;  // RRefs kept alive until the answer arrives
  bool is_call = false;
};

class Net {
 public:
  explicit Net(Cluster& cluster, unsigned seed = 0) : random_(seed) {
    for (int rank = 0; rank < kRanks; ++rank) {
      contexts_.push_back(std::make_shared<RRefContext>(
          cluster[rank], rank,
          [this, rank](int to, FrameKind kind, uint64_t id, uint64_t fork, uint64_t parent) {
            push(rank, to, Control{kind, id, fork, parent});
          },
          executor_));
    }
  }
  ~Net() {
    for (auto& held : holders) held.clear();
    lines_.clear();
    for (const auto& context : contexts_) context->close();
  }

  RRefContext& at(int rank) { return *contexts_[static_cast<size_t>(rank)]; }
  Handle make(int rank, int value = 1) {
    Handle handle = at(rank).new_local();
    handle->owned()->type = typeid(int);
    handle->owned()->value.set(
        std::shared_ptr<int>(new int(value), [this](int* p) { --alive, delete p; }));
    ++alive;
    return handle;
  }
  void share(int from, int to, const Handle& handle, bool as_argument) {
    rpc::OutMessage out;
    rpc::Encoder encoder(out);
    encoder.rrefs = &at(from);
    encoder.to = to;
    encoder.is_argument = as_argument;
    rpc::encode_rref(encoder, handle);
    Item item;
    if (as_argument) {
      item.holds = std::move(encoder.holds);
      item.is_call = true;
    }
    item.shared = rpc::to_self(std::move(out), {}, from);
    lines_[{from, to}].push_back(std::move(item));
  }
  void push(int from, int to, const Control& control, bool again = true) {
    Item item;
    item.control = control;
    lines_[{from, to}].push_back(std::move(item));
    if (again && random_() % 3 == 0) push(from, to, control, false);
  }
  /// Delivers the oldest item from `from` to `to`; returns false if there is none.
  bool deliver(int from, int to) {
    auto& line = lines_[{from, to}];
    if (line.empty()) return false;
    Item item = std::move(line.front());
    line.pop_front();
    if (item.control) {
      const auto& [kind, id, fork, parent] = *item.control;
      at(to).on_control(kind, id, fork, from, static_cast<int>(parent));
    } else if (item.shared) {
      at(to).receive(*item.shared);
      if (random_() % 8 != 0) {  // sometimes the message is dropped without being decoded
        rpc::Decoder decoder(*item.shared);
        holders[static_cast<size_t>(to)].push_back(rpc::decode_rref(decoder));
      }
      if (item.is_call) {
        Item answer;
        answer.holds = std::move(item.holds);
        lines_[{to, from}].push_back(std::move(answer));
      }
    }
    return true;
  }
  void deliver_all() {
    for (bool any = true; any;) {
      any = false;
      for (int i = 0; i < kRanks * kRanks; ++i) any = deliver(i / kRanks, i % kRanks) || any;
    }
  }
  bool shares_in_flight() const {
    for (const auto& [ends, line] : lines_) {
      for (const Item& item : line) {
        if (item.shared) return true;
      }
    }
    return false;
  }

  std::array<std::vector<Handle>, kRanks> holders;
  int alive = 0;

 private:
  std::mt19937 random_;
  base::InlineExecutor executor_;
  std::vector<std::shared_ptr<RRefContext>> contexts_;
  std::map<std::pair<int, int>, std::deque<Item>> lines_;
};

}  // namespace

TEST_CASE("in any order of delivery, the value lives exactly as long as needed") {
  Cluster cluster(kRanks);
  for (unsigned seed = 0; seed < 400; ++seed) {
    CAPTURE(seed);
    Net net(cluster, seed);
    std::mt19937 random(seed + 1000);
    net.holders[0].push_back(net.make(0));
    for (int step = 0; step < 150; ++step) {
      const auto from = random() % kRanks;
      auto& held = net.holders[from];
      const auto to = static_cast<int>(random() % kRanks);
      switch (random() % 4) {
        case 0:
          if (!held.empty()) {
            net.share(static_cast<int>(from), to, held[random() % held.size()], random() % 2 == 0);
          }
          break;
        case 1:
          if (!held.empty()) held.erase(held.begin() + static_cast<long>(random() % held.size()));
          break;
        default:
          net.deliver(static_cast<int>(from), to);
      }
      bool wanted = net.shares_in_flight();
      for (const auto& handles : net.holders) wanted = wanted || !handles.empty();
      if (wanted) REQUIRE(net.alive == 1);
    }
    for (auto& handles : net.holders) handles.clear();
    net.deliver_all();
    for (auto& handles : net.holders) handles.clear();
    net.deliver_all();
    REQUIRE(net.alive == 0);
    for (int rank = 0; rank < kRanks; ++rank) REQUIRE(net.at(rank).live() == 0);
  }
}

TEST_CASE("repeated control messages, and those for unknown values, have no effect") {
  Cluster cluster(kRanks);
  Net net(cluster);
  auto& owner = net.at(0);
  Handle handle = net.make(0);
  const uint64_t id = handle->id();
  const uint64_t fork = rpc::make_id(1, 77);
  owner.on_control(FrameKind::kRRefDelete, id, fork, 1, 0);  // before the kRRefFork of this fork
  owner.on_control(FrameKind::kRRefFork, id, fork, 1, 2);
  owner.on_control(FrameKind::kRRefFork, id, fork, 1, 2);
  owner.on_control(FrameKind::kRRefDelete, id, fork, 1, 0);
  owner.on_control(FrameKind::kRRefAccept, id, fork, 1, 0);
  owner.on_control(FrameKind::kRRefDelete, rpc::make_id(2, 5), rpc::make_id(2, 6), 2, 0);
  CHECK(owner.live() == 1);
  CHECK(net.alive == 1);
  owner.on_control(FrameKind::kRRefFork, id, rpc::make_id(1, 78), 1, 2);
  handle = nullptr;
  CHECK(net.alive == 1);
  owner.on_control(FrameKind::kRRefDelete, id, rpc::make_id(1, 78), 1, 0);
  CHECK(net.alive == 0);
  CHECK(owner.live() == 0);
  // Messages for a released value have no effect, either.
  owner.on_control(FrameKind::kRRefFork, id, rpc::make_id(1, 79), 1, 2);
  owner.on_control(FrameKind::kRRefDelete, id, rpc::make_id(1, 78), 1, 0);
  CHECK(owner.live() == 0);
}

TEST_CASE("a lost rank holds no value, even if its messages arrive late") {
  Cluster cluster(kRanks);
  Net net(cluster);
  auto& owner = net.at(0);
  Handle handle = net.make(0);
  const uint64_t id = handle->id();
  owner.on_control(FrameKind::kRRefFork, id, rpc::make_id(1, 77), 1, 2);
  owner.on_peer_lost(1, {base::ErrorKind::kPeerLost, "rank 1 is gone", 1, {}});
  owner.on_control(FrameKind::kRRefFork, id, rpc::make_id(1, 78), 1, 2);
  CHECK(owner.target(rpc::make_id(1, 79), rpc::make_id(1, 80), 1));  // from a call in flight
  handle = nullptr;
  CHECK(net.alive == 0);
  CHECK(owner.live() == 0);
}

TEST_CASE("a reference to a released value fails; a reference to a future value waits") {
  Cluster cluster(kRanks);
  Net net(cluster);
  Handle handle = net.make(0);
  net.share(0, 1, handle, true);
  net.deliver(0, 1);
  if (net.holders[1].empty()) return;
  net.share(1, 0, net.holders[1][0], true);
  net.deliver(1, 0);  // the answer to the first call
  // The caller abandons the second call and drops all references before the owner handles the call.
  const uint64_t id = handle->id();
  rpc::InMessage late;
  late.tickets.push_back({id, 0, 1, 0, 1});
  handle = nullptr;
  net.holders[1].clear();
  net.deliver_all();
  net.holders[0].clear();
  net.deliver_all();
  REQUIRE(net.alive == 0);
  net.at(0).receive(late);
  CHECK(error_of([&] { late.rrefs[0]->local(typeid(int)); }).kind == ErrorKind::kNotFound);
  late.rrefs.clear();
  CHECK(net.at(0).live() == 0);

  // Rank 1 refers to a value that it will create on rank 0; rank 2 asks for it first.
  const Handle promised = net.at(1).new_remote(0);
  rpc::InMessage early;
  early.tickets.push_back({promised->id(), 0, 1, 0, 2});
  net.at(0).receive(early);
  CHECK_FALSE(early.rrefs[0]->owned()->value.future().done());
  // Rank 1 dies before it creates the value.
  net.at(0).on_peer_lost(1, base::Error{ErrorKind::kPeerLost, "dead", 1, {}});
  CHECK(error_of([&] { early.rrefs[0]->local(typeid(int)); }).kind == ErrorKind::kPeerLost);
  // If the first request for a value comes after the loss, the request fails at once.
  const Handle another = net.at(1).new_remote(0);
  rpc::InMessage after;
  after.tickets.push_back({another->id(), 0, 1, 0, 2});
  net.at(0).receive(after);
  CHECK(error_of([&] { after.rrefs[0]->local(typeid(int)); }).kind == ErrorKind::kPeerLost);
}

TEST_CASE("using a value that was released by a rank's loss fails with the error of that rank") {
  Cluster cluster(kRanks);
  Net net(cluster);
  Handle handle = net.make(0);
  const uint64_t id = handle->id();
  net.share(0, 1, handle, true);
  handle = nullptr;
  REQUIRE(net.alive == 1);
  net.at(0).on_peer_lost(1, {ErrorKind::kNotFinite, "the loss is NaN", 1, {}});
  REQUIRE(net.alive == 0);
  rpc::InMessage late;  // rank 2 uses its reference before rank 0 knows of it
  late.tickets.push_back({id, 0, 1, 0, 2});
  net.at(0).receive(late);
  const base::Error error = error_of([&] { late.rrefs[0]->local(typeid(int)); });
  CHECK(error.kind == ErrorKind::kNotFinite);
  CHECK(error.rank == 1);
}

TEST_CASE("a lost rank is not waited for") {
  Cluster cluster(kRanks);
  const base::Error lost{ErrorKind::kPeerLost, "dead", 2, {}};
  Net net(cluster);
  Handle handle = net.make(0);
  net.share(0, 2, handle, true);
  handle = nullptr;
  CHECK(net.alive == 1);
  net.at(0).on_peer_lost(2, lost);
  CHECK(net.alive == 0);
  CHECK(net.at(0).live() == 0);

  // Rank 1 has shared rank 0's value with rank 2 and waits for rank 0's acknowledgement.
  handle = net.make(0);
  while (net.holders[1].empty()) {
    net.share(0, 1, handle, false);
    net.deliver(0, 1);
  }
  net.share(1, 2, net.holders[1][0], false);
  net.holders[1].clear();
  CHECK(net.at(1).live() >= 1);
  net.at(1).on_peer_lost(2, lost);
  net.deliver_all();
  CHECK(net.at(1).live() == 0);
}

TEST_CASE("a value that is first asked for when its rank has ended is not waited for") {
  Cluster cluster(kRanks);
  Net net(cluster);
  net.at(0).fail_unset({ErrorKind::kCancelled, "this rank is shutting down", 0, {}});
  const auto late = net.at(0).target(17, 18, 1);
  REQUIRE(late->value.future().done());
  CHECK(error_of([&] { late->value.future().wait(); }).kind == ErrorKind::kCancelled);
}

TEST_CASE("tickets that a correct rank would not send are protocol errors") {
  Cluster cluster(kRanks);
  Net net(cluster);
  const auto receive = [&](rpc::RRefTicket ticket) {
    return error_of([&] {
      rpc::InMessage message;
      message.tickets.push_back(ticket);
      net.at(0).receive(message);
    });
  };
  CHECK(receive({1, 7, 1, 2, 0}).kind == ErrorKind::kProtocol);  // no such owner
  CHECK(receive({1, 0xFFF, 1, 2, 0}).kind == ErrorKind::kProtocol);
  CHECK(receive({1, 0, 1, 2, 9}).kind == ErrorKind::kProtocol);   // no such parent
  CHECK(receive({1, 1, 1, 2, 1}).kind == ErrorKind::kProtocol);   // rank 0 is not the owner
  CHECK(receive({1, 0, 3, 2, 1}).kind == ErrorKind::kProtocol);   // a fork for the owner itself
  CHECK(receive({1, 1, 99, 2, 1}).kind == ErrorKind::kProtocol);  // no such kind
  rpc::InMessage message;
  wire::Bytes body;
  wire::Writer(body).put(uint32_t{0});
  message.body = body;
  CHECK(error_of([&] {
          rpc::Decoder decoder(message);
          rpc::decode_rref(decoder);
        }).kind == ErrorKind::kProtocol);
  CHECK(net.at(0).live() == 0);
}

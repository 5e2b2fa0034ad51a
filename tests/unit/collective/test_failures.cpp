#include <numeric>

#include <ATen/ATen.h>

#include "../src/collective/core.h"
#include "distrain/wire/frame.h"
#include "support/catch.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using std::chrono::milliseconds;

namespace {

using Call = std::function<collective::Pending(Backend&)>;

// Runs calls[r] on each rank r and returns the error of each rank.
std::vector<base::Error> errors_of(TestGroup& group, const std::vector<Call>& calls) {
  std::vector<base::Error> errors(calls.size());
  run_ranks(int(calls.size()), [&](int rank) {
    errors[size_t(rank)] = thrown_by([&] { calls[size_t(rank)](group[rank]).wait(); });
  });
  return errors;
}

}  // namespace

TEST_CASE("two ranks that call different operations both get an error") {
  const bool shared_memory = GENERATE(true, false);
  const Call sum = [](Backend& b) { return b.allreduce(at::ones({7})); };
  const Call longer = [](Backend& b) { return b.allreduce(at::ones({8})); };
  const Call large = [](Backend& b) { return b.allreduce(at::ones({100000})); };
  const Call doubles = [](Backend& b) { return b.allreduce(at::ones({7}, at::kDouble)); };
  const Call max = [](Backend& b) { return b.allreduce(at::ones({7}), ReduceOp::MAX); };
  const Call root0 = [](Backend& b) { return b.broadcast(at::ones({7}), 0); };
  const Call root1 = [](Backend& b) { return b.broadcast(at::ones({7}), 1); };
  const Call barrier = [](Backend& b) { return b.enter_barrier(); };
  const Call gather = [](Backend& b) {
    return b.allgather(at::ones({7}), {at::ones({7}), at::ones({7})});
  };
  struct Case {
    Call first, second;
    std::string first_text, second_text;
  };
  const std::vector<Case> cases = {
      {sum, longer, "allreduce(sum, Float, 28 bytes)", "allreduce(sum, Float, 32 bytes)"},
      {sum, large, "28 bytes", "400000 bytes"},
      {sum, doubles, "Float", "Double"},
      {sum, max, "sum", "max"},
      {sum, root0, "allreduce", "broadcast(root 0"},
      {sum, root1, "allreduce", "broadcast(root 1"},
      {root0, root1, "root 0", "root 1"},
      {root1, root0, "root 1", "root 0"},
      {barrier, sum, "barrier", "allreduce"},
      {gather, root0, "allgather", "broadcast"},
  };
  for (const Case& test : cases) {
    TestGroup group(2, {.shared_memory = shared_memory});
    for (const base::Error& error : errors_of(group, {test.first, test.second})) {
      INFO(error.message);
      CHECK(error.kind == ErrorKind::kInvalid);
      CHECK(contains(error.message, "rank 0"));
      CHECK(contains(error.message, "rank 1"));
      CHECK(contains(error.message, test.first_text));
      CHECK(contains(error.message, test.second_text));
    }
    // The ranks are still synchronized, so the next operation succeeds.
    run_ranks(2, [&](int rank) { group[rank].allreduce(at::ones({3})).wait(); });
  }
}

TEST_CASE("one of eight ranks that calls another operation is named") {
  const bool shared_memory = GENERATE(true, false);
  // With fewer CPUs than ranks, the last rank does not reduce a part of a larger tensor.
  const int64_t count = GENERATE(7, 100000);
  TestGroup group(8, {.shared_memory = shared_memory});
  std::vector<Call> calls(8, [](Backend& b) { return b.allreduce(at::ones({7})); });
  calls[7] = [&](Backend& b) { return b.allreduce(at::ones({count}), ReduceOp::MAX); };
  for (const base::Error& error : errors_of(group, calls)) {
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(contains(error.message, "rank 7"));
  }
}

TEST_CASE("a rank that is missing at the deadline is named") {
  const bool shared_memory = GENERATE(true, false);
  const int64_t count = GENERATE(5, 100000);
  TestGroup group(4, {.shared_memory = shared_memory});
  const auto first = group[0].allreduce(at::ones({count}));
  const auto second = group[2].allreduce(at::ones({count}));
  group.network.await_deliveries();
  for (const auto& pending : {first, second}) {
    expire(pending);
    const base::Error error = thrown_by([&] { pending.wait(); });
    INFO(error.message);
    CHECK(error.kind == ErrorKind::kDeadline);
    CHECK(error.rank == 1);
    CHECK(contains(error.message, "from rank 1, 3"));
  }
}

TEST_CASE("a call, the wait of a Work and a future each have a timeout") {
  const bool shared_memory = GENERATE(true, false);
  TestGroup group(2, {.shared_memory = shared_memory});
  Backend& backend = group[0];
  const at::Tensor x = at::ones({5});
  CHECK(thrown_by([&] { backend.allreduce(x, ReduceOp::SUM, milliseconds(30)).wait(); }).kind ==
        ErrorKind::kDeadline);
  std::vector<at::Tensor> tensors = {x};
  auto work = static_cast<c10d::Backend&>(backend).allreduce(tensors);
  CHECK(thrown_by([&] { work->wait(milliseconds(30)); }).kind == ErrorKind::kDeadline);
  CHECK(work->isCompleted());
  CHECK_FALSE(work->isSuccess());
  CHECK(thrown_by([&] { std::rethrow_exception(work->exception()); }).kind == ErrorKind::kDeadline);
  auto future = backend.allreduce(x, ReduceOp::SUM, milliseconds(30)).future();
  CHECK(thrown_by([&] { future.wait(); }).kind == ErrorKind::kDeadline);
  auto polled = backend.allreduce(x, ReduceOp::SUM, milliseconds(30));
  while (!polled.done()) std::this_thread::yield();
  CHECK(thrown_by([&] { polled.wait(); }).kind == ErrorKind::kDeadline);

  const auto pending = backend.allreduce(x);
  CHECK_FALSE(pending.wait_until(base::deadline_after(milliseconds(20))));
  CHECK_FALSE(pending.done());
  backend.setTimeout(milliseconds(20));
  CHECK(thrown_by([&] { backend.enter_barrier().wait(); }).kind == ErrorKind::kDeadline);
}

TEST_CASE("messages of a late rank do not disturb later operations") {
  const bool shared_memory = GENERATE(true, false);
  TestGroup group(2, {.shared_memory = shared_memory});
  const at::Tensor x = at::ones({5});
  const auto late = group[0].allreduce(x);
  expire(late);
  CHECK(thrown_by([&] { late.wait(); }).kind == ErrorKind::kDeadline);
  run_ranks(2, [&](int rank) {
    if (rank == 1) group[1].allreduce(at::ones({5})).wait();  // rank 0 had sent its data
    const at::Tensor y = at::ones({5});
    group[rank].allreduce(y).wait();
    RANK_CHECK(y.eq(2).all().item<bool>());
  });
}

TEST_CASE("a lost rank fails in-flight and later operations") {
  const int64_t count = GENERATE(5, 100000);
  TestGroup group(3);
  std::vector<collective::Pending> pending;
  for (int rank : {0, 2}) pending.push_back(group[rank].allreduce(at::ones({count})));
  std::thread killer([&] {
    std::this_thread::sleep_for(milliseconds(30));
    group.network.kill(1);
  });
  for (auto& one : pending) {
    const base::Error error = thrown_by([&] { one.wait(); });
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == 1);
  }
  killer.join();
  for (int rank : {0, 2}) {
    const base::Error later = thrown_by([&] { group[rank].broadcast(at::ones({count})).wait(); });
    CHECK(later.kind == ErrorKind::kPeerLost);
    CHECK(later.rank == 1);
  }
}

TEST_CASE("a rank that left because another rank failed is not blamed") {
  TestGroup group(2);
  const auto pending = group[0].allreduce(at::ones({5}));
  group.network.kill(1, 7);
  CHECK(thrown_by([&] { pending.wait(); }).rank == 7);
  CHECK(thrown_by([&] { group[0].allreduce(at::ones({5})).wait(); }).rank == 7);
}

TEST_CASE("the loss of a rank outside the group does not matter") {
  FakeNetwork network(3);
  base::ThreadPool pool({.name = "test"});
  const collective::Group pair{1, {0, 2}};
  auto first = c10::make_intrusive<Backend>(network.channel(0), pool, pair);
  auto second = c10::make_intrusive<Backend>(network.channel(2), pool, pair);
  network.kill(1);
  run_ranks(2, [&](int rank) {
    for (int i = 0; i < 10; ++i) (rank ? second : first)->allreduce(at::ones({4})).wait();
  });
}

TEST_CASE("a rank that refuses is named on the others, and the group stays synchronized") {
  const int64_t count = GENERATE(5, 100000);
  TestGroup group(3);
  run_ranks(3, [&](int rank) {
    const at::Tensor x = at::ones({count});
    group[rank].allreduce(x).wait();
    if (rank == 1) {
      group[1].refuse(2, {ErrorKind::kBadData, "the file ends here", 1, {}});
    } else {
      const auto first = group[rank].allreduce(x);
      const auto second = group[rank].enter_barrier();
      for (const auto& pending : {first, second}) {
        const base::Error error = thrown_by([&] { pending.wait(); });
        RANK_CHECK(error.kind == ErrorKind::kBadData);
        RANK_CHECK(error.rank == 1);
        RANK_CHECK(error.message == "the file ends here");
      }
    }
    const at::Tensor y = at::ones({count});
    group[rank].allreduce(y).wait();
    RANK_CHECK(y.eq(3).all().item<bool>());
  });
}

TEST_CASE("wrong arguments throw at once and do not count as an operation") {
  TestGroup group(1);
  Backend& backend = group[0];
  const auto kind = [](auto f) { return thrown_by(f).kind; };
  CHECK(kind([&] { backend.allreduce(at::Tensor()); }) == ErrorKind::kInvalid);
  CHECK(kind([&] { backend.allreduce(at::ones({3}).to_sparse()); }) == ErrorKind::kInvalid);
  // A tensor that cannot be sent or written gives an error of one line.
  const at::Tensor expanded = at::ones({1}).expand({3});
  for (const auto& [tensor, what] : {
           std::pair{expanded, "expanded"},
           std::pair{at::_neg_view(at::ones({3})), "resolve_neg()"},
           std::pair{at::ones({3}, at::kComplexFloat).conj(), "resolve_conj()"},
           std::pair{at::_nested_tensor_from_tensor_list({at::ones({1}), at::ones({2})}), "nested"},
           std::pair{at::empty({3}, at::kMeta), "meta"},
       }) {
    for (const bool reduces : {false, true}) {
      const base::Error error = thrown_by([&, &argument = tensor] {
        std::vector<at::Tensor> all{argument};
        if (reduces) backend.allreduce(all, c10d::AllreduceOptions());
        if (!reduces) backend.broadcast(all, c10d::BroadcastOptions());
      });
      CHECK(error.kind == ErrorKind::kInvalid);
      CHECK(error.message.find(what) != std::string::npos);
      CHECK(error.message.find('\n') == std::string::npos);
    }
  }
  CHECK(kind([&] { backend.allgather(at::ones({3}), {expanded}); }) == ErrorKind::kInvalid);
  CHECK(kind([&] { backend.allreduce(at::ones({3}, at::kInt), ReduceOp::AVG); }) ==
        ErrorKind::kInvalid);
  CHECK(kind([&] { backend.allreduce(at::ones({3}), ReduceOp::BXOR); }) == ErrorKind::kInvalid);
  CHECK(kind([&] { backend.broadcast(at::ones({3}), 1); }) == ErrorKind::kInvalid);
  CHECK(kind([&] { backend.allgather(at::ones({3}), {}); }) == ErrorKind::kInvalid);
  CHECK(kind([&] { backend.allgather(at::ones({3}), {at::ones({2})}); }) == ErrorKind::kInvalid);
  CHECK(backend.getSequenceNumberForGroup() == 0);
}

TEST_CASE("closing a group fails in-flight operations") {
  TestGroup group(2);
  const auto pending = group[0].allreduce(at::ones({5}));
  const auto large = group[0].allreduce(at::ones({100000}));
  const auto future = large.future();
  group[0].abort();
  CHECK(thrown_by([&] { pending.wait(); }).kind == ErrorKind::kCancelled);
  const auto next = group[0].allreduce(at::ones({5}));
  group.backends[0].reset();
  CHECK(thrown_by([&] { next.wait(); }).kind == ErrorKind::kCancelled);
  CHECK(thrown_by([&] { future.wait(); }).kind == ErrorKind::kCancelled);
}

TEST_CASE("a rank that closes the group fails the others' current and later waits for it") {
  const int64_t count = GENERATE(5, 100000);
  TestGroup group(3);
  std::vector<at::Tensor> sums;
  std::vector<collective::Pending> done, pending;
  for (int rank = 0; rank < 3; ++rank) {
    sums.push_back(at::ones({count}));
    done.push_back(group[rank].allreduce(sums.back()));
  }
  done[1].wait();
  for (int rank : {0, 2}) pending.push_back(group[rank].allreduce(at::ones({count})));
  group.backends[1].reset();
  for (int rank : {0, 2}) {
    done[size_t(rank)].wait();
    CHECK(sums[size_t(rank)].eq(3).all().item<bool>());
  }
  for (int rank : {0, 2}) pending.push_back(group[rank].enter_barrier());
  for (auto& one : pending) {
    const base::Error error = thrown_by([&] { one.wait(); });
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == 1);
    CHECK(contains(error.message, "rank 1 has closed the group, and takes no part in"));
  }
  // Rank 2 needs nothing from rank 1 for this broadcast.
  const at::Tensor x = at::full({count}, 4.0F, at::kFloat), y = at::empty({count});
  const auto sent = group[0].broadcast(x, 0);
  group[2].broadcast(y, 0).wait();
  CHECK(at::equal(x, y));
  CHECK(thrown_by([&] { sent.wait(); }).rank == 1);
}

TEST_CASE("a rank that is far ahead waits until the others have begun") {
  constexpr int kCalls = 8, kAhead = 3;  // three broadcasts of 20 MiB fit in the limit of 64 MiB
  TestGroup group(2);
  const at::Tensor x = at::zeros({20 << 20}, at::kByte);
  std::atomic<int> issued{0};
  run_ranks(2, [&](int rank) {
    std::vector<collective::Pending> calls;
    for (int i = 0; i < kCalls; ++i) {
      if (rank == 1) {
        while (issued < std::min(i + kAhead, kCalls)) std::this_thread::yield();
        RANK_CHECK(issued <= i + kAhead);
      }
      calls.push_back(group[rank].broadcast(rank == 0 ? x : at::empty_like(x), 0));
      if (rank == 0) ++issued;
    }
    for (auto& call : calls) call.wait();
  });
}

TEST_CASE("the wait for the others to begin ends at the deadline or with the group") {
  TestGroup group(2);
  const at::Tensor x = at::zeros({40 << 20}, at::kByte);
  const auto first = group[0].broadcast(x, 0);
  const auto late = group[0].broadcast(x, 0, milliseconds(20));
  CHECK(thrown_by([&] { late.wait(); }).kind == ErrorKind::kDeadline);
  // Rank 1 gets an error instead of the bytes of the second broadcast, which missed its deadline.
  const at::Tensor y = at::empty_like(x);
  group[1].broadcast(y, 0).wait();
  const base::Error refusal = thrown_by([&] { group[1].broadcast(y, 0).wait(); });
  CHECK(refusal.kind == ErrorKind::kDeadline);
  CHECK(refusal.rank == 0);
  first.wait();
  const auto second = group[0].broadcast(x, 0);
  std::thread closer([&] { group.backends[1].reset(); });
  const auto third = group[0].broadcast(x, 0);
  closer.join();
  for (const auto& one : {second, third}) CHECK(thrown_by([&] { one.wait(); }).rank == 1);
}

TEST_CASE("a rank that sends too much for operations that have not begun is overloaded") {
  FakeNetwork network(2);
  base::ThreadPool pool({.name = "test"});
  auto backend =
      c10::make_intrusive<Backend>(network.channel(0), pool, collective::Group{1, {0, 1}},
                                   Backend::Settings{.shared_memory = false});
  const auto pending = backend->enter_barrier();
  const std::vector<uint8_t> bytes(50 << 20);
  const std::span<const uint8_t> piece(bytes);
  for (uint64_t number : {1, 2, 3}) {
    network.channel(1).send(0, {1, number, 0}, std::span(&piece, 1), nullptr);
  }
  const base::Error error = thrown_by([&] { pending.wait(); });
  CHECK(error.kind == ErrorKind::kOverloaded);
  CHECK(error.rank == 1);
}

TEST_CASE("a rank that sends too many messages without a payload is overloaded") {
  constexpr int kRanks = 128;  // among which the window of a group is small
  FakeNetwork network(kRanks);
  base::ThreadPool pool({.name = "test"});
  std::vector<int> ranks(kRanks);
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto backend =
      c10::make_intrusive<Backend>(network.channel(0), pool, collective::Group{1, ranks});
  const auto pending = backend->broadcast(at::ones({1}), 1, kGroupTimeout);
  constexpr uint64_t kMessages = 2 * collective::kWindow / wire::kHeaderBytes / (kRanks - 1);
  for (uint64_t number = 1; number <= kMessages + 1; ++number) {
    network.channel(1).send(0, {1, number, 0}, {}, nullptr);
  }
  const base::Error error = thrown_by([&] { pending.wait(); });
  CHECK(error.kind == ErrorKind::kOverloaded);
  CHECK(error.rank == 1);
}

TEST_CASE("a rank whose operation cannot begin tells the others") {
  // Fails the next send.
  struct FailingChannel final : rpc::Channel {
    explicit FailingChannel(rpc::Channel& its_channel) : channel(its_channel) {}
    int rank() const override { return channel.rank(); }
    int world_size() const override { return channel.world_size(); }
    void set_handler(Handler handler) override { channel.set_handler(std::move(handler)); }
    void send(int to, const rpc::ChannelTag& tag, std::span<const std::span<const uint8_t>> pieces,
              std::shared_ptr<const void> keep_alive,
              std::shared_ptr<const net::Fd> descriptor) override {
      if (fails.exchange(false)) throw base::Exception(ErrorKind::kResources, "no memory");
      channel.send(to, tag, pieces, std::move(keep_alive), std::move(descriptor));
    }
    rpc::Channel& channel;
    std::atomic<bool> fails = false;
  };
  const bool is_recv = GENERATE(true, false);
  FakeNetwork network(2);
  FailingChannel channel(network.channel(0));
  base::ThreadPool pool({.name = "test"});
  const collective::Group group{1, {0, 1}};
  const Backend::Settings settings{.timeout = kGroupTimeout, .shared_memory = false};
  const auto failing = c10::make_intrusive<Backend>(channel, pool, group, settings);
  const auto other = c10::make_intrusive<Backend>(network.channel(1), pool, group, settings);
  const at::Tensor x = at::ones({5});
  const auto begin = [&](Backend& backend) {
    if (!is_recv) return backend.broadcast(x);
    return &backend == other.get() ? backend.send(x, 0) : backend.recv(x, 1);
  };
  channel.fails = true;
  const auto first = begin(*failing), second = begin(*other);
  for (const auto& pending : {first, second}) {
    const base::Error error = thrown_by([&] { pending.wait(); });
    CHECK(error.kind == ErrorKind::kResources);
  }
  CHECK(thrown_by([&] { second.wait(); }).rank == 0);
  failing->shutdown();
  network.channel(0).set_handler({});  // so that no message is answered by way of `channel`
}

TEST_CASE("malformed messages fail the operation") {
  std::mt19937 random(3);
  std::vector<uint8_t> bytes;  // the network may read these bytes until it is destroyed
  for (int round = 0; round < 300; ++round) {
    FakeNetwork network(2, uint32_t(round));
    base::ThreadPool pool({.name = "test"});
    auto backend =
        c10::make_intrusive<Backend>(network.channel(0), pool, collective::Group{1, {0, 1}},
                                     Backend::Settings{.shared_memory = false});
    const auto pending = backend->allreduce(at::ones({5}), ReduceOp::SUM, kGroupTimeout);
    bytes.resize(random() % 200);
    for (uint8_t& byte : bytes) byte = uint8_t(random());
    // Half of the messages begin with a valid header.
    if (round % 2 && bytes.size() >= collective::kHeaderBytes) {
      collective::encode_header({.kind = collective::OpKind::kAllreduceDirect,
                                 .reduce_op = ReduceOp::SUM,
                                 .dtype = at::kFloat,
                                 .bytes = 20},
                                0, bytes.data());
      if (round % 4 == 1) bytes[random() % collective::kHeaderBytes] ^= uint8_t(1 + random() % 255);
    }
    const std::span<const uint8_t> piece(bytes);
    network.channel(1).send(0, {1, 0, random() % 3}, std::span(&piece, 1), nullptr);
    const bool whole = bytes.size() == collective::kHeaderBytes + 20;
    if (whole) continue;
    // Even if the header is valid (some bytes are unused), the message has an incorrect length.
    CHECK(thrown_by([&] { pending.wait(); }).kind != ErrorKind::kDeadline);
  }
}

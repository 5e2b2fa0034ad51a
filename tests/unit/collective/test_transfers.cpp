// Tests send() and recv().
#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "../src/collective/core.h"
#include "unit/collective/test_group.h"

using namespace distrain;
using namespace distrain::testing;
using base::ErrorKind;
using collective::Pending;
using std::chrono::milliseconds;

namespace {

// Sends a number from rank 0 to rank 1, to check that the ranks are still in step.
void check_transfer(TestGroup& group, int tag) {
  const at::Tensor x = at::full({3}, 7.0), y = at::zeros({3});
  const Pending sent = group[0].send(x, 1, tag), received = group[1].recv(y, 0, tag);
  sent.wait();
  received.wait();
  CHECK(same_bits(x, y));
}

}  // namespace

TEST_CASE("each recv gets the data of its send, for any dtype, size and strides") {
  const int size = GENERATE(2, 3, 5);
  TestGroup group(size, {}, uint32_t(size));
  run_ranks(size, [&](int rank) {
    for (auto dtype : {at::kFloat, at::kHalf, at::kBool, at::kLong, at::kComplexDouble}) {
      for (int64_t count : {0, 1, 70000}) {
        std::vector<Pending> pending;
        std::vector<at::Tensor> outputs;
        for (int other = 0; other < size; ++other) {
          outputs.push_back(at::zeros({2, count}, dtype).t());
          if (other == rank) continue;
          pending.push_back(group[rank].send(at::full({count, 2}, rank % 2, dtype), other));
          pending.push_back(group[rank].recv(outputs.back(), other));
        }
        for (const Pending& each : pending) each.wait();
        for (int from = 0; from < size; ++from) {
          if (from != rank) RANK_CHECK(outputs[size_t(from)].eq(from % 2).all().item<bool>());
        }
      }
    }
  });
}

TEST_CASE("transfers are matched by peer and tag in order, whatever else the ranks do") {
  TestGroup group(3, {}, 5);
  run_ranks(3, [&](int rank) {
    constexpr int kTransfers = 30;
    const std::vector<int> tags = {0, 7, -1, INT32_MAX, INT32_MIN};
    std::vector<Pending> pending;
    std::vector<at::Tensor> received;
    // Rank 0 sends by number, the others receive by tag, and rank 1 makes its collectives last.
    const auto reduce = [&] { pending.push_back(group[rank].allreduce(at::ones({50}))); };
    if (rank != 1) reduce();
    for (int i = 0; rank == 0 && i < kTransfers; ++i) {
      for (int to : {1, 2}) {
        pending.push_back(
            group[0].send(at::full({4}, 100 * to + i), to, tags[size_t(i) % tags.size()]));
      }
    }
    std::vector<int> numbers;
    for (size_t tag = tags.size(); rank != 0 && tag-- > 0;) {
      for (int i = int(tag); i < kTransfers; i += int(tags.size())) {
        numbers.push_back(i);
        received.push_back(at::zeros({4}, at::kLong));
        pending.push_back(group[rank].recv(received.back(), 0, tags[tag]));
      }
    }
    if (rank == 1) reduce();
    for (const Pending& each : pending) each.wait();
    for (size_t i = 0; i < numbers.size(); ++i) {
      RANK_CHECK(received[i].eq(100 * rank + numbers[i]).all().item<bool>());
    }
    RANK_CHECK(group[rank].getSequenceNumberForGroup() == 1);
  });
}

TEST_CASE("a recv gets its data although no thread waits for the send") {
  TestGroup group(2);
  const at::Tensor y = at::zeros({5});
  const Pending sent = group[0].send(at::ones({5}), 1);
  group[1].recv(y, 0).wait();
  CHECK(y.eq(1).all().item<bool>());
  sent.wait();
}

TEST_CASE("a send is complete when its recv has begun") {
  TestGroup group(2, {.shared_memory = false});
  const size_t before = group.network.messages();
  const Pending sent = group[0].send(at::ones({5}), 1);
  CHECK_FALSE(sent.wait_until(base::deadline_after(milliseconds(20))));
  CHECK(group.network.messages() == before);  // rank 1 keeps no data that it has not asked for
  const Pending received = group[1].recv(at::zeros({5}), 0);
  sent.wait();
  received.wait();
}

TEST_CASE("a send and a recv of different tensors fail on both ranks, and later ones work") {
  const bool sends_first = GENERATE(true, false);
  TestGroup group(2);
  for (const at::Tensor& other : {at::zeros({3}), at::zeros({5}, at::kInt)}) {
    Pending sent, received;
    const auto send = [&] { sent = group[0].send(at::ones({5}), 1, 2); };
    if (sends_first) send();
    received = group[1].recv(other, 0, 2);
    if (!sends_first) send();
    for (const Pending& pending : {sent, received}) {
      const base::Error error = thrown_by([&] { pending.wait(); });
      CHECK(error.kind == ErrorKind::kInvalid);
      CHECK(contains(error.message, "where rank 0 called send/recv(tag 2, Float, 20 bytes)"));
      CHECK(contains(error.message, "with this tag"));
    }
    CHECK(thrown_by([&] { sent.wait(); }).rank == 1);
    CHECK(thrown_by([&] { received.wait(); }).rank == 0);
    check_transfer(group, 2);
  }
}

TEST_CASE("a send that misses its deadline or is aborted fails its recv") {
  const bool aborts = GENERATE(true, false);
  TestGroup group(2);
  const Pending sent = group[0].send(at::ones({5}), 1, 4, milliseconds(aborts ? 0 : 20));
  if (aborts) group[0].abort();
  const ErrorKind kind = aborts ? ErrorKind::kCancelled : ErrorKind::kDeadline;
  const base::Error error = thrown_by([&] { sent.wait(); });
  CHECK(error.kind == kind);
  if (!aborts) CHECK(contains(error.message, "the deadline passed, nothing came from rank 1"));
  const base::Error refused = thrown_by([&] { group[1].recv(at::zeros({5}), 0, 4).wait(); });
  CHECK(refused.kind == kind);
  CHECK(refused.rank == 0);
  check_transfer(group, 4);
}

TEST_CASE("a recv that misses its deadline names the sender, and later transfers work") {
  TestGroup group(3);
  const at::Tensor y = at::zeros({5});
  const base::Error error = thrown_by([&] { group[1].recv(y, 0, 1, milliseconds(20)).wait(); });
  CHECK(error.kind == ErrorKind::kDeadline);
  CHECK(error.rank == 0);
  CHECK(contains(error.message,
                 "send/recv(tag 1, Float, 20 bytes), collective number 0 with this tag"));
  group[0].send(at::ones({5}), 1, 1).wait();  // its recv has asked for the data
  check_transfer(group, 1);
  CHECK(y.eq(0).all().item<bool>());
}

TEST_CASE("a rank that is lost or closes the group fails the transfers with it") {
  const bool closes = GENERATE(true, false), sends = GENERATE(true, false);
  const int own = GENERATE(0, 2),
            other = 2 - own;  // a rank that closes the group notifies rank 0 anyway
  TestGroup group(3);
  const at::Tensor x = at::ones({5});
  const auto begin = [&] { return sends ? group[own].send(x, 1) : group[own].recv(x, 1); };
  const Pending before = begin();
  if (closes) group.backends[1].reset();
  if (!closes) group.network.kill(1);
  for (const Pending& pending : {before, begin()}) {
    const base::Error error = thrown_by([&] { pending.wait(); });
    CHECK(error.kind == ErrorKind::kPeerLost);
    CHECK(error.rank == 1);
  }
  if (!closes) return;
  const at::Tensor y = at::zeros({5});  // other ranks do not need rank 1
  const Pending sent = group[own].send(x, other);
  group[other].recv(y, own).wait();
  sent.wait();
  CHECK(same_bits(x, y));
}

TEST_CASE("closing the group fails its own transfers") {
  TestGroup group(2);
  const Pending sent = group[0].send(at::ones({5}), 1), received = group[0].recv(at::ones({5}), 1);
  group[0].shutdown();
  for (const Pending& pending : {sent, received, group[0].send(at::ones({5}), 1)}) {
    CHECK(thrown_by([&] { pending.wait(); }).kind == ErrorKind::kCancelled);
  }
}

TEST_CASE("wrong arguments of transfers throw one line") {
  TestGroup group(2);
  Backend& backend = group[0];
  const at::Tensor x = at::ones({3});
  std::vector<at::Tensor> two = {x, x};
  const std::vector<std::function<void()>> calls = {
      [&] { backend.send(x, 0); },
      [&] { backend.send(x, 2); },
      [&] { backend.recv(x, -1); },
      [&] { backend.send(at::Tensor(), 1); },
      [&] { backend.send(x.to_sparse(), 1); },
      [&] { backend.recv(at::ones({1}).expand({3}), 1); },
      [&] { backend.send(two, 1, 0); },
      [&] { backend.recv(two, 1, 0); },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    INFO("call " << i);
    const base::Error error = thrown_by(calls[i]);
    CHECK(error.kind == ErrorKind::kInvalid);
    CHECK(!contains(error.message, "\n"));
  }
}

TEST_CASE("c10d's send and recv work") {
  TestGroup group(2);
  run_ranks(2, [&](int rank) {
    std::vector<at::Tensor> x = {at::full({3}, double(rank))};
    c10d::Backend& backend = group[rank];
    auto work = rank == 0 ? backend.send(x, 1, 5) : backend.recv(x, 0, 5);
    RANK_CHECK(work->wait() && x[0].eq(0).all().item<bool>());
  });
}

TEST_CASE("malformed messages of transfers fail the transfer or the group") {
  const bool sends = GENERATE(true, false);
  std::mt19937 random(3);
  std::vector<uint8_t> bytes;  // the network may read these bytes until it is destroyed
  for (int round = 0; round < 200; ++round) {
    FakeNetwork network(2, uint32_t(round));
    base::ThreadPool pool({.name = "test"});
    auto backend =
        c10::make_intrusive<Backend>(network.channel(0), pool, collective::Group{1, {0, 1}});
    const at::Tensor x = at::ones({5});
    const Pending pending = sends ? backend->send(x, 1, 3) : backend->recv(x, 1, 3);
    bytes.resize(random() % 200);
    for (uint8_t& byte : bytes) byte = uint8_t(random());
    const size_t right = collective::kHeaderBytes + (sends ? 0 : 20);
    if (bytes.size() == right) bytes.push_back(0);
    if (round % 2 && bytes.size() >= collective::kHeaderBytes) {
      collective::encode_header(
          {.kind = collective::OpKind::kTransfer, .dtype = at::kFloat, .root = 3, .bytes = 20}, 0,
          bytes.data());
    }
    const std::span<const uint8_t> piece(bytes);
    const uint64_t c = uint64_t{3} << 32 | (sends ? 0 : uint64_t{1} << 8) | random() % 3;
    network.channel(1).send(0, {1, collective::first_number(collective::kTransfers), c},
                            std::span(&piece, 1), nullptr);
    const base::Error error = thrown_by([&] { pending.wait(); });
    CHECK((error.kind == ErrorKind::kProtocol || error.kind == ErrorKind::kInvalid));
    CHECK(error.rank == 1);
  }
}

TEST_CASE("many recvs that begin before their sends do not overload the sender") {
  constexpr int kRanks = 128;                    // among which the window of a group is small
  uint8_t headers[2][collective::kHeaderBytes];  // the network may read it until it is destroyed
  FakeNetwork network(kRanks);
  base::ThreadPool pool({.name = "test"});
  std::vector<int> ranks(kRanks);
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto backend =
      c10::make_intrusive<Backend>(network.channel(0), pool, collective::Group{1, ranks});
  const at::Tensor x = at::ones({5});
  const uint64_t first = collective::first_number(collective::kTransfers);
  const auto begin_recv = [&](uint32_t tag, uint64_t number) {
    const std::span<const uint8_t> piece(headers[tag]);
    network.channel(1).send(0, {1, first + number, uint64_t{tag} << 32}, std::span(&piece, 1), {});
  };
  for (uint32_t tag : {0, 1}) {
    collective::encode_header(
        {.kind = collective::OpKind::kTransfer, .dtype = at::kFloat, .root = tag, .bytes = 20}, 0,
        headers[tag]);
  }
  constexpr uint64_t kRecvs = 2 * collective::kWindow / collective::kHeaderBytes / (kRanks - 1);
  for (uint64_t number = 0; number <= kRecvs; ++number) begin_recv(0, number);
  begin_recv(1, 0);
  for (const int tag : {1, 0}) backend->send(x, 1, tag).wait();
}

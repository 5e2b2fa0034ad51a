// Tests refused frames, changes of the limits, and replaced handlers, over each transport.
#include <atomic>
#include <memory>
#include <random>
#include <vector>

#include <malloc.h>

#include "stream_support.h"

using namespace distrain;
using namespace distrain::net;

TEMPLATE_TEST_CASE("an invalid frame ends the stream with protocol", "", Tcp, Unix) {
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    Half<TestType> half;
    const auto good = wire_bytes(make_frame(1, 5, 5));
    REQUIRE(raw_write(half.raw.get(), good));
    std::vector<uint8_t> bytes(48 + random() % 3000);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    static_cast<void>(raw_write(half.raw.get(), bytes));
    REQUIRE(half.record.wait_closed());
    CHECK(half.record.error().kind == base::ErrorKind::kProtocol);
    CHECK(half.record.count() == 1);
    CHECK(half.record.closes() == 1);
    CHECK_FALSE(half.stream->send(make_frame(1, 0, 0)).ok());
  }
}

TEMPLATE_TEST_CASE("a frame beyond the limits ends the stream before its body arrives", "", Tcp,
                   Unix) {
  const wire::Limits limits{1000, 4, 1 << 20};
  wire::FrameHeader meta, tensors, payload, huge;
  meta.meta_bytes = 1001;
  tensors.tensor_count = 5;
  payload.payload_bytes = (1 << 20) + 1;
  huge.payload_bytes = UINT64_MAX;
  for (const wire::FrameHeader& header : {meta, tensors, payload, huge}) {
    Half<TestType> half(limits);
    REQUIRE(raw_write(half.raw.get(), wire_bytes(make_frame(1, 1000, 1 << 20))));  // at the limit
    std::array<uint8_t, wire::kHeaderBytes> bytes;
    wire::encode_header(header, bytes);
    REQUIRE(raw_write(half.raw.get(), bytes));
    REQUIRE(half.record.wait_closed());
    CHECK(half.record.error().kind == base::ErrorKind::kProtocol);
    CHECK(half.record.count() == 1);
  }
}

#ifndef DISTRAIN_SANITIZED  // sanitizers allocate more memory
TEMPLATE_TEST_CASE("silent connections use little memory", "", Tcp, Unix) {
  constexpr size_t kConnections = 100;
  std::vector<std::unique_ptr<Record>> records;
  std::vector<Fd> peers;
  std::vector<StreamPtr> streams;
  Loop loop;
  const auto open = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) {
      auto [first, second] = TestType::connected();
      records.push_back(std::make_unique<Record>());
      streams.push_back(started(loop, std::move(first), *records.back()));
      REQUIRE(raw_write(second.get(), wire_bytes(make_frame(1, 0, 0))));
      REQUIRE(records.back()->wait_frames(1));  // ensures that the stream is open
      peers.push_back(std::move(second));
    }
  };
  open(1);
  const size_t before = mallinfo2().uordblks;
  open(kConnections);
  CHECK((mallinfo2().uordblks - before) / kConnections < 4096);
}
#endif

TEMPLATE_TEST_CASE("sending a frame that no peer would accept is refused", "", Tcp, Unix) {
  Pair<TestType> pair;
  OutFrame meta;
  meta.meta.resize(size_t{wire::Limits{}.max_meta_bytes} + 1);
  OutFrame tensors;
  tensors.header.tensor_count = wire::Limits{}.max_tensors + 1;
  OutFrame payload;  // spans that are too long; only their lengths are read
  payload.payload.assign(2, std::span<const uint8_t>(reinterpret_cast<const uint8_t*>(&payload),
                                                     wire::Limits{}.max_payload_bytes));
  for (OutFrame* frame : {&meta, &tensors, &payload}) {
    const base::Status status = pair.a->send(std::move(*frame));
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().kind == base::ErrorKind::kInvalid);
  }
  REQUIRE(pair.a->send(make_frame(1, 1, 1)).ok());  // the stream still works
  REQUIRE(pair.record_b.wait_frames(1));
}

TEMPLATE_TEST_CASE("limits that on_frame sets apply from the next frame on", "", Tcp, Unix) {
  auto [first, second] = TestType::connected();
  Record record;
  Loop loop;
  const StreamPtr stream = adopt_socket(loop, first.release());
  stream->start(
      {[&](InFrame frame) {
         stream->set_limits_on_loop(frame.header.call_id == 2 ? wire::kJoinLimits : wire::Limits{});
         record.add(std::move(frame));
       },
       [&](const base::Error& error) { record.closed(error); }},
      wire::kJoinLimits);
  // Writes all frames at once so that the stream decodes them from one buffer.
  std::vector<uint8_t> bytes;
  for (uint64_t id = 0; id < 4; ++id) {
    const auto frame = wire_bytes(make_frame(id, 10, id == 0 ? 0 : 3000));
    bytes.insert(bytes.end(), frame.begin(), frame.end());
  }
  REQUIRE(raw_write(second.get(), bytes));
  REQUIRE(record.wait_closed());
  CHECK(record.error().kind == base::ErrorKind::kProtocol);
  CHECK(record.count() == 3);
}

TEMPLATE_TEST_CASE("a handler that is replaced before the stream is open is not called", "", Tcp,
                   Unix) {
  auto [first, second] = TestType::connected();
  Record before, after;
  Loop loop;
  const StreamPtr stream = adopt_socket(loop, first.release());
  loop.post([&] {
    stream->start(before.handler(), {});
    stream->set_handler_on_loop(after.handler());
    stream->close(false);
  });
  REQUIRE(after.wait_closed());
  CHECK(before.closes() == 0);
}

TEMPLATE_TEST_CASE("a handler that is set in on_frame gets all later frames", "", Tcp, Unix) {
  auto [first, second] = TestType::connected();
  Record before, after;
  Loop loop;
  const StreamPtr stream = adopt_socket(loop, first.release());
  std::atomic<bool> alive_inside{false};
  auto token = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = token;
  stream->start({[&, token](InFrame frame) {
                   stream->set_handler_on_loop(after.handler());
                   alive_inside = *token == 1;  // still alive after its replacement
                   before.add(std::move(frame));
                 },
                 [&](const base::Error& error) { before.closed(error); }},
                {});
  token.reset();
  std::vector<uint8_t> bytes;
  for (uint64_t id = 0; id < 5; ++id) {
    const auto frame = wire_bytes(make_frame(id, 10, 10));
    bytes.insert(bytes.end(), frame.begin(), frame.end());
  }
  REQUIRE(raw_write(second.get(), bytes));
  REQUIRE(after.wait_frames(4));
  CHECK(before.count() == 1);
  CHECK(alive_inside);
  CHECK(watch.expired());
  second.reset();
  REQUIRE(after.wait_closed());
  CHECK(after.closes() == 1);
  CHECK(before.closes() == 0);
}

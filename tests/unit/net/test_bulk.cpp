// Tests payloads over bulk connections: Note [Bulk connections] in src/net/bulk.h.
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include <sys/socket.h>

#include "distrain/net/shared_memory.h"
#include "stream_support.h"

using namespace distrain;
using namespace distrain::net;
using wire::FrameKind;
using wire::kHeaderBytes;
using wire::kLeastInBulk;

namespace {

constexpr size_t kLarge = 32 * kLeastInBulk;  // more than the buffers of a connection

// Two streams; the payloads in bulk of each go to the other.
template <class Transport>
struct BulkPair : Pair<Transport> {
  BulkPair() {
    on_loop(this->loop, [this] {
      this->a->use_bulk_on_loop([this] { connect_on_loop(*this->a, *this->b, from_a); });
      this->b->use_bulk_on_loop([this] { connect_on_loop(*this->b, *this->a, from_b); });
    });
  }
  void connect_on_loop(Stream& from, Stream& to, std::pair<Fd, Fd>& connection) {
    from.send_bulk_on_loop(sends, std::move(connection.first));
    opened += to.receive_bulk_on_loop(receives, std::move(connection.second));
  }
  std::pair<Fd, Fd> from_a = Transport::connected(), from_b = Transport::connected();
  std::atomic<int> opened = 0;
  Loop sends, receives;
};

// A stream with a bulk connection, of both of which the test holds the other ends.
template <class Transport>
struct BulkHalf : Half<Transport> {
  explicit BulkHalf(bool is_open = true) {
    auto [first, second] = Transport::connected();
    received = std::move(second);
    on_loop(this->loop, [this, fd = std::make_shared<Fd>(std::move(first))] {
      this->stream->use_bulk_on_loop([this, fd] {
        this->stream->send_bulk_on_loop(bulk_loop, std::move(*fd));
        sends = true;
      });
    });
    if (is_open) open();
  }
  void open() {
    auto [first, second] = Transport::connected();
    sent = std::move(second);
    bool is_first = false;
    on_loop(this->loop, [this, &is_first, fd = std::move(first)]() mutable {
      is_first = this->stream->receive_bulk_on_loop(bulk_loop, std::move(fd));
    });
    CHECK(is_first);
  }
  // Waits until the stream uses the connection for its own payloads.
  void wait_for_sender() {
    REQUIRE(eventually([&] { return sends.load(); }));
  }
  // Writes a frame without its payload.
  void announce(const OutFrame& frame) {
    std::vector<uint8_t> bytes = wire_bytes(frame);
    const auto head = std::span(bytes).first<kHeaderBytes>();
    wire::FrameHeader header = wire::decode_header(head, wire::Limits{}).value();
    header.in_bulk = true;
    wire::encode_header(header, head);
    bytes.resize(kHeaderBytes + header.meta_bytes);
    CHECK(raw_write(this->raw.get(), bytes));
  }
  void write(const OutFrame& frame) { CHECK(raw_write(this->raw.get(), wire_bytes(frame))); }
  void write_payload(const OutFrame& frame) { CHECK(raw_write(sent.get(), frame.payload[0])); }
  std::vector<uint64_t> ids() {
    std::vector<uint64_t> ids;
    for (const InFrame& frame : this->record.frames()) ids.push_back(frame.header.call_id);
    return ids;
  }

  Fd sent, received;
  std::atomic<bool> sends = false;
  Loop bulk_loop;
};

OutFrame of_kind(FrameKind kind, uint64_t id, size_t bytes = 0, uint16_t channel = 0) {
  OutFrame frame = make_frame(id, 0, bytes);
  frame.header.kind = kind;
  frame.header.channel = channel;
  return frame;
}

}  // namespace

TEMPLATE_TEST_CASE("a large payload leaves its frame, and goes over a connection of its own", "",
                   Tcp, Unix) {
  BulkHalf<TestType> half;
  const OutFrame large = make_frame(1, 70, kLeastInBulk, 7);
  REQUIRE(half.stream->send(make_frame(1, 70, kLeastInBulk, 7)).ok());
  REQUIRE(half.stream->send(make_frame(2, 5, kLeastInBulk - 1)).ok());
  const std::vector<uint8_t> head = raw_read(half.raw.get(), kHeaderBytes);
  const auto header =
      wire::decode_header(std::span(head).first<kHeaderBytes>(), wire::Limits{}).value();
  CHECK(header.in_bulk);
  CHECK(header.payload_bytes == kLeastInBulk);
  CHECK(raw_read(half.raw.get(), 70) == large.meta);
  CHECK(raw_read(half.raw.get(), wire_bytes(make_frame(2, 5, kLeastInBulk - 1)).size()) ==
        wire_bytes(make_frame(2, 5, kLeastInBulk - 1)));
  half.wait_for_sender();
  CHECK(raw_read(half.received.get(), kLeastInBulk) == pattern(kLeastInBulk, 1 + 1'000'000));
}

TEMPLATE_TEST_CASE("several senders of small and large frames lose and tear none", "", Tcp, Unix) {
  BulkPair<TestType> pair;
  constexpr uint64_t kSenders = 3, kFrames = 60;
  std::vector<std::thread> senders;
  std::atomic<int> failed{0};
  for (uint64_t s = 0; s < kSenders; ++s) {
    senders.emplace_back([&, s] {
      std::mt19937 random(static_cast<unsigned>(s));
      for (uint64_t i = 0; i < kFrames; ++i) {
        const size_t payload =
            i % 10 == s ? kLeastInBulk + random() % (2 * kLeastInBulk) : random() % 3000;
        const OutFrame frame = make_frame(s << 32 | i, random() % 80, payload, 3);
        failed += !pair.a->send(frame).ok() || !pair.b->send(frame).ok();
      }
    });
  }
  for (std::thread& sender : senders) sender.join();
  CHECK(failed == 0);
  for (Record* record : {&pair.record_a, &pair.record_b}) {
    REQUIRE(record->wait_frames(kSenders * kFrames));
    std::map<uint64_t, std::vector<bool>> seen;  // by sender
    bool right = true;
    for (const InFrame& frame : record->frames()) {
      const uint64_t number = frame.header.call_id & 0xFFFFFFFF;
      std::vector<bool>& of_sender = seen[frame.header.call_id >> 32];
      of_sender.resize(kFrames);
      right &= !frame.header.in_bulk && intact(frame) && !of_sender[number];
      of_sender[number] = true;
      // Only frames in bulk are overtaken, and they overtake none.
      const bool is_large = frame.payload.size() >= kLeastInBulk;
      for (uint64_t before = 0; before < number; ++before) {
        right &= of_sender[before] || (!is_large && before % 10 == frame.header.call_id >> 32);
      }
    }
    CHECK(right);
  }
  CHECK(pair.opened == 2);
}

TEMPLATE_TEST_CASE("frames overtake a payload in bulk, except those that must follow it", "", Tcp,
                   Unix) {
  using enum FrameKind;
  BulkHalf<TestType> half(false);
  const OutFrame first = of_kind(kOneway, 1, kLarge, 7), second = make_frame(9, 5, kLarge);
  half.announce(first);
  half.write(of_kind(kOneway, 2, 10, 8));
  half.write(of_kind(kOneway, 3, 10, 7));
  half.write(of_kind(kCancel, 4));
  half.write(of_kind(kRRefFork, 5));
  half.write(of_kind(kRRefDelete, 6));
  half.write(of_kind(kLeave, 7));
  half.write(of_kind(kCredit, 8));
  half.announce(second);
  half.write(make_frame(10, 5, 5));
  REQUIRE(half.record.wait_frames(4));
  CHECK(half.ids() == std::vector<uint64_t>{2, 5, 8, 10});
  half.open();  // only now
  half.write_payload(first);
  REQUIRE(half.record.wait_frames(9));
  half.write(of_kind(kCancel, 11));
  half.write(make_frame(12, 5, 5));
  REQUIRE(half.record.wait_frames(10));
  half.write_payload(second);
  REQUIRE(half.record.wait_frames(12));
  // Without a payload that is missing, all frames keep their order.
  half.write(of_kind(kCancel, 13));
  half.write(make_frame(14, 5, 5));
  REQUIRE(half.record.wait_frames(14));
  CHECK(half.ids() == std::vector<uint64_t>{2, 5, 8, 10, 1, 3, 4, 6, 7, 12, 9, 11, 13, 14});
  for (const InFrame& frame : half.record.frames()) CHECK(intact(frame));
}

TEMPLATE_TEST_CASE("payloads in bulk are intact in pieces of any length", "", Tcp, Unix) {
  BulkHalf<TestType> half;
  std::mt19937 random(4);
  std::vector<uint8_t> bytes;
  uint64_t id = 0;
  for (const size_t payload : {kLeastInBulk, 2 * kLeastInBulk, 3 * kLeastInBulk + 77}) {
    const OutFrame frame = make_frame(++id, payload % 100, payload);
    half.announce(frame);
    bytes.insert(bytes.end(), frame.payload[0].begin(), frame.payload[0].end());
  }
  for (std::span<const uint8_t> left = bytes; !left.empty();) {
    const size_t size =
        std::min<size_t>(left.size(), 1 + random() % (random() % 4 ? 5000 : 700'000));
    REQUIRE(raw_write(half.sent.get(), left.first(size)));
    left = left.subspan(size);
  }
  REQUIRE(half.record.wait_frames(id));
  for (const InFrame& frame : half.record.frames()) CHECK(intact(frame));
}

TEMPLATE_TEST_CASE("a stream that loses its bulk connection ends, and delivers no part", "", Tcp,
                   Unix) {
  enum class At { kSending, kIdle, kReceiving };
  for (const At at : {At::kSending, At::kIdle, At::kReceiving}) {
    BulkHalf<TestType> half;
    const OutFrame large = make_frame(1, 10, kLarge);
    if (at != At::kReceiving) {
      OutFrame frame = make_frame(1, 10, kLarge);
      const std::weak_ptr<const void> alive = frame.keep_alive;
      REQUIRE(half.stream->send(std::move(frame)).ok());
      half.wait_for_sender();
      if (at == At::kIdle) REQUIRE(raw_read(half.received.get(), kLarge).size() == kLarge);
      half.received.reset();
      CHECK(eventually([&] { return alive.expired(); }));
    } else {
      half.announce(large);
      half.write(of_kind(FrameKind::kCancel, 2));
      REQUIRE(raw_write(half.sent.get(), large.payload[0].first(kLarge / 2)));
      half.sent.reset();
    }
    REQUIRE(half.record.wait_closed());
    CHECK(half.record.error().kind == base::ErrorKind::kPeerLost);
    CHECK(half.record.error().message.find("bulk") != std::string::npos);
    CHECK(half.record.count() == 0);
  }
}

TEMPLATE_TEST_CASE("a peer that has closed is gone when its last payload has come", "", Tcp, Unix) {
  BulkHalf<TestType> half;
  const OutFrame large = make_frame(1, 10, kLarge);
  half.announce(large);
  half.write(of_kind(FrameKind::kLeave, 2));
  half.raw.reset();
  half.write_payload(large);
  REQUIRE(half.record.wait_closed());
  CHECK(half.ids() == std::vector<uint64_t>{1, 2});
  CHECK(half.record.error().kind == base::ErrorKind::kPeerLost);
  CHECK(half.record.error().message.find("closed the connection") != std::string::npos);
}

TEMPLATE_TEST_CASE("a peer that closes before its bulk connection is there is gone at once", "",
                   Tcp, Unix) {
  BulkHalf<TestType> half(false);
  half.announce(make_frame(1, 10, kLarge));
  half.raw.reset();
  REQUIRE(half.record.wait_closed());
  CHECK(half.record.error().kind == base::ErrorKind::kPeerLost);
  CHECK(half.record.count() == 0);
}

TEMPLATE_TEST_CASE("frames in bulk that were not agreed end the stream with protocol", "", Tcp,
                   Unix) {
  BulkHalf<TestType> half;
  SECTION("a chunk of a device's tensor") {
    half.announce(of_kind(FrameKind::kChunk, 1, kLarge));
    REQUIRE(half.record.wait_closed());
    CHECK(half.record.error().kind == base::ErrorKind::kProtocol);
  }
  SECTION("before use_bulk_on_loop()") {
    Half<TestType> plain;
    std::swap(half.raw, plain.raw);
    half.announce(make_frame(1, 0, kLarge));
    REQUIRE(plain.record.wait_closed());
    CHECK(plain.record.error().kind == base::ErrorKind::kProtocol);
    std::swap(half.raw, plain.raw);
  }
}

TEMPLATE_TEST_CASE("close() writes payloads in bulk, or drops them at once", "", Tcp, Unix) {
  for (const bool flush : {true, false}) {
    BulkPair<TestType> pair;
    OutFrame large = make_frame(1, 5, kLarge);
    const std::weak_ptr<const void> alive = large.keep_alive;
    REQUIRE(pair.a->send(std::move(large)).ok());
    REQUIRE(pair.a->send(of_kind(FrameKind::kLeave, 2)).ok());
    pair.a->close(flush);
    REQUIRE(pair.record_b.wait_closed());
    REQUIRE(pair.record_a.wait_closed());
    CHECK(pair.record_a.error().kind == base::ErrorKind::kCancelled);
    if (flush) CHECK(pair.record_b.count() == 2);
    for (const InFrame& frame : pair.record_b.frames()) CHECK(intact(frame));
    CHECK(eventually([&] { return alive.expired(); }));
  }
}

TEMPLATE_TEST_CASE("a stream stops reading if too many frames wait for a payload", "", Tcp, Unix) {
  constexpr size_t kFrames = 160, kMiB = size_t{1} << 20;
  BulkHalf<TestType> half;
  const OutFrame large = of_kind(FrameKind::kOneway, 1, kLarge, 7);
  half.announce(large);
  std::atomic<size_t> written = 0;
  std::thread writer([&] {
    for (size_t i = 0; i < kFrames; ++i, ++written) {
      raw_write(half.raw.get(), wire_bytes(of_kind(FrameKind::kOneway, 2 + i, kMiB - 100, 7)));
    }
  });
  // The writer stops, because the stream does. A slow machine only makes this test weaker.
  for (size_t seen = 1; seen != written;) {
    seen = written;
    std::this_thread::sleep_for(300ms);
  }
  CHECK(written < 100);
  half.write_payload(large);
  writer.join();
  REQUIRE(half.record.wait_frames(1 + kFrames));
  const std::vector<uint64_t> ids = half.ids();
  CHECK(std::ranges::is_sorted(ids));
}

TEMPLATE_TEST_CASE("frames that no longer wait for a payload do not count", "", Tcp, Unix) {
  constexpr uint64_t kFrames = 40;
  BulkHalf<TestType> half;
  uint64_t id = 0;
  OutFrame last = of_kind(FrameKind::kOneway, ++id, kLeastInBulk, 7);
  half.announce(last);
  for (int round = 0; round < 3; ++round) {  // together more than the stream lets wait
    for (uint64_t i = 0; i < kFrames; ++i) {
      half.write(of_kind(FrameKind::kOneway, ++id, kLeastInBulk - 100, 7));
    }
    OutFrame next = of_kind(FrameKind::kOneway, ++id, kLeastInBulk, 7);
    half.announce(next);
    half.write_payload(last);
    REQUIRE(half.record.wait_frames(id - 1));
    last = std::move(next);
  }
  half.write_payload(last);
  REQUIRE(half.record.wait_frames(id));
  CHECK(std::ranges::is_sorted(half.ids()));
}

TEST_CASE("a descriptor comes with its frame in bulk") {
  BulkPair<Unix> pair;
  on_loop(pair.loop, [&] {
    pair.a->share_memory_on_loop(0);
    pair.b->share_memory_on_loop(0);
  });
  OutFrame large = make_frame(1, 5, kLarge);
  auto descriptor = std::make_shared<Fd>();
  const auto memory = SharedMemory::create(4096, *descriptor).value();
  large.descriptor = descriptor;
  bool is_sent = false;
  std::thread sender([&] { is_sent = pair.a->send(std::move(large)).ok(); });
  for (uint64_t id = 2; id < 200; ++id) REQUIRE(pair.a->send(make_frame(id, 5, 5)).ok());
  sender.join();
  CHECK(is_sent);
  REQUIRE(pair.record_b.wait_frames(199));
  for (const InFrame& frame : pair.record_b.frames()) {
    CHECK(intact(frame));
    CHECK((frame.descriptor != nullptr) == (frame.header.call_id == 1));
  }
}

// Tests frames whose payloads come in segments, and the order in which a stream writes its frames.
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include <sys/socket.h>

#include "stream_support.h"

using namespace distrain;
using namespace distrain::net;
using wire::FrameKind;
using wire::kHeaderBytes;
using wire::kSegmentBytes;

namespace {

constexpr size_t kLarge = 32 * kSegmentBytes;  // more than the buffers of a connection

OutFrame of_kind(FrameKind kind, uint64_t id, size_t bytes = 0, uint16_t channel = 0) {
  OutFrame frame = make_frame(id, 0, bytes);
  frame.header.kind = kind;
  frame.header.channel = channel;
  return frame;
}

// Reads a frame, or a segment, and returns its header.
wire::FrameHeader read_part(int fd) {
  const std::vector<uint8_t> head = raw_read(fd, kHeaderBytes);
  REQUIRE(head.size() == kHeaderBytes);
  const auto header =
      wire::decode_header(std::span(head).first<kHeaderBytes>(), wire::Limits{}).value();
  REQUIRE(raw_read(fd, header.part_bytes()).size() == header.part_bytes());
  return header;
}

// Reads parts until `frames` of the ids are complete; returns their ids in the order of completion.
std::vector<uint64_t> read_order(int fd, size_t frames) {
  std::vector<uint64_t> order;
  wire::FrameHeader large;
  while (order.size() < frames) {
    const wire::FrameHeader header = read_part(fd);
    if (header.in_segments) {
      large = header;
    } else if (header.kind == FrameKind::kSegment) {
      if (header.call_id + header.payload_bytes == large.payload_bytes)
        order.push_back(large.call_id);
    } else {
      order.push_back(header.call_id);
    }
  }
  return order;
}

using Parts = std::vector<std::vector<uint8_t>>;

// Returns the bytes of each part of a frame in segments.
Parts parts_of(const OutFrame& frame) {
  const std::vector<uint8_t> whole = wire_bytes(frame);
  wire::FrameHeader header =
      wire::decode_header(std::span(whole).first<kHeaderBytes>(), wire::Limits{}).value();
  header.in_segments = true;
  const auto part = [&](const wire::FrameHeader& head, size_t from, size_t size) {
    std::vector<uint8_t> bytes(kHeaderBytes);
    wire::encode_header(head, std::span(bytes).first<kHeaderBytes>());
    const auto begin = whole.begin() + static_cast<long>(kHeaderBytes + from);
    bytes.insert(bytes.end(), begin, begin + static_cast<long>(size));
    return bytes;
  };
  Parts parts{part(header, 0, header.part_bytes())};
  for (size_t at = kSegmentBytes; at < header.payload_bytes; at += kSegmentBytes) {
    const size_t size = std::min(kSegmentBytes, header.payload_bytes - at);
    parts.push_back(part({.kind = FrameKind::kSegment, .payload_bytes = size, .call_id = at},
                         header.payload_offset() + at, size));
  }
  return parts;
}

}  // namespace

TEMPLATE_TEST_CASE("small frames overtake a frame in segments, and keep their order", "", Tcp,
                   Unix) {
  Half<TestType> half;
  REQUIRE(half.stream->send(make_frame(1, 70, kLarge, 7)).ok());
  REQUIRE(half.stream->send(make_frame(2, 5, 0)).ok());
  REQUIRE(half.stream->send(make_frame(3, 5, 2 * kSegmentBytes)).ok());
  REQUIRE(half.stream->send(make_frame(4, 5, 100)).ok());
  REQUIRE(half.stream->send(of_kind(FrameKind::kHeartbeat, 5)).ok());
  CHECK(read_order(half.raw.get(), 5) == std::vector<uint64_t>{2, 4, 5, 1, 3});
}

TEMPLATE_TEST_CASE("frames that must follow large ones do not overtake them", "", Tcp, Unix) {
  using enum FrameKind;
  Half<TestType> half;
  REQUIRE(half.stream->send(of_kind(kOneway, 1, kLarge, 7)).ok());
  REQUIRE(half.stream->send(of_kind(kOneway, 2, 10, 8)).ok());
  REQUIRE(half.stream->send(of_kind(kOneway, 3, 10, 7)).ok());
  REQUIRE(half.stream->send(of_kind(kCancel, 4)).ok());
  REQUIRE(half.stream->send(of_kind(kRRefFork, 5)).ok());
  REQUIRE(half.stream->send(of_kind(kRRefDelete, 6)).ok());
  REQUIRE(half.stream->send(of_kind(kLeave, 7)).ok());
  REQUIRE(half.stream->send(of_kind(kCredit, 8)).ok());
  CHECK(read_order(half.raw.get(), 8) == std::vector<uint64_t>{2, 5, 8, 1, 3, 4, 6, 7});
  // Without a large frame in the queue they keep their place among small ones.
  for (const FrameKind kind : {kCancel, kCall, kRRefDelete}) {
    REQUIRE(half.stream->send(of_kind(kind, 9)).ok());
    CHECK(read_part(half.raw.get()).kind == kind);
  }
}

TEMPLATE_TEST_CASE("a frame in segments overtakes no frame, and small frames do not starve it", "",
                   Tcp, Unix) {
  constexpr size_t kSmall = kSegmentBytes / 2, kFrames = 120;
  Half<TestType> half;
  REQUIRE(half.stream->send(make_frame(1000, 0, kLarge)).ok());
  for (size_t i = 0; i < kFrames; ++i) REQUIRE(half.stream->send(make_frame(i, 0, kSmall)).ok());
  REQUIRE(half.stream->send(make_frame(1001, 0, 2 * kSegmentBytes)).ok());
  size_t run = 0, longest = 0, small = 0, segments = 0;
  bool is_second = false;
  while (small < kFrames || segments < 1 + kLarge / kSegmentBytes) {
    const wire::FrameHeader header = read_part(half.raw.get());
    const bool is_large = header.in_segments || header.kind == FrameKind::kSegment;
    is_second |= header.call_id == 1001;
    if (is_second && header.kind == FrameKind::kSegment) CHECK(small == kFrames);
    segments += is_large;
    small += !is_large;
    run = is_large ? 0 : run + 1;
    if (segments < kLarge / kSegmentBytes) longest = std::max(longest, run);
  }
  CHECK(longest <= 2);  // kMostOvertaking bytes
  CHECK(longest > 0);
}

TEMPLATE_TEST_CASE("small frames that follow a large one wait for no later frame", "", Tcp, Unix) {
  constexpr uint64_t kDeletes = 50, kCalls = 120, kFirstCall = 1000;
  Half<TestType> half;
  REQUIRE(half.stream->send(make_frame(kFirstCall - 1, 0, kLarge)).ok());
  for (uint64_t i = 0; i < kDeletes; ++i) {
    REQUIRE(half.stream->send(of_kind(FrameKind::kRRefDelete, i)).ok());
  }
  for (uint64_t i = 0; i < kCalls; ++i) {
    REQUIRE(half.stream->send(make_frame(kFirstCall + i, 0, kSegmentBytes / 2)).ok());
  }
  const std::vector<uint64_t> order = read_order(half.raw.get(), 1 + kDeletes + kCalls);
  const auto first = std::ranges::find(order, 0U), last = std::ranges::find(order, kDeletes - 1);
  CHECK(last - first == kDeletes - 1);
  CHECK(order.back() == kFirstCall + kCalls - 1);  // so calls were left
}

TEMPLATE_TEST_CASE("several senders of small and large frames lose and tear none", "", Tcp, Unix) {
  Pair<TestType> pair;
  constexpr uint64_t kSenders = 3, kFrames = 60;
  std::vector<std::thread> senders;
  std::atomic<int> failed{0};
  for (uint64_t s = 0; s < kSenders; ++s) {
    senders.emplace_back([&, s] {
      std::mt19937 random(static_cast<unsigned>(s));
      for (uint64_t i = 0; i < kFrames; ++i) {
        const size_t payload =
            i % 10 == s ? kSegmentBytes + 1 + random() % (2 * kSegmentBytes) : random() % 3000;
        failed += !pair.a->send(make_frame(s << 32 | i, random() % 80, payload, 3)).ok();
      }
    });
  }
  for (std::thread& sender : senders) sender.join();
  CHECK(failed == 0);
  REQUIRE(pair.record_b.wait_frames(kSenders * kFrames));
  std::map<uint64_t, std::vector<bool>> seen;  // by sender
  bool right = true;
  for (const InFrame& frame : pair.record_b.frames()) {
    const uint64_t number = frame.header.call_id & 0xFFFFFFFF;
    std::vector<bool>& of_sender = seen[frame.header.call_id >> 32];
    of_sender.resize(kFrames);
    right &= !frame.header.in_segments && intact(frame) && !of_sender[number];
    of_sender[number] = true;
    // Only frames in segments are overtaken, and they overtake none.
    const bool is_large = frame.payload.size() > kSegmentBytes;
    for (uint64_t before = 0; before < number; ++before) {
      right &= of_sender[before] || (!is_large && before % 10 == frame.header.call_id >> 32);
    }
  }
  CHECK(right);
}

TEMPLATE_TEST_CASE("segments with frames between them are intact in pieces of any length", "", Tcp,
                   Unix) {
  Half<TestType> half;
  std::mt19937 random(4);
  std::vector<uint8_t> bytes;
  const auto append = [&](const std::vector<uint8_t>& part) {
    bytes.insert(bytes.end(), part.begin(), part.end());
  };
  uint64_t id = 0;
  for (const size_t payload : {kSegmentBytes + 1, 2 * kSegmentBytes, 3 * kSegmentBytes + 77}) {
    for (const auto& part : parts_of(make_frame(++id, payload % 100, payload, 3))) {
      append(part);
      for (size_t n = random() % 4; n > 0; --n) {
        append(wire_bytes(make_frame(++id, random() % 90, random() % 9000)));
      }
    }
  }
  for (std::span<const uint8_t> left = bytes; !left.empty();) {
    const size_t size =
        std::min<size_t>(left.size(), 1 + random() % (random() % 4 ? 5000 : 700'000));
    REQUIRE(raw_write(half.raw.get(), left.first(size)));
    left = left.subspan(size);
  }
  REQUIRE(half.record.wait_frames(id));
  for (const InFrame& frame : half.record.frames()) CHECK(intact(frame));
}

TEMPLATE_TEST_CASE("wrong segments end the stream with protocol", "", Tcp, Unix) {
  const OutFrame frame = make_frame(1, 10, 3 * kSegmentBytes + 5);
  const auto good = parts_of(frame);
  const auto changed = [&](size_t part, auto change) {
    std::vector<uint8_t> bytes = good[part];
    const auto head = std::span(bytes).first<kHeaderBytes>();
    wire::FrameHeader header = wire::decode_header(head, wire::Limits{}).value();
    change(header);
    wire::encode_header(header, head);
    return bytes;
  };
  const auto begin = wire_bytes(make_frame(2, 0, 0));
  const std::vector<Parts> wrong = {
      {good[1]},                    // no beginning
      {begin, good[1]},             // of a frame that is whole
      {good[0], good[0]},           // a second beginning
      {good[0], good[2]},           // one is missing
      {good[0], good[1], good[1]},  // one comes twice
      {good[0], good[1], good[2], good[3], good[3]},
      {good[0], changed(1, [](auto& h) { h.payload_bytes -= 1; })},
      {good[0], changed(1, [](auto& h) { h.payload_bytes += 1; })},
      {good[0], changed(1, [](auto& h) { h.payload_bytes = 0; })},
      {good[0], changed(1, [](auto& h) { h.meta_bytes = 64; })},
      {good[0], changed(1, [](auto& h) { h.channel = 1; })},
      {good[0], changed(1, [](auto& h) { h.context_id = 1; })},
      {changed(0, [](auto& h) { h.payload_bytes = kSegmentBytes; })},
  };
  for (const auto& parts : wrong) {
    Half<TestType> half;
    for (const auto& part : parts) static_cast<void>(raw_write(half.raw.get(), part));
    REQUIRE(half.record.wait_closed());
    CHECK(half.record.error().kind == base::ErrorKind::kProtocol);
    CHECK(half.record.error().message.find("segment") != std::string::npos);
    CHECK(half.record.count() == (parts.size() == 5 || parts[0] == begin ? 1 : 0));
  }
}

TEMPLATE_TEST_CASE("a stream that ends between segments delivers nothing and frees its memory", "",
                   Tcp, Unix) {
  Half<TestType> half;
  base::BufferPool pool;
  std::weak_ptr<base::Buffer> body;
  on_loop(half.loop, [&] {
    Stream::Handler handler = half.record.handler();
    handler.allocate = [&](const wire::FrameHeader& header) {
      base::BufferPtr buffer = pool.allocate(header.body_bytes());
      if (header.in_segments) body = buffer;
      return buffer;
    };
    half.stream->set_handler_on_loop(std::move(handler));
  });
  const auto parts = parts_of(make_frame(1, 10, 2 * kSegmentBytes + 5));
  REQUIRE(raw_write(half.raw.get(), parts[0]));
  REQUIRE(raw_write(half.raw.get(), parts[1]));
  REQUIRE(raw_write(half.raw.get(), wire_bytes(make_frame(2, 5, 5))));
  REQUIRE(half.record.wait_frames(1));
  CHECK_FALSE(body.expired());
  half.raw.reset();
  REQUIRE(half.record.wait_closed());
  CHECK(half.record.error().kind == base::ErrorKind::kPeerLost);
  CHECK(half.record.count() == 1);
  on_loop(half.loop, [] {});
  CHECK(body.expired());
}

TEMPLATE_TEST_CASE("close() writes all segments, or drops them at once", "", Tcp, Unix) {
  for (const bool flush : {true, false}) {
    Half<TestType> half;
    OutFrame large = make_frame(1, 5, kLarge);
    const std::weak_ptr<const void> alive = large.keep_alive;
    REQUIRE(half.stream->send(std::move(large)).ok());
    REQUIRE(half.stream->send(make_frame(2, 5, 5)).ok());
    half.stream->close(flush);
    if (flush) {
      CHECK(read_order(half.raw.get(), 2) == std::vector<uint64_t>{2, 1});
      half.raw.reset();
    }
    REQUIRE(half.record.wait_closed());
    CHECK(half.record.error().kind == base::ErrorKind::kCancelled);
    CHECK(eventually([&] { return alive.expired(); }));
  }
}

TEST_CASE("a descriptor comes with a frame in segments, not with one between them") {
  Record record_a, record_b;
  auto [first, second] = Unix::connected();
  Loop loop;
  const StreamPtr a = started(loop, std::move(first), record_a);
  const StreamPtr b = started(loop, std::move(second), record_b);
  on_loop(loop, [&] {
    a->share_memory_on_loop(0);
    b->share_memory_on_loop(0);
  });
  OutFrame large = make_frame(1, 5, kLarge);
  auto descriptor = std::make_shared<Fd>();
  const auto memory = SharedMemory::create(4096, *descriptor).value();
  large.descriptor = descriptor;
  bool is_sent = false;
  std::thread sender([&] { is_sent = a->send(std::move(large)).ok(); });
  for (uint64_t id = 2; id < 200; ++id) REQUIRE(a->send(make_frame(id, 5, 5)).ok());
  sender.join();
  CHECK(is_sent);
  REQUIRE(record_b.wait_frames(199));
  for (const InFrame& frame : record_b.frames()) {
    CHECK(intact(frame));
    CHECK((frame.descriptor != nullptr) == (frame.header.call_id == 1));
  }
}

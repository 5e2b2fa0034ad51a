// Tests frames over each transport: their sizes and order, partial reads, several senders.
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include <netinet/in.h>
#include <netinet/tcp.h>

#include "stream_support.h"

using namespace distrain;
using namespace distrain::net;

TEMPLATE_TEST_CASE("frames of all sizes are echoed intact", "", Tcp, Unix) {
  auto [first, second] = TestType::connected();
  Record record, echo_record;
  Loop loop;
  const StreamPtr stream = started(loop, std::move(first), record);
  const StreamPtr echo = adopt_socket(loop, second.release());
  echo->start({[&echo](InFrame in) {
                 OutFrame out;
                 out.header = in.header;
                 out.meta.assign(in.meta.begin(), in.meta.end());
                 out.payload.push_back(in.payload);
                 out.keep_alive = in.body;
                 static_cast<void>(echo->send(std::move(out)));
               },
               [&](const base::Error& error) { echo_record.closed(error); }},
              {});
  constexpr size_t kSizes[] = {0,  1,     47,    48,    49,      63,      64,
                               65, 65535, 65536, 65537, 1 << 20, 64 << 20};
  uint64_t id = 0;
  for (const size_t meta : {size_t{0}, size_t{1}, size_t{48}, size_t{64}, size_t{65535},
                            size_t{65536}, size_t{65537}, size_t{1} << 20}) {
    for (const size_t payload : kSizes) {
      if (payload > (1 << 20) && meta != 64) continue;
      ++id;
      REQUIRE(stream->send(make_frame(id, meta, payload, 1 + id % 3)).ok());
      REQUIRE(record.wait_frames(1));
      // Takes one frame at a time so that large frames are freed.
      const InFrame frame = record.take();
      REQUIRE(frame.header.call_id == id);
      REQUIRE(frame.meta.size() == meta);
      REQUIRE(frame.payload.size() == payload);
      REQUIRE(intact(frame));
    }
  }
}

TEMPLATE_TEST_CASE("a header arrives with all its fields", "", Tcp, Unix) {
  Pair<TestType> pair;
  OutFrame frame;
  frame.header.kind = wire::FrameKind::kOneway;
  frame.header.channel = 7;
  frame.header.tensor_count = 3;
  frame.header.call_id = 1;
  frame.header.context_id = UINT64_MAX;
  frame.header.autograd_id = 5;
  frame.header.meta_bytes = 999;  // send() overwrites it
  frame.meta = {1, 2, 3};
  REQUIRE(pair.a->send(std::move(frame)).ok());
  REQUIRE(pair.record_b.wait_frames(1));
  const wire::FrameHeader header = pair.record_b.frames()[0].header;
  CHECK(header.kind == wire::FrameKind::kOneway);
  CHECK(header.channel == 7);
  CHECK(header.meta_bytes == 3);
  CHECK(header.tensor_count == 3);
  CHECK(header.payload_bytes == 0);
  CHECK(header.context_id == UINT64_MAX);
  CHECK(header.autograd_id == 5);
}

TEMPLATE_TEST_CASE("many frames in flight keep their order", "", Tcp, Unix) {
  Pair<TestType> pair;
  constexpr size_t kFrames = 5000;
  std::mt19937 random(1);
  for (size_t i = 0; i < kFrames; ++i) {
    const size_t payload = i % 100 == 0 ? random() % 200'000 : random() % 200;
    REQUIRE(pair.a->send(make_frame(i, random() % 100, payload)).ok());
  }
  REQUIRE(pair.record_b.wait_frames(kFrames));
  const std::vector<InFrame> frames = pair.record_b.frames();
  bool right = frames.size() == kFrames;
  for (size_t i = 0; i < kFrames; ++i) right &= frames[i].header.call_id == i && intact(frames[i]);
  CHECK(right);
}

TEMPLATE_TEST_CASE("a payload of thousands of pieces is sent in order", "", Tcp, Unix) {
  Pair<TestType> pair;
  REQUIRE(pair.a->send(make_frame(1, 5, 2'000'003, 5000)).ok());
  REQUIRE(pair.a->send(make_frame(2, 0, 700, 700)).ok());
  REQUIRE(pair.record_b.wait_frames(2));
  CHECK(intact(pair.record_b.frames()[0]));
  CHECK(intact(pair.record_b.frames()[1]));
}

TEMPLATE_TEST_CASE("both directions work concurrently", "", Tcp, Unix) {
  Pair<TestType> pair;
  constexpr size_t kFrames = 60, kBytes = 300'000;
  std::thread other([&] {
    for (size_t i = 0; i < kFrames; ++i) {
      static_cast<void>(pair.b->send(make_frame(i, 10, kBytes)));
    }
  });
  for (size_t i = 0; i < kFrames; ++i) CHECK(pair.a->send(make_frame(i, 10, kBytes)).ok());
  other.join();
  REQUIRE(pair.record_a.wait_frames(kFrames));
  REQUIRE(pair.record_b.wait_frames(kFrames));
  bool right = true;
  for (const InFrame& frame : pair.record_a.frames()) right &= intact(frame);
  for (const InFrame& frame : pair.record_b.frames()) right &= intact(frame);
  CHECK(right);
}

TEMPLATE_TEST_CASE("frames that arrive byte by byte or in one piece are intact", "", Tcp, Unix) {
  Half<TestType> half;
  std::vector<uint8_t> bytes;
  const size_t sizes[][2] = {{0, 0}, {1, 0}, {0, 1}, {47, 3}, {48, 64}, {200, 100}, {0, 0}};
  uint64_t id = 0;
  for (const auto& [meta, payload] : sizes) {
    const auto frame = wire_bytes(make_frame(++id, meta, payload));
    bytes.insert(bytes.end(), frame.begin(), frame.end());
  }
  REQUIRE(raw_write(half.raw.get(), bytes, 1));
  REQUIRE(half.record.wait_frames(id));
  REQUIRE(raw_write(half.raw.get(), bytes));
  REQUIRE(half.record.wait_frames(2 * id));
  const std::vector<InFrame> frames = half.record.frames();
  for (size_t i = 0; i < frames.size(); ++i) {
    CHECK(frames[i].header.call_id == i % id + 1);
    CHECK(intact(frames[i]));
  }
}

TEMPLATE_TEST_CASE("frames in pieces of any length may cross the end of the scratch buffer", "",
                   Tcp, Unix) {
  Half<TestType> half;
  std::mt19937 random(3);
  constexpr size_t kFrames = 400;
  std::vector<uint8_t> bytes;
  for (uint64_t i = 0; i < kFrames; ++i) {
    const auto frame =
        wire_bytes(make_frame(i, random() % 300, random() % (i % 20 ? 500 : 150'000)));
    bytes.insert(bytes.end(), frame.begin(), frame.end());
  }
  for (std::span<const uint8_t> left = bytes; !left.empty();) {
    const size_t size =
        std::min<size_t>(left.size(), 1 + random() % (random() % 8 ? 3000 : 100'000));
    REQUIRE(raw_write(half.raw.get(), left.first(size)));
    left = left.subspan(size);
  }
  REQUIRE(half.record.wait_frames(kFrames));
  const std::vector<InFrame> frames = half.record.frames();
  bool right = frames.size() == kFrames;
  for (size_t i = 0; i < kFrames; ++i) right &= frames[i].header.call_id == i && intact(frames[i]);
  CHECK(right);
}

TEMPLATE_TEST_CASE("several senders keep their order, and no frame is torn", "", Tcp, Unix) {
  Pair<TestType> pair;
  constexpr uint64_t kSenders = 4, kFrames = 300;
  std::vector<std::thread> senders;
  std::atomic<int> failed{0};
  for (uint64_t s = 0; s < kSenders; ++s) {
    senders.emplace_back([&, s] {
      std::mt19937 random(static_cast<unsigned>(s));
      for (uint64_t i = 0; i < kFrames; ++i) {
        const size_t payload = random() % (i % 10 ? 400 : 60'000);
        failed += !pair.a->send(make_frame(s << 32 | i, random() % 80, payload)).ok();
      }
    });
  }
  for (std::thread& sender : senders) sender.join();
  CHECK(failed == 0);
  REQUIRE(pair.record_b.wait_frames(kSenders * kFrames));
  std::map<uint64_t, uint64_t> next;
  bool right = true;
  for (const InFrame& frame : pair.record_b.frames()) {
    const uint64_t sender = frame.header.call_id >> 32;
    right &= (frame.header.call_id & 0xFFFFFFFF) == next[sender]++ && intact(frame);
  }
  CHECK(right);
}

TEMPLATE_TEST_CASE("with a slow reader, frames wait in order and stay alive", "", Tcp, Unix) {
  Half<TestType> half;
  constexpr size_t kFrames = 300, kBytes = 65'000;
  const auto alive = fill(*half.stream, kFrames, kBytes);
  CHECK(count_alive(alive) > kFrames / 4);  // no socket buffers 19 MB
  CHECK_FALSE(alive.back().expired());
  bool right = true;
  for (size_t i = 0; i < kFrames; ++i) {
    const auto expected = wire_bytes(make_frame(i, 40, kBytes));
    right &= raw_read(half.raw.get(), expected.size()) == expected;
  }
  CHECK(right);
  CHECK(eventually([&] { return count_alive(alive) == 0; }));
  // The stream is idle again, so send() writes the next frame itself, on this thread.
  REQUIRE(half.stream->send(make_frame(1, 3, 4)).ok());
  CHECK(raw_read(half.raw.get(), wire_bytes(make_frame(1, 3, 4)).size()).size() == 48 + 64 + 4);
}

TEMPLATE_TEST_CASE("frames sent before start arrive", "", Tcp, Unix) {
  auto [first, second] = TestType::connected();
  Record record_a, record_b;
  Loop loop;
  const StreamPtr a = adopt_socket(loop, first.release());
  constexpr size_t kFrames = 200;
  for (size_t i = 0; i < kFrames; ++i) REQUIRE(a->send(make_frame(i, 10, 65'000)).ok());
  a->start(record_a.handler(), {});
  const StreamPtr b = started(loop, std::move(second), record_b);
  REQUIRE(record_b.wait_frames(kFrames));
  for (size_t i = 0; i < kFrames; ++i) CHECK(record_b.frames()[i].header.call_id == i);
}

// BBR paces its packets, so large messages take twice as long on loopback.
TEST_CASE("a stream on loopback does not use BBR, whatever the system's default is") {
  auto [first, second] = Tcp::connected();
  const int fd = first.get();
  if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "bbr", 3) != 0) return;  // this kernel has no BBR
  Loop loop;
  const StreamPtr stream = adopt_socket(loop, first.release());
  char name[16] = {};
  socklen_t size = sizeof name;
  REQUIRE(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0);
  CHECK(std::string(name) != "bbr");
}

TEMPLATE_TEST_CASE("a stream names its peer", "", Tcp, Unix) {
  Pair<TestType> pair;
  if (TestType::kIsTcp) {
    CHECK(pair.a->peer_name().rfind("127.0.0.1:", 0) == 0);
  } else {
    CHECK(pair.a->peer_name() == "unix");
  }
}

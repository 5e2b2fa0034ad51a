// One suite, run for each transport.
#include <atomic>
#include <cstdio>
#include <map>
#include <random>
#include <thread>

#include "net_support.h"

using namespace distrain;
using namespace distrain::net;

namespace {

// Two streams of one connection on one loop.
template <class Transport>
struct Pair {
  Pair() {
    auto [first, second] = Transport::connected();
    a = started(loop, std::move(first), record_a);
    b = started(loop, std::move(second), record_b);
  }
  Record record_a, record_b;
  Loop loop;  // after the records: it ends first
  StreamPtr a, b;
};

// A stream against a socket in the test's hands.
template <class Transport>
struct Half {
  explicit Half(const wire::Limits& limits = {}) {
    auto [first, second] = Transport::connected();
    raw = std::move(second);
    stream = started(loop, std::move(first), record, limits);
  }
  Record record;
  Fd raw;
  Loop loop;
  StreamPtr stream;
};

// Sends until the socket takes no more; what was sent is large enough to be queued.
std::vector<std::weak_ptr<const void>> fill(Stream& stream, size_t frames, size_t bytes) {
  std::vector<std::weak_ptr<const void>> alive;
  for (size_t i = 0; i < frames; ++i) {
    OutFrame frame = make_frame(i, 40, bytes);
    alive.push_back(frame.keep_alive);
    CHECK(stream.send(std::move(frame)).ok());
  }
  return alive;
}

size_t count_alive(const std::vector<std::weak_ptr<const void>>& watched) {
  size_t alive = 0;
  for (const auto& one : watched) alive += !one.expired();
  return alive;
}

bool eventually(const std::function<bool()>& condition) {
  const base::TimePoint end = base::deadline_after(kLongest);
  while (!condition()) {
    if (base::Clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace

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
      REQUIRE(stream->send(make_frame(++id, meta, payload, 1 + id % 3)).ok());
      REQUIRE(record.wait_frames(1));
      // One at a time: the large ones are not kept.
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
  frame.header.meta_bytes = 999;  // overwritten by send
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

TEMPLATE_TEST_CASE("many frames at once keep their order", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("a payload of thousands of pieces goes out in order", "", Tcp, Unix) {
  Pair<TestType> pair;
  REQUIRE(pair.a->send(make_frame(1, 5, 2'000'003, 5000)).ok());
  REQUIRE(pair.a->send(make_frame(2, 0, 700, 700)).ok());
  REQUIRE(pair.record_b.wait_frames(2));
  CHECK(intact(pair.record_b.frames()[0]));
  CHECK(intact(pair.record_b.frames()[1]));
}

TEMPLATE_TEST_CASE("both directions at once", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("frames that come byte by byte, or all in one", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("frames in pieces of any length, across the scratch buffer's end", "", Tcp,
                   Unix) {
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

TEMPLATE_TEST_CASE("several senders: each one's order is kept, nothing is torn", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("a slow reader: the queue waits, in order, and holds what it has to send", "",
                   Tcp, Unix) {
  Half<TestType> half;
  constexpr size_t kFrames = 300, kBytes = 65'000;
  const auto alive = fill(*half.stream, kFrames, kBytes);
  CHECK(count_alive(alive) > kFrames / 4);  // no socket takes 19 MB
  CHECK_FALSE(alive.back().expired());
  bool right = true;
  for (size_t i = 0; i < kFrames; ++i) {
    const auto expected = wire_bytes(make_frame(i, 40, kBytes));
    right &= raw_read(half.raw.get(), expected.size()) == expected;
  }
  CHECK(right);
  CHECK(eventually([&] { return count_alive(alive) == 0; }));
  // idle again: the next one is written by the caller
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

TEMPLATE_TEST_CASE("close delivers what was sent before", "", Tcp, Unix) {
  Pair<TestType> pair;
  constexpr size_t kFrames = 100;
  for (size_t i = 0; i < kFrames; ++i) REQUIRE(pair.a->send(make_frame(i, 10, 200'000)).ok());
  pair.a->close();
  CHECK_FALSE(pair.a->send(make_frame(1, 0, 0)).ok());
  REQUIRE(pair.record_b.wait_closed());
  REQUIRE(pair.record_a.wait_closed());
  CHECK(pair.record_b.count() == kFrames);
  bool right = true;
  for (const InFrame& frame : pair.record_b.frames()) right &= intact(frame);
  CHECK(right);
  CHECK(pair.record_a.error().kind == base::ErrorKind::kCancelled);
  CHECK(pair.record_b.error().kind == base::ErrorKind::kPeerLost);
  CHECK(pair.record_a.closes() == 1);
  CHECK(pair.record_b.closes() == 1);
}

// A socket that is closed while it holds unread bytes resets a TCP connection, and what the kernel
// had not sent yet would be lost.
TEMPLATE_TEST_CASE("close delivers everything though the other side sends too", "", Tcp, Unix) {
  for (int round = 0; round < 10; ++round) {
    Half<TestType> half;
    std::atomic<bool> stop{false};
    std::thread talker([&] {
      const auto frame = wire_bytes(make_frame(1, 100, 3000));
      while (!stop && raw_write(half.raw.get(), frame)) {
      }
    });
    constexpr size_t kFrames = 40;
    for (size_t i = 0; i < kFrames; ++i) REQUIRE(half.stream->send(make_frame(i, 10, 50'000)).ok());
    half.stream->close();
    bool right = true;
    for (size_t i = 0; i < kFrames; ++i) {
      const auto expected = wire_bytes(make_frame(i, 10, 50'000));
      right &= raw_read(half.raw.get(), expected.size()) == expected;
    }
    CHECK(right);
    stop = true;
    talker.join();
    half.raw.reset();
    REQUIRE(half.record.wait_closed());
    CHECK(half.record.closes() == 1);
    CHECK(half.record.error().kind == base::ErrorKind::kCancelled);
    CHECK_FALSE(half.record.frames_after_close());
  }
}

TEMPLATE_TEST_CASE("close ends even if the other side never does", "", Tcp, Unix) {
  Half<TestType> half;
  REQUIRE(half.stream->send(make_frame(1, 10, 10)).ok());
  half.stream->close();
  REQUIRE(half.record.wait_closed());
  CHECK(half.record.error().kind == base::ErrorKind::kCancelled);
  const auto expected = wire_bytes(make_frame(1, 10, 10));
  CHECK(raw_read(half.raw.get(), expected.size() + 1) == expected);  // and then the end
}

TEMPLATE_TEST_CASE("close without flush drops the queue", "", Tcp, Unix) {
  Half<TestType> half;
  const auto alive = fill(*half.stream, 300, 65'000);
  half.stream->close(false);
  REQUIRE(half.record.wait_closed());
  CHECK(half.record.error().kind == base::ErrorKind::kCancelled);
  // Let go at once, not with the last handle of the stream.
  CHECK(eventually([&] { return count_alive(alive) == 0; }));
  CHECK_FALSE(half.stream->send(make_frame(1, 0, 0)).ok());
  CHECK(raw_read(half.raw.get(), 300 * 66'000).size() < 300 * 65'000);
}

TEMPLATE_TEST_CASE("a flush that cannot end is cut by close without flush", "", Tcp, Unix) {
  Half<TestType> half;
  const auto alive = fill(*half.stream, 300, 65'000);
  half.stream->close();
  half.stream->close();
  CHECK(half.record.closes() == 0);
  half.stream->close(false);
  half.stream->close(false);
  REQUIRE(half.record.wait_closed());
  CHECK(eventually([&] { return count_alive(alive) == 0; }));
  on_loop(half.loop, [] {});
  CHECK(half.record.closes() == 1);
}

TEMPLATE_TEST_CASE("the peer's end is told once", "", Tcp, Unix) {
  Half<TestType> half;
  half.raw.reset();
  REQUIRE(half.record.wait_closed());
  CHECK(half.record.error().kind == base::ErrorKind::kPeerLost);
  CHECK_FALSE(half.stream->send(make_frame(1, 0, 0)).ok());
  half.stream->close();
  half.stream->close(false);
  on_loop(half.loop, [] {});
  CHECK(half.record.closes() == 1);
}

TEMPLATE_TEST_CASE("a peer that ends in the middle of a frame is lost", "", Tcp, Unix) {
  for (const size_t cut : {size_t{1}, size_t{47}, size_t{48}, size_t{100}, size_t{90'000}}) {
    Half<TestType> half;
    const auto bytes = wire_bytes(make_frame(1, 100, 100'000));
    REQUIRE(raw_write(half.raw.get(), std::span(bytes).first(cut)));
    half.raw.reset();
    REQUIRE(half.record.wait_closed());
    CHECK(half.record.error().kind == base::ErrorKind::kPeerLost);
    CHECK(half.record.count() == 0);
  }
}

// Writing to a connection that is gone raises SIGPIPE unless that is seen to.
TEMPLATE_TEST_CASE("the peer ends while much is queued for it", "", Tcp, Unix) {
  for (int round = 0; round < 5; ++round) {
    Half<TestType> half;
    const auto alive = fill(*half.stream, 100, 65'000);
    half.raw.reset();
    REQUIRE(half.record.wait_closed());
    CHECK(half.record.error().kind == base::ErrorKind::kPeerLost);
    CHECK(eventually([&] { return count_alive(alive) == 0; }));
    CHECK_FALSE(half.stream->send(make_frame(1, 0, 0)).ok());
    CHECK(half.record.closes() == 1);
  }
}

// An abort says who is to blame: it must not be lost because our own writes fail first.
TEMPLATE_TEST_CASE("a peer's last words are heard though it left our queue unread", "", Unix) {
  for (int round = 0; round < 10; ++round) {
    Half<TestType> half;
    const auto alive = fill(*half.stream, 100, 65'000);
    base::Promise<void> go;
    half.loop.post([opened = go.future()] {
      while (!opened.done()) std::this_thread::yield();  // the loop is late
    });
    REQUIRE(raw_write(half.raw.get(), wire_bytes(make_frame(7, 20, 0))));
    half.raw.reset();
    go.set();
    REQUIRE(half.record.wait_closed());
    REQUIRE(half.record.count() == 1);
    CHECK(intact(half.record.frames()[0]));
    CHECK(half.record.error().kind == base::ErrorKind::kPeerLost);
    CHECK(half.record.closes() == 1);
  }
}

TEMPLATE_TEST_CASE("bytes that are no frame end the stream with protocol", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("a frame beyond the limits ends the stream before its body", "", Tcp, Unix) {
  const wire::Limits limits{1000, 4, 1 << 20};
  wire::FrameHeader meta, tensors, payload, huge;
  meta.meta_bytes = 1001;
  tensors.tensor_count = 5;
  payload.payload_bytes = (1 << 20) + 1;
  huge.payload_bytes = UINT64_MAX;
  for (const wire::FrameHeader& header : {meta, tensors, payload, huge}) {
    Half<TestType> half(limits);
    REQUIRE(raw_write(half.raw.get(), wire_bytes(make_frame(1, 1000, 1 << 20))));  // just allowed
    std::array<uint8_t, wire::kHeaderBytes> bytes;
    wire::encode_header(header, bytes);
    REQUIRE(raw_write(half.raw.get(), bytes));
    REQUIRE(half.record.wait_closed());
    CHECK(half.record.error().kind == base::ErrorKind::kProtocol);
    CHECK(half.record.count() == 1);
  }
}

TEMPLATE_TEST_CASE("a frame that no peer would take is refused where it is sent", "", Tcp, Unix) {
  Pair<TestType> pair;
  OutFrame meta;
  meta.meta.resize(size_t{wire::Limits{}.max_meta_bytes} + 1);
  OutFrame tensors;
  tensors.header.tensor_count = wire::Limits{}.max_tensors + 1;
  OutFrame payload;  // not read: its length alone is too much
  payload.payload.assign(2, std::span<const uint8_t>(reinterpret_cast<const uint8_t*>(&payload),
                                                     wire::Limits{}.max_payload_bytes));
  for (OutFrame* frame : {&meta, &tensors, &payload}) {
    const base::Status status = pair.a->send(std::move(*frame));
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().kind == base::ErrorKind::kInvalid);
  }
  REQUIRE(pair.a->send(make_frame(1, 1, 1)).ok());  // the stream is as it was
  REQUIRE(pair.record_b.wait_frames(1));
}

TEMPLATE_TEST_CASE("limits set in on_frame hold from the next frame on", "", Tcp, Unix) {
  auto [first, second] = TestType::connected();
  Record record;
  Loop loop;
  const StreamPtr stream = adopt_socket(loop, first.release());
  stream->start({[&](InFrame frame) {
                   stream->set_limits_on_loop(frame.header.call_id == 2 ? wire::kHandshakeLimits
                                                                        : wire::Limits{});
                   record.add(std::move(frame));
                 },
                 [&](const base::Error& error) { record.closed(error); }},
                wire::kHandshakeLimits);
  // All in one burst, so that they are decoded out of one buffer.
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

TEMPLATE_TEST_CASE("a handler replaced in on_frame gets all that follows", "", Tcp, Unix) {
  auto [first, second] = TestType::connected();
  Record before, after;
  Loop loop;
  const StreamPtr stream = adopt_socket(loop, first.release());
  std::atomic<bool> alive_inside{false};
  auto token = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = token;
  stream->start({[&, token](InFrame frame) {
                   stream->set_handler_on_loop(after.handler());
                   alive_inside = *token == 1;  // though it is replaced already
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

TEMPLATE_TEST_CASE("closing and letting go of the stream inside its own handlers", "", Tcp, Unix) {
  for (const bool flush : {false, true}) {
    auto [first, second] = TestType::connected();
    Record record;
    Loop loop;
    auto stream = std::make_shared<StreamPtr>(adopt_socket(loop, first.release()));
    const std::weak_ptr<Stream> watch = *stream;
    (*stream)->start({[&record, stream, flush](InFrame frame) {
                        if (*stream) (*stream)->close(flush);
                        stream->reset();
                        record.add(std::move(frame));
                      },
                      [&record](const base::Error& error) { record.closed(error); }},
                     {});
    const auto bytes = wire_bytes(make_frame(1, 10, 10));
    REQUIRE(raw_write(second.get(), bytes));
    CHECK(raw_read(second.get(), 1).empty());
    second.reset();
    REQUIRE(record.wait_closed());
    CHECK(record.closes() == 1);
    CHECK(eventually([&] { return watch.expired(); }));
  }
}

TEMPLATE_TEST_CASE("a loop that ends closes its streams, queued data or not", "", Tcp, Unix) {
  auto [first, second] = TestType::connected();
  auto [third, fourth] = TestType::connected();
  Record record, idle_record;
  StreamPtr stream, idle;
  std::vector<std::weak_ptr<const void>> alive;
  {
    Loop loop;
    stream = started(loop, std::move(first), record);
    idle = started(loop, std::move(third), idle_record);
    alive = fill(*stream, 300, 65'000);
    CHECK(count_alive(alive) > 0);
  }
  CHECK(record.closes() == 1);
  CHECK(idle_record.closes() == 1);
  CHECK(record.error().kind == base::ErrorKind::kCancelled);
  CHECK(count_alive(alive) == 0);
  // What is left of them is harmless.
  CHECK_FALSE(stream->send(make_frame(1, 0, 0)).ok());
  stream->close();
  idle->close(false);
  CHECK(raw_read(fourth.get(), 1).empty());
}

TEMPLATE_TEST_CASE("a stream that was never started may outlive its loop", "", Tcp, Unix) {
  auto [first, second] = TestType::connected();
  StreamPtr stream;
  {
    Loop loop;
    stream = adopt_socket(loop, first.release());
    REQUIRE(stream->send(make_frame(1, 2, 3)).ok());
  }
  static_cast<void>(fill(*stream, 300, 65'000));
  stream->close();
  stream.reset();
  CHECK(raw_read(second.get(), 48).size() == 48);
}

TEMPLATE_TEST_CASE("a stream closed before its start tells so when it is started", "", Tcp, Unix) {
  for (const bool flush : {false, true}) {
    auto [first, second] = TestType::connected();
    Record record;
    Loop loop;
    const StreamPtr stream = adopt_socket(loop, first.release());
    stream->close(flush);
    stream->start(record.handler(), {});
    if (flush) second.reset();
    REQUIRE(record.wait_closed());
    CHECK(record.closes() == 1);
  }
}

TEMPLATE_TEST_CASE("a connection that was reset before it was adopted", "", Tcp, Unix) {
  auto [first, second] = TestType::connected();
  const linger at_once{1, 0};
  setsockopt(second.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  second.reset();
  Record record;
  Loop loop;
  const StreamPtr stream = started(loop, std::move(first), record);
  REQUIRE(record.wait_closed());
  CHECK(record.error().kind == base::ErrorKind::kPeerLost);
  CHECK((stream->peer_name() == "unix") == !TestType::kIsTcp);
}

TEMPLATE_TEST_CASE("a stream names its peer", "", Tcp, Unix) {
  Pair<TestType> pair;
  if (TestType::kIsTcp) {
    CHECK(pair.a->peer_name().rfind("127.0.0.1:", 0) == 0);
  } else {
    CHECK(pair.a->peer_name() == "unix");
  }
}

TEMPLATE_TEST_CASE("closes from all sides at once: on_close once each", "", Tcp, Unix) {
  for (int round = 0; round < 30; ++round) {
    Record record_a, record_b;
    {
      auto [first, second] = TestType::connected();
      Loop loop;
      const StreamPtr a = started(loop, std::move(first), record_a);
      const StreamPtr b = started(loop, std::move(second), record_b);
      std::vector<std::thread> threads;
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
          const StreamPtr& mine = t % 2 ? a : b;
          for (int i = 0; i < 20; ++i) static_cast<void>(mine->send(make_frame(1, 10, 5000)));
          mine->close((round + t) % 3 != 0);
          static_cast<void>(mine->send(make_frame(1, 1, 1)));
        });
      }
      for (std::thread& thread : threads) thread.join();
      if (round % 2) {
        REQUIRE(record_a.wait_closed());
        REQUIRE(record_b.wait_closed());
      }
    }
    REQUIRE(record_a.closes() == 1);
    REQUIRE(record_b.closes() == 1);
    REQUIRE_FALSE(record_a.frames_after_close());
    REQUIRE_FALSE(record_b.frames_after_close());
  }
}

TEMPLATE_TEST_CASE("streams come and go without a descriptor left behind", "", Tcp, Unix) {
  const auto descriptors = [] {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      ++count;
    }
    return count;
  };
  { const Loop first; }  // libuv keeps a pipe from its first loop on
  const size_t before = descriptors();
  {
    Loop loop;
    for (int i = 0; i < 40; ++i) {
      auto [first, second] = TestType::connected();
      Record record_a, record_b;
      const StreamPtr a = started(loop, std::move(first), record_a);
      const StreamPtr b = started(loop, std::move(second), record_b);
      REQUIRE(a->send(make_frame(1, 2, 3)).ok());
      if (i % 4 == 0) {
        REQUIRE(record_b.wait_frames(1));
        b->close();
      }
      a->close(i % 2);
      REQUIRE(record_a.wait_closed());
      b->close(false);
      REQUIRE(record_b.wait_closed());
    }
  }
  CHECK(descriptors() == before);
}

// Tests how a stream ends, over each transport: by close(), by the peer or by its loop.
#include <atomic>
#include <thread>

#include "stream_support.h"

using namespace distrain;
using namespace distrain::net;

TEMPLATE_TEST_CASE("close delivers frames that were sent before", "", Tcp, Unix) {
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

// Closing a socket with unread data resets a TCP connection, which would discard unsent frames.
TEMPLATE_TEST_CASE("close delivers all frames even if the other side is sending", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("close ends even if the other side never closes", "", Tcp, Unix) {
  Half<TestType> half;
  REQUIRE(half.stream->send(make_frame(1, 10, 10)).ok());
  half.stream->close();
  REQUIRE(half.record.wait_closed());
  CHECK(half.record.error().kind == base::ErrorKind::kCancelled);
  const auto expected = wire_bytes(make_frame(1, 10, 10));
  CHECK(raw_read(half.raw.get(), expected.size() + 1) == expected);  // then the connection ends
}

TEMPLATE_TEST_CASE("close without flush drops the queue", "", Tcp, Unix) {
  Half<TestType> half;
  const auto alive = fill(*half.stream, 300, 65'000);
  half.stream->close(false);
  REQUIRE(half.record.wait_closed());
  CHECK(half.record.error().kind == base::ErrorKind::kCancelled);
  // The stream releases its frames at once, although the test still holds the stream.
  CHECK(eventually([&] { return count_alive(alive) == 0; }));
  CHECK_FALSE(half.stream->send(make_frame(1, 0, 0)).ok());
  CHECK(raw_read(half.raw.get(), 300 * 66'000).size() < 300 * 65'000);
}

TEMPLATE_TEST_CASE("close without flush ends a flush that cannot complete", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("the end of the peer is reported once", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("a peer that disconnects in the middle of a frame is lost", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("a stream that has ended frees a partial frame", "", Tcp, Unix) {
  auto [ours, theirs] = TestType::connected();
  base::BufferPool pool;
  std::weak_ptr<base::Buffer> body;
  base::Promise<void> begun, closed;
  Loop loop;
  const StreamPtr stream = adopt_socket(loop, ours.release());
  stream->start({{},
                 [&](const base::Error&) { closed.set(); },
                 [&](const wire::FrameHeader& header) {
                   base::BufferPtr buffer = pool.allocate(header.body_bytes());
                   body = buffer;
                   begun.set();
                   return buffer;
                 }},
                {});
  const auto bytes = wire_bytes(make_frame(1, 100, 100'000));
  REQUIRE(raw_write(theirs.get(), std::span(bytes).first(5000)));
  begun.future().wait();
  theirs.reset();
  closed.future().wait();
  CHECK(body.expired());
}

// Writing to a closed connection raises SIGPIPE unless the stream suppresses the signal.
TEMPLATE_TEST_CASE("the peer may disconnect while much data is queued for it", "", Tcp, Unix) {
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

namespace {

// Sends a frame and disconnects before `go` unblocks the loop. Checks that the frame arrives.
void check_last_words_heard(Half<Unix>& half, base::Promise<void>& go) {
  REQUIRE(raw_write(half.raw.get(), wire_bytes(make_frame(7, 20, 0))));
  half.raw.reset();
  go.set();
  REQUIRE(half.record.wait_closed());
  REQUIRE(half.record.count() == 1);
  CHECK(intact(half.record.frames()[0]));
  CHECK(half.record.error().kind == base::ErrorKind::kPeerLost);
  CHECK(half.record.closes() == 1);
}

}  // namespace

// The peer's last frame may be an abort with its reason, so a failed write on this side must not
// discard the frame.
TEST_CASE("a peer's last frame is received though the peer left our queue unread") {
  for (int round = 0; round < 10; ++round) {
    Half<Unix> half;
    const auto alive = fill(*half.stream, 100, 65'000);
    base::Promise<void> go;
    half.loop.post([opened = go.future()] {
      while (!opened.done()) std::this_thread::yield();
    });
    check_last_words_heard(half, go);
  }
}

TEMPLATE_TEST_CASE("bytes that a busy loop has not read yet show that the peer is alive", "", Tcp,
                   Unix) {
  base::Promise<base::TimePoint> before, after;
  base::Promise<void> sent;
  Half<TestType> half;
  half.loop.post([&, is_sent = sent.future()] {
    before.set(half.stream->last_heard_on_loop());
    while (!is_sent.done()) std::this_thread::yield();
    base::TimePoint heard = before.future().wait();
    const base::TimePoint end = base::deadline_after(kLongest);
    while (heard == before.future().wait() && base::Clock::now() < end) {
      heard = half.stream->last_heard_on_loop();
    }
    after.set(heard);
  });
  const base::TimePoint first = before.future().wait();
  const base::TimePoint start = base::Clock::now();
  REQUIRE(raw_write(half.raw.get(), wire_bytes(make_frame(1, 0, 0))));
  sent.set();
  CHECK(first < start);
  CHECK(after.future().wait() >= start);
}

TEST_CASE("a late loop still receives a peer's last frame") {
  Half<Unix> half;
  ::shutdown(half.raw.get(), SHUT_RD);  // a write fails; the stream still reads for one second
  REQUIRE(half.stream->send(make_frame(1, 0, 0)).ok());
  base::Promise<void> late, go;
  half.loop.call_at(base::deadline_after(300ms), [&late, opened = go.future()] {
    late.set();
    while (!opened.done()) std::this_thread::yield();
  });
  late.future().wait();
  std::this_thread::sleep_for(1s);
  check_last_words_heard(half, go);
}

TEMPLATE_TEST_CASE("a handler may close and release its own stream", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("a loop that ends closes its streams, whether data is queued or not", "", Tcp,
                   Unix) {
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
  // Calls on a closed stream have no effect.
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

TEMPLATE_TEST_CASE("a stream that was closed before its start reports it when it is started", "",
                   Tcp, Unix) {
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

TEMPLATE_TEST_CASE("a connection that was reset before it was adopted is reported", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("concurrent closes from all sides call on_close once each", "", Tcp, Unix) {
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

TEMPLATE_TEST_CASE("streams leave no descriptor open", "", Tcp, Unix) {
  const auto descriptors = [] {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      ++count;
    }
    return count;
  };
  { const Loop first; }  // libuv keeps a pipe of the first loop open, so count it in `before`
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

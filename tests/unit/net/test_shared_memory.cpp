// Tests payloads in shared memory, and descriptors that frames carry: Note [Payloads in shared
// memory] in src/net/arena.h.
#include <algorithm>
#include <cstdio>
#include <future>
#include <numeric>
#include <random>
#include <vector>

#include <sys/mman.h>

#include "arena.h"
#include "distrain/net/shared_memory.h"
#include "stream_support.h"

using namespace distrain;
using namespace distrain::net;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Two streams that share memory of `bytes` for each direction. Frames of `a` arrive at `at_b`.
struct Both {
  explicit Both(uint64_t bytes) {
    auto [first, second] = Unix::connected();
    a = started(loop, std::move(first), at_a);
    b = started(loop, std::move(second), at_b);
    on_loop(loop, [&] {
      a->share_memory_on_loop(bytes);
      b->share_memory_on_loop(bytes);
    });
  }
  // Sends a large frame over the socket, after which `b` offers its memory, and an answer, which
  // `a` receives after that offer.
  void agree() {
    REQUIRE(a->send(make_frame(1, 5, kMiB)).ok());
    REQUIRE(at_b.wait_frames(1));
    REQUIRE(b->send(make_frame(2, 5, 5)).ok());
    REQUIRE(at_a.wait_frames(1));
    at_b.take();
  }

  Record at_a, at_b;
  Loop loop;
  StreamPtr a, b;
};

OutFrame attached(uint64_t flags, uint64_t number = 0, uint64_t offset = 0) {
  OutFrame frame;
  frame.header = {.kind = wire::FrameKind::kAttached,
                  .call_id = number,
                  .context_id = offset,
                  .autograd_id = flags};
  return frame;
}

// Sends the bytes, and with the first one the descriptor.
void send_with(int fd, std::span<const uint8_t> bytes, const Fd& descriptor, int copies = 1) {
  iovec piece{const_cast<uint8_t*>(bytes.data()), bytes.size()};
  std::vector<uint8_t> control(CMSG_SPACE(static_cast<size_t>(copies) * sizeof(int)));
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(static_cast<size_t>(copies) * sizeof(int));
  for (int i = 0; i < copies; ++i) {
    const int value = descriptor.get();
    std::memcpy(CMSG_DATA(head) + static_cast<size_t>(i) * sizeof(int), &value, sizeof value);
  }
  REQUIRE(::sendmsg(fd, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
}

std::vector<uint8_t> joined(std::vector<uint8_t> first, const std::vector<uint8_t>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

OutFrame arena_frame(uint64_t bytes) {
  OutFrame frame;
  frame.header = {.kind = wire::FrameKind::kArena, .call_id = bytes};
  return frame;
}

}  // namespace

TEST_CASE("large payloads come through shared memory once the receiver has offered it") {
  Both both(16 * kMiB);
  both.agree();
  for (const auto& [payload, is_shared] : {std::pair<uint64_t, bool>(kLeastInArena - 1, false),
                                           {kLeastInArena, true},
                                           {3 * kMiB + 5, true},
                                           {16 * kMiB, true},
                                           {16 * kMiB + 1, false}}) {
    REQUIRE(both.a->send(make_frame(7, 100, payload, 3)).ok());
    REQUIRE(both.at_b.wait_frames(1));
    const InFrame frame = both.at_b.take();
    CHECK(intact(frame));
    CHECK(frame.is_shared == is_shared);
  }
}

TEST_CASE("a thousand kept payloads are right, and use no more shared memory than agreed") {
  constexpr int kFrames = 1000;
  Both both(8 * kMiB);
  both.agree();
  for (int i = 0; i < kFrames; ++i) {
    REQUIRE(both.a->send(make_frame(static_cast<uint64_t>(i), 10, 64 << 10)).ok());
  }
  REQUIRE(both.at_b.wait_frames(kFrames));
  std::vector<InFrame> frames = both.at_b.frames();
  CHECK(std::ranges::all_of(frames, intact));
  CHECK(std::ranges::count(frames, true, &InFrame::is_shared) == 8 * kMiB / (64 << 10));
  // All of the memory is used again when the payloads are released.
  frames.clear();
  while (both.at_b.count() > 0) both.at_b.take();
  REQUIRE(both.a->send(make_frame(5, 10, 8 * kMiB)).ok());
  REQUIRE(both.at_b.wait_frames(1));
  const InFrame last = both.at_b.take();
  CHECK(last.is_shared);
  CHECK(intact(last));
}

TEST_CASE("a payload in shared memory outlives its streams and the loop") {
  InFrame kept;
  {
    Both both(kMiB);
    both.agree();
    REQUIRE(both.a->send(make_frame(9, 10, kMiB)).ok());
    REQUIRE(both.at_b.wait_frames(1));
    kept = both.at_b.take();
  }
  CHECK(kept.is_shared);
  CHECK(intact(kept));
}

TEST_CASE("many threads send through shared memory") {
  Both both(4 * kMiB);
  both.agree();
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&both, thread] {
      for (uint64_t i = 0; i < 50; ++i) {
        static_cast<void>(both.a->send(make_frame(thread * 100 + i, 10, (32 << 10) + i * 4096)));
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    REQUIRE(both.at_b.wait_frames(1));
    CHECK(intact(both.at_b.take()));  // released here, so that slots are used again
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("without share_memory_on_loop() descriptors and slots end the stream with protocol") {
  Half<Unix> half;
  REQUIRE(raw_write(half.raw.get(), wire_bytes(attached(wire::kWithDescriptor))));
  REQUIRE(half.record.wait_closed());
  CHECK(half.record.error().kind == base::ErrorKind::kProtocol);
}

TEST_CASE("a frame carries a descriptor, which may be the same memory in both processes") {
  Both both(0);
  auto descriptor = std::make_shared<Fd>();
  const auto memory = SharedMemory::create(100, *descriptor).value();
  OutFrame frame = make_frame(3, 10, 2 * kMiB);
  frame.descriptor = descriptor;
  REQUIRE(both.a->send(std::move(frame)).ok());
  REQUIRE(both.a->send(make_frame(4, 10, 10)).ok());
  REQUIRE(both.at_b.wait_frames(2));
  const InFrame first = both.at_b.take(), second = both.at_b.take();
  CHECK(intact(first));
  CHECK_FALSE(first.is_shared);  // both sides allow no memory for payloads
  CHECK_FALSE(second.descriptor);
  REQUIRE(first.descriptor);
  const auto opened = SharedMemory::open(*first.descriptor, 100).value();
  opened->bytes()[99] = 42;
  CHECK(memory->bytes()[99] == 42);
}

TEST_CASE("a descriptor may come in one read with the frame that proves who the peer is") {
  Half<Unix> half;
  Fd sealed;
  REQUIRE(SharedMemory::create(4096, sealed).ok());
  std::promise<InFrame> second;
  on_loop(half.loop, [&] {
    half.stream->set_handler_on_loop({[&](InFrame frame) {
                                        if (frame.header.call_id == 2) {
                                          return second.set_value(std::move(frame));
                                        }
                                        half.stream->share_memory_on_loop(0);
                                      },
                                      [](const base::Error&) {}});
    // The loop reads both frames after this task.
    REQUIRE(raw_write(half.raw.get(), wire_bytes(make_frame(1, 5, 5))));
    const auto rest =
        joined(wire_bytes(attached(wire::kWithDescriptor)), wire_bytes(make_frame(2, 5, 5)));
    send_with(half.raw.get(), rest, sealed);
  });
  const InFrame frame = second.get_future().get();
  REQUIRE(frame.descriptor);
  CHECK(SharedMemory::open(*frame.descriptor, 4096).ok());
}

TEST_CASE("shared memory that a peer sends must be sealed and as large as it says") {
  Fd sealed;
  REQUIRE(SharedMemory::create(4096, sealed).ok());
  CHECK(SharedMemory::open(sealed, 4096).ok());
  CHECK(::ftruncate(sealed.get(), 10) != 0);
  CHECK(SharedMemory::open(sealed, 4097).error().kind == base::ErrorKind::kProtocol);
  const Fd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(unsealed.get(), 4096) == 0);
  CHECK(SharedMemory::open(unsealed, 4096).error().kind == base::ErrorKind::kProtocol);
  auto [first, second] = Unix::connected();
  CHECK(SharedMemory::open(first, 4096).error().kind == base::ErrorKind::kProtocol);
}

TEST_CASE("wrong descriptors and slots of a peer end the stream with protocol") {
  Fd sealed;
  REQUIRE(SharedMemory::create(kMiB, sealed).ok());
  const Fd unsealed(::memfd_create("test", MFD_CLOEXEC));
  const auto first_of = [](const OutFrame& frame) { return wire_bytes(frame); };
  const auto large = wire_bytes(make_frame(1, 5, kMiB));
  const auto small = wire_bytes(make_frame(1, 5, 5));
  const auto in_slot = [&](uint64_t number, uint64_t offset, uint64_t bytes) {
    OutFrame frame = make_frame(1, 5, bytes);
    std::vector<uint8_t> both =
        joined(first_of(attached(wire::kInSlot, number, offset)), wire_bytes(frame));
    both.resize(2 * wire::kHeaderBytes + 5);  // without the payload
    return both;
  };
  const int attempt = GENERATE(range(0, 13));
  CAPTURE(attempt);
  Half<Unix> half;
  on_loop(half.loop, [&] { half.stream->share_memory_on_loop(kMiB); });
  const int fd = half.raw.get();
  const auto arena =
      joined(first_of(attached(wire::kWithDescriptor)), wire_bytes(arena_frame(kMiB)));
  switch (attempt) {
    case 0:
      send_with(fd, arena, unsealed);
      break;
    case 1:
      raw_write(fd, arena);
      break;  // no descriptor
    case 2:
      send_with(fd, arena, sealed, 2);
      break;
    case 3:
      send_with(fd, small, sealed);
      send_with(fd, small, sealed);
      break;  // not announced
    case 4:
      raw_write(fd, wire_bytes(arena_frame(kMiB)));
      break;
    case 5:
      raw_write(fd, in_slot(0, kArenaHead, kMiB));
      break;  // no memory is agreed on
    case 6:
      raw_write(fd, joined(first_of(attached(4)), large));
      break;
    case 7:
      raw_write(fd, joined(first_of(attached(0)), large));
      break;
    default: {
      // The stream offers its memory after a large payload.
      REQUIRE(raw_write(fd, large));
      REQUIRE(half.record.wait_frames(1));
      REQUIRE(raw_read(fd, 2 * wire::kHeaderBytes).size() == 2 * wire::kHeaderBytes);
      if (attempt == 8) raw_write(fd, in_slot(kArenaSlots, kArenaHead, kMiB));
      if (attempt == 9) raw_write(fd, in_slot(0, 0, kMiB));
      if (attempt == 10) raw_write(fd, in_slot(0, kArenaHead + kArenaPage, kMiB));
      if (attempt == 11) raw_write(fd, in_slot(0, UINT64_MAX - 4095, kMiB));
      if (attempt == 12) {  // overlaps a slot in use
        raw_write(fd, in_slot(0, kArenaHead, 2 * kArenaPage));
        REQUIRE(half.record.wait_frames(2));
        CHECK(half.record.closes() == 0);
        raw_write(fd, in_slot(1, kArenaHead + kArenaPage, kArenaPage));
      }
    }
  }
  REQUIRE(half.record.wait_closed());
  CHECK(half.record.error().kind == base::ErrorKind::kProtocol);
}

TEST_CASE("slots of an arena never overlap, and all of its memory can be used again") {
  Fd descriptor;
  const auto memory = SharedMemory::create(kArenaHead + kMiB, descriptor).value();
  SendArena sender(memory);
  const auto receiver = std::make_shared<ReceiveArena>(memory);
  std::mt19937 random(3);
  std::vector<base::BufferPtr> held;
  for (int i = 0; i < 5000; ++i) {
    const uint64_t bytes = 1 + random() % (200 << 10);
    if (const auto slot = sender.take(bytes)) {
      auto buffer = receiver->take(*slot, bytes);  // refuses overlaps
      REQUIRE(buffer.ok());
      held.push_back(std::move(buffer.unchecked()));
    } else {
      REQUIRE_FALSE(held.empty());
    }
    if (!held.empty() && random() % 2 == 0) {
      std::swap(held[random() % held.size()], held.back());
      held.pop_back();
    }
  }
  held.clear();
  CHECK(sender.take(kMiB));
}

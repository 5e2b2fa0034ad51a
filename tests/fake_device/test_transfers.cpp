// Tests each end of a transfer alone: invalid chunks, failing devices, and when memory is freed.
#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "device/device_transfer.h"
#include "distrain/base/thread_state.h"
#include "support/catch.h"
#include "support/cluster.h"
#include "support/fake_device.h"

namespace distrain::testing {
namespace {

using base::ErrorKind;
using rpc::kChunkBytes;

constexpr wire::DeviceRef kDevice{wire::DeviceType::kPrivate, 0};

at::Tensor numbers_to_send(int64_t n, int device = 0) {
  return at::arange(n, at::TensorOptions(at::kFloat)).to(fake(device));
}

/// Returns a chunk, filled with ones, of a transfer of `bytes` bytes in total.
net::InFrame chunk(uint64_t id, uint64_t begin, uint64_t bytes, uint64_t size = kChunkBytes) {
  static const auto ones = [] {
    auto memory = std::make_shared<std::vector<uint8_t>>(2 * kChunkBytes, uint8_t{1});
    auto* const buffer = new base::Buffer{memory->data(), memory->size()};
    return base::BufferPtr(buffer, [memory](base::Buffer* b) { delete b; });
  }();
  net::InFrame frame;
  frame.header.kind = wire::FrameKind::kChunk;
  frame.header.channel = static_cast<uint16_t>(kDevice.type);
  frame.header.call_id = id;
  frame.header.context_id = begin;
  frame.header.autograd_id = bytes;
  frame.header.payload_bytes = size;
  frame.body = ones;
  frame.payload = {ones->data, size};
  return frame;
}

void add(rpc::DeviceReceive& device_receive, net::InFrame frame) {
  if (base::Task task = device_receive.add_chunk_on_loop(std::move(frame))) task();
}

rpc::OutMessage message_of(std::vector<at::Tensor> tensors) {
  rpc::OutMessage message;
  message.requires_grad.resize(tensors.size());
  message.devices.resize(tensors.size(), kDevice);
  message.tensors = std::move(tensors);
  return message;
}

uint64_t seven() { return 7; }

TEST_CASE("a transfer beyond the limit of open transfers is refused, and the others continue") {
  rpc::DeviceStager stager;
  rpc::DeviceReceive device_receive(stager, 1), others(stager, 2);
  constexpr uint64_t kBytes = kChunkBytes + 100;
  std::vector<base::Task> tasks;  // not run, so the chunks use no device memory
  for (uint64_t id = 0; id <= rpc::kMaxOpenTransfers; ++id) {
    tasks.push_back(device_receive.add_chunk_on_loop(chunk(id, 0, kBytes)));
  }
  add(others, chunk(3, 0, kBytes));
  const std::vector<uint8_t> rest(100, 2);
  const auto refused = device_receive.take(rpc::kMaxOpenTransfers, kDevice, kBytes);
  const base::Error error = error_of([&] { refused->finish(rest); });
  CHECK(error.kind == ErrorKind::kOverloaded);
  CHECK_THAT(error.message, ContainsSubstring("rank 1"));
  for (rpc::DeviceReceive* const from : {&device_receive, &others}) {
    const auto [memory, point] = from->take(3, kDevice, kBytes)->finish(rest);
    point.wait_on_host();
    CHECK(memory.sum().item<int64_t>() == int64_t{kChunkBytes} + 200);
  }
}

TEST_CASE("chunks that do not fit are refused") {
  rpc::DeviceStager stager;
  rpc::DeviceReceive device_receive(stager, 1);
  constexpr uint64_t kBytes = 3 * kChunkBytes;  // two chunks, then the message
  add(device_receive, chunk(1, 0, kBytes));
  net::InFrame frame = chunk(1, kChunkBytes, kBytes);
  SECTION("the same bytes again") { frame = chunk(1, 0, kBytes); }
  SECTION("a gap before the chunk") { frame = chunk(1, 2 * kChunkBytes, kBytes); }
  SECTION("a short chunk") { frame = chunk(1, kChunkBytes, kBytes, 100); }
  SECTION("a long chunk") { frame = chunk(1, kChunkBytes, kBytes, kChunkBytes + 1); }
  SECTION("another size of the transfer") { frame = chunk(1, kChunkBytes, kBytes + 1); }
  SECTION("another device") {
    frame.header.channel = static_cast<uint16_t>(frame.header.channel | 1 << 8);
  }
  SECTION("the CPU") { frame.header.channel = 0; }
  SECTION("an unknown type of device") { frame.header.channel = 99; }
  SECTION("a first chunk that is not at the beginning") { frame = chunk(2, kChunkBytes, kBytes); }
  SECTION("a transfer that is too large") { frame = chunk(2, 0, (uint64_t{64} << 30) + 1); }
  SECTION("a transfer that is small enough for no chunk") { frame = chunk(2, 0, kChunkBytes); }
  CHECK(error_of([&] { add(device_receive, std::move(frame)); }).kind == ErrorKind::kProtocol);
}

TEST_CASE("a transfer is taken once, completely, by the message that it belongs to") {
  rpc::DeviceStager stager;
  rpc::DeviceReceive device_receive(stager, 1);
  constexpr uint64_t kBytes = 3 * kChunkBytes;
  add(device_receive, chunk(1, 0, kBytes));
  const auto refused = [&](uint64_t id, wire::DeviceRef device, uint64_t bytes) {
    return error_of([&] { device_receive.take(id, device, bytes); }).kind == ErrorKind::kProtocol;
  };
  SECTION("before it is complete") {
    CHECK(refused(1, kDevice, kBytes));
    return;
  }
  add(device_receive, chunk(1, kChunkBytes, kBytes));
  SECTION("with another ID") { CHECK(refused(2, kDevice, kBytes)); }
  SECTION("for another device") { CHECK(refused(1, {kDevice.type, 1}, kBytes)); }
  SECTION("with another size") { CHECK(refused(1, kDevice, kBytes - 1)); }
  SECTION("twice") {
    CHECK_NOTHROW(device_receive.take(1, kDevice, kBytes));
    CHECK(refused(1, kDevice, kBytes));
  }
}

TEST_CASE("a transfer that no message takes is freed, and not on the loop") {
  run_all_fake_streams();
  const int64_t before = fake_bytes_in_use(0);
  rpc::DeviceStager stager;
  auto device_receive = std::make_shared<rpc::DeviceReceive>(stager, 1);
  constexpr uint64_t kBytes = 3 * kChunkBytes;
  add(*device_receive, chunk(1, 0, kBytes));
  const int64_t with_one = fake_bytes_in_use(0);
  REQUIRE(with_one > before);
  SECTION("an abandoned transfer") {
    base::Task task = device_receive->add_chunk_on_loop(chunk(1, 0, kBytes, 0));
    REQUIRE(task);  // a worker would run it
    CHECK(fake_bytes_in_use(0) == with_one);
    task();
  }
  SECTION("an incomplete transfer whose chunks stop") { device_receive->drop_incomplete(); }
  SECTION("a complete transfer whose message does not arrive") {
    add(*device_receive, chunk(1, kChunkBytes, kBytes));
    device_receive->drop_incomplete();
    CHECK(fake_bytes_in_use(0) == with_one);  // a received message may still need it
    device_receive = nullptr;
  }
  CHECK(fake_bytes_in_use(0) == before);
}

TEST_CASE("a message that cannot be received frees all its transfers") {
  rpc::DeviceStager stager;
  std::vector<net::OutFrame> sent;
  {
    rpc::OutMessage message = message_of({numbers_to_send(1 << 19), numbers_to_send(1 << 19)});
    message.devices[1].index = 1;
    uint64_t next = 1;
    rpc::DeviceSend device_send(stager, std::move(message), {}, [&] { return next++; });
    REQUIRE(device_send
                .send([&](net::OutFrame frame) {
                  sent.push_back(std::move(frame));
                  return base::Status(base::Unit{});
                })
                .ok());
  }
  REQUIRE(sent.size() == 3);
  run_all_fake_streams();
  const int64_t before[] = {fake_bytes_in_use(0), fake_bytes_in_use(1)};
  rpc::DeviceReceive device_receive(stager, 1);
  net::InFrame message;
  for (const net::OutFrame& frame : sent) {
    const bool is_chunk = frame.header.kind == wire::FrameKind::kChunk;
    auto bytes = std::make_shared<wire::Bytes>();
    for (const auto& piece : frame.payload) bytes->insert(bytes->end(), piece.begin(), piece.end());
    net::InFrame in;
    in.header = frame.header;
    in.header.payload_bytes = bytes->size();
    in.meta = frame.meta;
    in.payload = *bytes;
    in.body = base::BufferPtr(new base::Buffer{bytes->data(), bytes->size()},
                              [bytes](base::Buffer* b) { delete b; });
    if (!is_chunk) {
      message = std::move(in);
    } else if (in.header.channel >> 8 == 0) {
      const FakeDeviceMemoryLimit limit(0);
      add(device_receive, std::move(in));
    } else {
      add(device_receive, std::move(in));
    }
  }
  CHECK_FALSE(fake_bytes_in_use(1) == before[1]);
  SECTION("because a device has no room") {
    const base::Error error =
        error_of([&] { rpc::from_frame(message, 1, stager, &device_receive); });
    CHECK(error.kind == ErrorKind::kResources);
  }
  SECTION("because its payload has another size") {
    message.payload = message.payload.first(message.payload.size() - 1);
    const base::Error error =
        error_of([&] { rpc::from_frame(message, 1, stager, &device_receive); });
    CHECK(error.kind == ErrorKind::kProtocol);
  }
  CHECK(fake_bytes_in_use(0) == before[0]);
  CHECK(fake_bytes_in_use(1) == before[1]);
}

TEST_CASE("memory for received chunks is pinned once it was needed") {
  rpc::DeviceStager stager;
  rpc::DeviceReceive device_receive(stager, 1);
  CHECK_FALSE(stager.idle_host_block(kChunkBytes));
  add(device_receive, chunk(1, 0, 2 * kChunkBytes));
  const base::BufferPtr block = stager.idle_host_block(kChunkBytes);
  REQUIRE(block);
  CHECK_FALSE(stager.idle_host_block(kChunkBytes));  // no more blocks than were needed at a time
}

TEST_CASE("copied frames are freed while their transfer continues") {
  run_all_fake_streams();
  rpc::DeviceStager stager;
  rpc::DeviceReceive device_receive(stager, 1);
  constexpr uint64_t kChunks = 100;
  std::vector<std::weak_ptr<base::Buffer>> bodies;
  for (uint64_t i = 0; i < kChunks; ++i) {
    net::InFrame frame = chunk(1, i * kChunkBytes, (kChunks + 1) * kChunkBytes);
    frame.body =
        base::BufferPtr(new base::Buffer(*frame.body), [keep = frame.body](auto* b) { delete b; });
    bodies.push_back(frame.body);
    add(device_receive, std::move(frame));
    run_all_fake_streams();
  }
  CHECK(std::count_if(bodies.begin(), bodies.end(), [](auto& b) { return !b.expired(); }) < 40);
}

TEST_CASE("a message has only few blocks in the network at a time") {
  rpc::DeviceStager stager;
  constexpr size_t kChunks = 40;
  rpc::DeviceSend device_send(stager, message_of({numbers_to_send((kChunks + 1) << 18)}), {},
                              seven);
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<net::OutFrame> network;
  size_t most = 0, chunks = 0;
  bool over = false;
  bool sent = false;
  std::thread sender([&] {
    sent = device_send
               .send([&](net::OutFrame frame) {
                 std::lock_guard lock(mutex);
                 if (frame.header.kind != wire::FrameKind::kChunk)
                   return base::Status(base::Unit{});
                 network.push_back(std::move(frame));
                 ++chunks;
                 most = std::max(most, network.size());
                 changed.notify_all();
                 return base::Status(base::Unit{});
               })
               .ok();
    std::lock_guard lock(mutex);
    over = true;
    changed.notify_all();
  });
  const bool ends = GENERATE(false, true);
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return network.size() == rpc::kMaxSending || over; });
  }
  // If the sender did not wait for the network, it would send more chunks during this sleep.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  {
    std::unique_lock lock(mutex);
    CHECK(network.size() == rpc::kMaxSending);
  }
  if (ends) {
    stager.stop_waiting();
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return over; });
    CHECK(chunks == kChunks);
  }
  for (;;) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !network.empty() || over; });
    if (network.empty()) break;
    const net::OutFrame taken = std::move(network.front());
    network.pop_front();
    lock.unlock();
  }
  sender.join();
  CHECK(sent);
  CHECK(chunks == kChunks);
  if (!ends) CHECK(most == rpc::kMaxSending);
}

TEST_CASE("a message that the network refuses cancels its transfers") {
  rpc::DeviceStager stager;
  rpc::DeviceSend device_send(stager, message_of({numbers_to_send(1 << 19)}), {}, seven);
  std::vector<wire::FrameHeader> sent;
  const base::Status status = device_send.send([&](net::OutFrame frame) -> base::Status {
    frame.header.payload_bytes = frame.payload.size();
    sent.push_back(frame.header);
    if (frame.header.kind == wire::FrameKind::kChunk) return base::Unit{};
    return base::Error{ErrorKind::kInvalid, "beyond the limits", -1, {}};
  });
  CHECK(status.error().kind == ErrorKind::kInvalid);
  REQUIRE(sent.size() == 3);
  CHECK(sent[1].kind == wire::FrameKind::kCall);
  CHECK(sent[2].kind == wire::FrameKind::kChunk);
  CHECK(sent[2].call_id == 7);
  CHECK(sent[2].payload_bytes == 0);
}

TEST_CASE("a message that is abandoned after its chunks were sent is not sent") {
  rpc::DeviceStager stager;
  rpc::OutMessage message = message_of({numbers_to_send(1 << 19)});
  message.body = {1, 2, 3};
  rpc::DeviceSend device_send(stager, std::move(message), {}, seven);
  std::vector<net::OutFrame> sent;
  const auto send = [&](net::OutFrame frame) -> base::Status {
    sent.push_back(std::move(frame));
    return base::Unit{};
  };
  const bool is_wanted = GENERATE(true, false);
  const base::Status status = device_send.send(send, [&](wire::Bytes& body) {
    CHECK(sent.size() == 1);
    body[0] = 9;
    return is_wanted;
  });
  CHECK(status.ok() == is_wanted);
  REQUIRE(sent.size() == 2);
  CHECK(sent[0].header.kind == wire::FrameKind::kChunk);
  if (is_wanted) {
    CHECK(sent[1].header.kind == wire::FrameKind::kCall);
    CHECK(sent[1].meta[sent[1].meta.size() - 3] == 9);
  } else {  // cancels the transfer
    CHECK(sent[1].header.kind == wire::FrameKind::kChunk);
    CHECK(sent[1].payload.empty());
  }
}

TEST_CASE("a transfer that no receiver would accept is not begun") {
  rpc::DeviceStager stager;
  SECTION("too many bytes") {
    const at::Tensor huge =
        at::zeros({1}, at::TensorOptions(at::kByte).device(fake(0))).expand({(1LL << 36) + 1});
    CHECK(error_of([&] { rpc::DeviceSend(stager, message_of({huge}), {}, seven); }).kind ==
          ErrorKind::kInvalid);
  }
  SECTION("tensors on two devices for one device") {
    CHECK(error_of([&] {
            rpc::DeviceSend(stager, message_of({numbers_to_send(3, 0), numbers_to_send(3, 2)}), {},
                            seven);
          }).kind == ErrorKind::kInternal);
  }
}

TEST_CASE("a failed device is an error and does not end the process") {
  auto stager = std::make_unique<rpc::DeviceStager>();
  auto device_send = std::make_unique<rpc::DeviceSend>(
      *stager, message_of({numbers_to_send(1 << 19)}), wire::FrameHeader{}, seven);
  stager->release_at(rpc::StreamPoint::mark(fake(0)), chunk(1, 0, 1).body);
  run_all_fake_streams();  // because failed devices do no more work
  {
    const FakeDeviceFailure failure;
    CHECK_THROWS_AS(device_send->send([](net::OutFrame) { return base::Status(base::Unit{}); }),
                    c10::Error);
    device_send = nullptr;
    stager = nullptr;
  }
  rpc::DeviceStager fresh;
  const FakeDeviceFailure failure;
  CHECK(error_of([&] { static_cast<void>(fresh.host_block(fake(0), 10)); }).kind ==
        ErrorKind::kResources);
}

TEST_CASE("the destructor of a DeviceSend may block although no pool thread is left to wait") {
  struct Full final : base::BlockObserver {
    void on_block() override { throw base::Exception(ErrorKind::kOverloaded, "all wait"); }
    void on_unblock() override {}
  } full;
  rpc::DeviceStager stager;
  rpc::DeviceSend device_send(stager, message_of({numbers_to_send(1 << 20)}), {}, seven);
  base::thread_state().observer = &full;
  const base::Error error = error_of([&] {
    static_cast<void>(device_send.send([](net::OutFrame) { return base::Status(base::Unit{}); }));
  });
  {
    rpc::DeviceStager ends;
    ends.release_at(rpc::StreamPoint::mark(numbers_to_send(5).device()), chunk(1, 0, 1).body);
    const rpc::DeviceSend also(ends, message_of({numbers_to_send(5)}), {}, seven);
  }
  base::thread_state().observer = nullptr;
  CHECK(error.kind == ErrorKind::kOverloaded);
}

TEST_CASE("a stager uses two streams of each device, created once") {
  rpc::DeviceStager stager;
  const c10::StreamId out = stager.out_stream(fake(3)).id();
  for (int i = 0; i < 5; ++i) {
    CHECK(stager.out_stream(fake(3)).id() == out);
    CHECK(stager.in_stream(fake(3)).id() != out);
  }
  const auto after = [](c10::StreamId id) { return id % 32 + 1; };  // torch's pool, in turn
  const c10::StreamId in = stager.in_stream(fake(3)).id();
  CHECK(rpc::side_stream(fake(3)).id() ==
        after(std::max(in, out) - std::min(in, out) == 1 ? std::max(in, out) : std::min(in, out)));
}

TEST_CASE("stream points create no context on a device that this thread does not use") {
  std::thread([] {  // the thread's device is the first one
    const c10::Stream first = rpc::side_stream(fake(2)), second = rpc::side_stream(fake(2));
    reset_fake_contexts();
    {
      const rpc::StreamPoint point = rpc::StreamPoint::mark(first);
      point.make_wait(second);
      static_cast<void>(point.reached());
      point.wait_in_destructor();
      point.wait_on_host();
      static_cast<void>(rpc::pinned_bytes(fake(2), 100));
    }
    for (int device = 0; device < kFakeDevices; ++device) {
      CHECK(fake_contexts(device).empty() == (device != 2));
    }
  })
      .join();
}

}  // namespace
}  // namespace distrain::testing

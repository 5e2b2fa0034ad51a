// Tests that memory is freed only after the device has finished using it, even after a failure and
// if the object that lent a buffer is destroyed.
#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "../../src/ddp/buckets.h"
#include "device/device_transfer.h"
#include "support/catch.h"
#include "support/fake_device.h"

namespace distrain::testing {
namespace {

constexpr wire::DeviceRef kFirstDevice{wire::DeviceType::kPrivate, 0};

at::Tensor numbers_on_device(int64_t n) {
  return at::arange(n, at::TensorOptions(at::kFloat)).to(fake(0));
}

TEST_CASE("a message that is not sent leaves no copy behind") {
  run_all_fake_streams();
  rpc::DeviceStager stager;
  rpc::OutMessage message;
  message.tensors = {numbers_on_device(int64_t{1} << 20)};  // four chunks
  message.requires_grad = {false};
  message.devices = {kFirstDevice};
  {
    const rpc::DeviceSend device_send(stager, std::move(message), {}, [] { return uint64_t{1}; });
  }
  std::vector<base::BufferPtr> blocks;  // the memory of the message's copies is among these blocks
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(stager.host_block(fake(0), rpc::kChunkBytes));
    std::memset(blocks.back()->data, 5, rpc::kChunkBytes);
  }
  run_all_fake_streams();
  for (const base::BufferPtr& block : blocks) {
    CHECK(std::all_of(block->data, block->data + rpc::kChunkBytes,
                      [](uint8_t byte) { return byte == 5; }));
  }
}

TEST_CASE("the destructor of a stager waits until its copies are complete") {
  rpc::StreamPoint arrived;
  at::Tensor memory;
  {
    rpc::DeviceStager stager;
    const std::vector<uint8_t> bytes(1000, 3);
    std::tie(memory, arrived) =
        rpc::IncomingTransfer(stager, kFirstDevice, bytes.size()).finish(bytes);
  }
  CHECK(arrived.reached());
  CHECK(memory.eq(3).all().item<bool>());
}

TEST_CASE("any stream may write to a bucket only after its contents have been copied out") {
  const at::TensorOptions options = at::TensorOptions().device(fake(0));
  const at::Tensor parameter = at::zeros({100}, options), taken = at::zeros({100}, options);
  ddp::Bucket bucket({0}, {parameter});
  bucket.begin();
  bucket.store(0, at::full({100}, 1.0, options));
  run_all_fake_streams();
  bucket.load(0, taken);
  bucket.end();
  bucket.begin();
  const c10::Stream stream = rpc::side_stream(fake(0));
  {
    const c10::StreamGuard guard(stream);
    bucket.store(0, at::full({100}, 2.0, options));
  }
  rpc::StreamPoint::mark(stream).wait_on_host();
  CHECK(taken.eq(1).all().item<bool>());
}

}  // namespace
}  // namespace distrain::testing

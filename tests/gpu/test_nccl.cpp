// ctest: timeout=120
#include <memory>
#include <thread>

#include <ATen/ATen.h>

#include "distrain/base/error.h"
#include "distrain/cuda/load.h"
#include "distrain/rpc/device.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using base::ErrorKind;
using testing::error_of;

namespace {

const c10::Device kGpu(c10::kCUDA, 0);

/// Creates a communicator and returns it when all ranks have joined.
std::unique_ptr<cuda::NcclCommunicator> join(const cuda::NcclId& id, int size, int rank) {
  auto communicator = cuda::load().make_communicator(id, size, rank, 0);
  while (!communicator->joined()) std::this_thread::yield();
  return communicator;
}

}  // namespace

TEST_CASE("the GPU has a name, an ID and an index below the count") {
  const cuda::Plugin& plugin = cuda::load();
  const int count = plugin.device_count();
  REQUIRE(count >= 1);
  CHECK_FALSE(plugin.device_name(0).empty());
  CHECK(plugin.device_id(0).size() == 36);
  CHECK(plugin.device_id(0) == plugin.device_id(0));
  CHECK(error_of([&] { plugin.device_name(count); }).kind == ErrorKind::kResources);
  CHECK(error_of([&] { plugin.device_name(-1); }).kind == ErrorKind::kResources);
}

TEST_CASE("a communicator of one rank reduces and broadcasts on the given stream", "[memcheck]") {
  const cuda::Plugin& plugin = cuda::load();
  const auto communicator = join(plugin.new_nccl_id(), 1, 0);
  const c10::Stream stream = rpc::side_stream(kGpu);
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const at::Tensor tensor = at::arange(1000, at::device(kGpu).dtype(type));
    const at::Tensor expected = tensor.clone();
    rpc::StreamPoint::mark(kGpu).make_wait(stream);
    communicator->allreduce_mean(tensor, stream);
    communicator->broadcast(tensor, 0, stream);
    rpc::StreamPoint::mark(stream).make_current_wait(kGpu);
    CHECK(at::equal(tensor, expected));
  }
  CHECK_FALSE(communicator->failure());
  const at::Tensor whole = at::ones({4}, at::device(kGpu).dtype(at::kLong));
  CHECK(error_of([&] { communicator->allreduce_mean(whole, stream); }).kind == ErrorKind::kInvalid);
  CHECK_NOTHROW(communicator->broadcast(whole, 0, stream));  // broadcasts any dtype
  CHECK(error_of([&] { communicator->broadcast(whole, 1, stream); }).kind == ErrorKind::kInvalid);
  const at::Tensor on_host = at::ones({4});
  CHECK(error_of([&] { communicator->allreduce_mean(on_host, stream); }).kind ==
        ErrorKind::kInvalid);
  const at::Tensor gaps = at::ones({4, 4}, at::device(kGpu)).t().slice(0, 0, 2);
  CHECK(error_of([&] { communicator->allreduce_mean(gaps, stream); }).kind == ErrorKind::kInvalid);
}

TEST_CASE("an aborted communicator reports it and cannot be used") {
  const cuda::Plugin& plugin = cuda::load();
  const auto communicator = join(plugin.new_nccl_id(), 1, 0);
  const at::Tensor tensor = at::ones({4}, at::device(kGpu));
  communicator->allreduce_mean(tensor, rpc::current_stream(kGpu));
  communicator->abort();
  communicator->abort();
  CHECK(communicator->failure().has_value());
  CHECK(error_of([&] { communicator->allreduce_mean(tensor, rpc::current_stream(kGpu)); }).kind ==
        ErrorKind::kResources);
}

TEST_CASE("NCCL refuses two ranks on one GPU with an error message") {
  const cuda::Plugin& plugin = cuda::load();
  const cuda::NcclId id = plugin.new_nccl_id();
  base::Error errors[2];
  std::thread other([&] { errors[1] = error_of([&] { join(id, 2, 1); }); });
  errors[0] = error_of([&] { join(id, 2, 0); });
  other.join();
  for (const base::Error& error : errors) {
    CHECK(error.kind == ErrorKind::kResources);
    CHECK(error.message.find("NCCL") != std::string::npos);
  }
}

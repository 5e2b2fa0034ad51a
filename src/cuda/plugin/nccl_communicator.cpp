#include "nccl_communicator.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <nccl.h>

#include "check.h"
#include "distrain/base/clock.h"

namespace distrain::cuda {
namespace {

using std::chrono::microseconds;
using std::chrono::seconds;

static_assert(sizeof(ncclUniqueId) == sizeof(NcclId));

/// How long the destructor lets the last work run, here and on the other ranks.
constexpr seconds kDrainTimeout{10};

/// Returns NCCL's name for an element type. Throws `invalid` if a mean of that type makes no sense.
ncclDataType_t to_nccl(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    default:
      base::invalid(std::string("NCCL can't take the mean of tensors of type ") +
                    c10::toString(type) + ": float, double, half or bfloat16");
  }
}

// The NCCL communicator is non-blocking, so no call of NCCL waits for another rank. A thread that
// waits polls ncclCommGetAsyncError() and releases the lock between polls, so that abort() can take
// it. With a blocking communicator, the first collective would hang inside NCCL if a rank is lost.
class Communicator final : public NcclCommunicator {
 public:
  Communicator(const NcclId& id, int size, int rank, int device_index)
      : size_(size), device_(c10::kCUDA, static_cast<c10::DeviceIndex>(device_index)) {
    const c10::DeviceGuard guard(device_);
    ncclUniqueId nccl_id;
    std::memcpy(&nccl_id, id.data(), id.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    check_cuda(cudaEventCreateWithFlags(&last_work_, cudaEventDisableTiming),
               "making an event for NCCL");
    // joined() reports an error; the destructor aborts a partial communicator.
    made_ = ncclCommInitRankConfig(&comm_, size, nccl_id, rank, &config);
  }

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  ~Communicator() override {
    c10::OptionalDeviceGuard guard;
    enter(guard);
    try {
      finish();
    } catch (...) {  // abort() ends it
    }
    abort();
    cudaEventDestroy(last_work_);
    cudaGetLastError();
  }

  bool joined() override {
    const std::lock_guard lock(mutex_);
    if (!comm_ && made_ == ncclInProgress) fail("NCCL: " + making() + ": it was aborted");
    if (made_ == ncclInProgress) made_ = state();
    if (made_ != ncclSuccess && made_ != ncclInProgress) {
      fail("NCCL: " + making() + ": " + text_of(made_));
    }
    return made_ == ncclSuccess;
  }

  void allreduce_mean(const at::Tensor& tensor, const c10::Stream& stream) override {
    check_tensor(tensor);
    const ncclDataType_t type = to_nccl(tensor.scalar_type());
    call("allreduce", stream, [&](cudaStream_t cuda_stream) {
      return ncclAllReduce(tensor.const_data_ptr(), tensor.mutable_data_ptr(),
                           static_cast<size_t>(tensor.numel()), type, ncclAvg, comm_, cuda_stream);
    });
  }

  void broadcast(const at::Tensor& tensor, int root, const c10::Stream& stream) override {
    check_tensor(tensor);
    if (root < 0 || root >= size_) {
      base::invalid("broadcast: the group has no rank " + std::to_string(root));
    }
    call("broadcast", stream, [&](cudaStream_t cuda_stream) {
      return ncclBroadcast(tensor.const_data_ptr(), tensor.mutable_data_ptr(), tensor.nbytes(),
                           ncclUint8, root, comm_, cuda_stream);
    });
  }

  std::optional<std::string> failure() override {
    const std::lock_guard lock(mutex_);
    if (!comm_) return "the communicator was aborted";
    const ncclResult_t result = state();
    if (result == ncclSuccess || result == ncclInProgress) return std::nullopt;
    return text_of(result);
  }

  void abort() noexcept override {
    ncclComm_t comm = nullptr;
    {
      const std::lock_guard lock(mutex_);
      std::swap(comm, comm_);
    }
    c10::OptionalDeviceGuard guard;
    enter(guard);
    // ncclCommAbort() may hang, so call it without the lock, which all other functions take.
    if (comm) ncclCommAbort(comm);
  }

 private:
  /// Makes the device current. Ignores errors, because a failed device must not block the cleanup.
  void enter(c10::OptionalDeviceGuard& guard) const noexcept {
    try {
      guard.reset_device(device_);
    } catch (...) {
    }
  }

  std::string making() const {
    return "making a communicator of " + std::to_string(size_) + " ranks";
  }

  void check_tensor(const at::Tensor& tensor) const {
    if (tensor.device() == device_ && tensor.is_contiguous()) return;
    base::invalid("this communicator takes contiguous tensors on " + device_.str() +
                  ", not one on " + tensor.device().str());
  }

  /// Returns the result of the last call of NCCL; ncclInProgress while that call runs.
  ncclResult_t state() const {
    ncclResult_t result = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
    return asked == ncclSuccess ? result : asked;
  }

  std::string text_of(ncclResult_t result) const {
    std::string text = ncclGetErrorString(result);
    const char* const last = comm_ ? ncclGetLastError(comm_) : nullptr;
    if (last && *last) text += std::string(" (") + last + ")";
    return text;
  }

  /// Calls `start`, which enqueues work on the stream that it gets, and waits until that is done.
  template <typename Start>
  void call(const char* what, const c10::Stream& stream, Start start) {
    const c10::DeviceGuard guard(device_);
    auto* const cuda_stream = static_cast<cudaStream_t>(stream.native_handle());
    std::unique_lock lock(mutex_);
    if (!comm_) fail(std::string("NCCL: ") + what + " on a communicator that was aborted");
    finish_call(start(cuda_stream), what, base::kNever, lock);
    check_cuda(cudaEventRecord(last_work_, cuda_stream), "marking NCCL's work");
    has_work_ = true;
  }

  /// Waits until NCCL has finished a call that returned `result`; a collective has then enqueued
  /// its work. Throws if the call fails, exceeds `deadline` or is aborted.
  void finish_call(ncclResult_t result, const std::string& what, base::TimePoint deadline,
                   std::unique_lock<std::mutex>& lock) {
    for (microseconds pause{5}; result == ncclInProgress;) {
      result = state();
      if (result != ncclInProgress) break;
      if (base::Clock::now() > deadline) fail("NCCL: " + what + ": it takes too long");
      lock.unlock();
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, microseconds(1000));
      lock.lock();
      if (!comm_) fail("NCCL: " + what + ": the communicator was aborted");
    }
    if (result != ncclSuccess) fail("NCCL: " + what + ": " + text_of(result));
  }

  /// Ends the communicator gracefully, because work of this rank may still be in flight to other
  /// ranks. Throws, or returns early, if that is not possible.
  void finish() {
    {
      const std::lock_guard lock(mutex_);
      if (!comm_ || made_ != ncclSuccess) return;
    }
    const c10::DeviceGuard guard(device_);
    const base::TimePoint deadline = base::deadline_after(kDrainTimeout);
    while (has_work_) {
      const cudaError_t state = cudaEventQuery(last_work_);
      if (state == cudaSuccess) break;
      if (state != cudaErrorNotReady || failure() || base::Clock::now() > deadline) return;
      std::this_thread::sleep_for(microseconds(100));
    }
    if (failure()) return;
    std::unique_lock lock(mutex_);
    if (!comm_) return;
    finish_call(ncclCommFinalize(comm_), "ending a communicator", deadline, lock);
    ncclComm_t const comm = std::exchange(comm_, nullptr);
    lock.unlock();
    ncclCommDestroy(comm);
  }

  const int size_;
  const c10::Device device_;
  cudaEvent_t last_work_ = nullptr;
  bool has_work_ = false;

  std::mutex mutex_;
  ncclComm_t comm_ = nullptr;  ///< null once aborted
  ncclResult_t made_ = ncclInProgress;
};

}  // namespace

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "of an unknown version";
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

NcclId new_nccl_id() {
  ncclUniqueId nccl_id;
  if (const ncclResult_t result = ncclGetUniqueId(&nccl_id); result != ncclSuccess) {
    fail(std::string("NCCL can't make an id for a group of ranks: ") + ncclGetErrorString(result));
  }
  NcclId id;
  std::memcpy(id.data(), &nccl_id, id.size());
  return id;
}

std::unique_ptr<NcclCommunicator> make_communicator(const NcclId& id, int size, int rank,
                                                    int device_index) {
  return std::make_unique<Communicator>(id, size, rank, device_index);
}

}  // namespace distrain::cuda

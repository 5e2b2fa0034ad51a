#include "distrain/cuda/plugin.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>

#include <c10/core/DeviceGuard.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"

namespace distrain::cuda {
namespace {

[[noreturn]] void fail(std::string message) {
  throw base::Exception(base::ErrorKind::kResources, std::move(message));
}

/// Throws if `result` is an error. `what` names the operation, such as "reading the GPU's name".
void check_cuda(cudaError_t result, const std::string& what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // clears the error, or torch would report it for its own kernel
  fail("CUDA failed " + what + ": " + cudaGetErrorString(result) + " (" + cudaGetErrorName(result) +
       ")");
}

using std::chrono::microseconds;
using std::chrono::seconds;

static_assert(sizeof(ncclUniqueId) == sizeof(NcclId));

/// Time limit for enqueued work of a communicator that is being destroyed, here and on other ranks.
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
    // Ignore an error: joined() reports it, and the destructor aborts a partial communicator.
    made_ = ncclCommInitRankConfig(&comm_, size, nccl_id, rank, &config);
  }

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  ~Communicator() override {
    c10::OptionalDeviceGuard guard;
    enter(guard);
    try {
      finish();
    } catch (...) {  // abort() ends the communicator
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

  /// Calls `start`, which enqueues work on its stream, and waits until NCCL has enqueued the work.
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
  /// ranks. Returns early if the work fails or does not end in time. Throws if NCCL fails.
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

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "of an unknown version";
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

/// Formats a version of CUDA: 13000 is 13.0.
std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// Returns the newest CUDA version that this machine's driver supports; 0 without a driver.
int driver_version() {
  int version = 0;
  cudaDriverGetVersion(&version);
  return version;
}

/// Returns the oldest driver for CUDA's major version `cuda` (NVIDIA's compatibility table).
std::string driver_for(int cuda) {
  return cuda == 12 ? "525" : cuda == 13 ? "580" : "for CUDA " + std::to_string(cuda);
}

int runtime_version() {
  int version = 0;
  cudaRuntimeGetVersion(&version);
  return version;
}

class CudaPlugin final : public Plugin {
 public:
  int device_count() const override {
    int count = 0;
    const cudaError_t result = cudaGetDeviceCount(&count);
    if (result == cudaSuccess && count > 0) return count;
    cudaGetLastError();  // clears the error, which is reported here
    const int driver = driver_version();
    if (driver == 0 || result == cudaErrorStubLibrary) {
      fail("there is no NVIDIA driver on this machine, so no GPU can be used");
    }
    if (result == cudaErrorInsufficientDriver) {
      fail("this machine's NVIDIA driver is too old: it runs programs up to CUDA " +
           version_text(driver) + ", LibTorch's CUDA " + version_text(runtime_version()) +
           " needs driver " + driver_for(runtime_version() / 1000) + " or newer");
    }
    if (result == cudaSuccess || result == cudaErrorNoDevice) {
      fail("no GPU: the NVIDIA driver shows this process none (is CUDA_VISIBLE_DEVICES empty?)");
    }
    check_cuda(result, "looking for GPUs");
    return 0;
  }

  std::string device_name(int index) const override { return properties(index).name; }

  std::string device_id(int index) const override {
    static constexpr char kDigits[] = "0123456789abcdef";
    const cudaUUID_t uuid = properties(index).uuid;
    std::string id = "GPU-";
    for (const char byte : uuid.bytes) {
      id += kDigits[static_cast<unsigned char>(byte) >> 4];
      id += kDigits[static_cast<unsigned char>(byte) & 15];
    }
    return id;
  }

  std::string versions() const override {
    const int driver = driver_version();
    return "CUDA " + version_text(runtime_version()) + ", " +
           (driver ? "driver for CUDA " + version_text(driver) : std::string("no driver")) +
           ", NCCL " + nccl_version();
  }

  NcclId new_nccl_id() const override {
    ncclUniqueId nccl_id;
    if (const ncclResult_t result = ncclGetUniqueId(&nccl_id); result != ncclSuccess) {
      fail(std::string("NCCL can't make an id for a group of ranks: ") +
           ncclGetErrorString(result));
    }
    NcclId id;
    std::memcpy(id.data(), &nccl_id, id.size());
    return id;
  }

  std::unique_ptr<NcclCommunicator> make_communicator(const NcclId& id, int size, int rank,
                                                      int device_index) const override {
    check_index(device_index);
    return std::make_unique<Communicator>(id, size, rank, device_index);
  }

 private:
  void check_index(int index) const {
    const int count = device_count();
    if (index >= 0 && index < count) return;
    fail("there is no GPU " + std::to_string(index) + ": this process sees " +
         std::to_string(count));
  }

  cudaDeviceProp properties(int index) const {
    check_index(index);
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, index),
               "describing GPU " + std::to_string(index));
    return properties;
  }
};

/// Throws if CUDA's major version is not the one for which this library was compiled.
void check_libraries() {
  if (runtime_version() / 1000 != CUDART_VERSION / 1000) {
    fail("libdistrain_cuda.so was built for CUDA " + version_text(CUDART_VERSION) +
         ", LibTorch brings CUDA " + version_text(runtime_version()) +
         ": build distrain again with LibTorch's Toolkit");
  }
}

}  // namespace
}  // namespace distrain::cuda

extern "C" __attribute__((visibility("default"))) const distrain::cuda::Plugin*
distrain_cuda_plugin(int interface) {
  if (interface != distrain::cuda::kPluginInterface) return nullptr;
  distrain::cuda::check_libraries();
  static const distrain::cuda::CudaPlugin plugin;
  return &plugin;
}

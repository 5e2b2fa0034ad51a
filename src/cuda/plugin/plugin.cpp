#include "distrain/cuda/plugin.h"

#include "check.h"
#include "nccl_communicator.h"

namespace distrain::cuda {
namespace {

/// Formats a version of CUDA: 13000 is 13.0.
std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// Returns the newest CUDA that this machine's driver supports; 0 without a driver.
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

  NcclId new_nccl_id() const override { return cuda::new_nccl_id(); }

  std::unique_ptr<NcclCommunicator> make_communicator(const NcclId& id, int size, int rank,
                                                      int device_index) const override {
    check_index(device_index);
    return cuda::make_communicator(id, size, rank, device_index);
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

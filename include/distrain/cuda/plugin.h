#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace distrain::cuda {

/// One rank of a group makes it and tells the others; with it all make their communicator.
using NcclId = std::array<char, 128>;

/// One rank's part of a group of GPUs, over NCCL. Every function but abort() is called by one
/// thread at a time; work is only put into `stream`.
class NcclCommunicator {
 public:
  /// Lets work under way end, for some seconds. May block for as long as NCCL does.
  virtual ~NcclCommunicator() = default;

  /// Whether all ranks have come; to be asked until they have, and before anything else. Does not
  /// wait. Throws `resources` when making the communicator has failed.
  virtual bool joined() = 0;

  /// The mean over the group, in place; `tensor` is dense and contiguous.
  virtual void allreduce_mean(const at::Tensor& tensor, const c10::Stream& stream) = 0;
  /// `root` is a rank within the group.
  virtual void broadcast(const at::Tensor& tensor, int root, const c10::Stream& stream) = 0;
  /// What has gone wrong beside the calls, if anything.
  virtual std::optional<std::string> failure() = 0;
  /// Ends all work of this communicator that is under way, also where other ranks never come; it is
  /// of no use afterwards. Any thread. May block as NCCL does; other functions do not wait for it.
  virtual void abort() noexcept = 0;
};

/// What libdistrain_cuda.so offers: the little of CUDA that c10's interfaces do not reach. Each
/// function throws base::Exception (`resources`) with a sentence for the user.
class Plugin {
 public:
  virtual ~Plugin() = default;

  /// GPUs of this process (after CUDA_VISIBLE_DEVICES). Throws without a GPU or a fit driver.
  virtual int device_count() const = 0;
  virtual std::string device_name(int index) const = 0;
  /// Tells GPUs of one host apart, also in processes that number them otherwise.
  virtual std::string device_id(int index) const = 0;
  /// Versions of CUDA and NCCL, for people.
  virtual std::string versions() const = 0;

  virtual NcclId new_nccl_id() const = 0;
  /// All `size` ranks call it with the same `id`; it does not wait: see NcclCommunicator::joined().
  virtual std::unique_ptr<NcclCommunicator> make_communicator(const NcclId& id, int size, int rank,
                                                              int device_index) const = 0;
};

/// The one function that libdistrain_cuda.so exports, by the name kPluginEntry: the plugin, or null
/// if it was built for another kPluginInterface.
using PluginEntry = const Plugin* (*)(int interface);
inline constexpr char kPluginEntry[] = "distrain_cuda_plugin";
/// To be raised with every change of the classes above.
inline constexpr int kPluginInterface = 2;

}  // namespace distrain::cuda

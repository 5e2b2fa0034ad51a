#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace distrain::cuda {

/// Identifies a communicator. One rank creates the id and sends it to the other ranks of the group.
using NcclId = std::array<char, 128>;

/// One rank's NCCL communicator. Only one thread at a time calls its functions, except abort().
/// Operations only enqueue work on `stream`.
class NcclCommunicator {
 public:
  /// Waits some seconds for enqueued work to end. May block longer inside NCCL.
  virtual ~NcclCommunicator() = default;

  /// Returns true if all ranks have joined. Poll it until it returns true, before any operation.
  /// Does not block. Throws `resources` if creating the communicator has failed.
  virtual bool joined() = 0;

  /// Replaces `tensor`, which is dense and contiguous, by its mean over the group.
  virtual void allreduce_mean(const at::Tensor& tensor, const c10::Stream& stream) = 0;
  /// Copies `tensor` of group rank `root` into `tensor` of the other ranks.
  virtual void broadcast(const at::Tensor& tensor, int root, const c10::Stream& stream) = 0;
  /// Returns NCCL's asynchronous error, if any.
  virtual std::optional<std::string> failure() = 0;
  /// Cancels all work, even if other ranks never join, and makes the communicator unusable. Any
  /// thread may call abort(). It may block inside NCCL, but other functions do not wait for it.
  virtual void abort() noexcept = 0;
};

/// The functions of libdistrain_cuda.so: the CUDA features that c10's interfaces lack. Each
/// function throws base::Exception (`resources`) with a message for the user.
class Plugin {
 public:
  virtual ~Plugin() = default;

  /// Returns the number of GPUs that this process sees. Throws if it sees none or has no driver.
  virtual int device_count() const = 0;
  virtual std::string device_name(int index) const = 0;
  /// Returns an id of the GPU that is the same in all processes, however they number the GPUs.
  virtual std::string device_id(int index) const = 0;
  /// Returns the versions of CUDA and NCCL as a text for users.
  virtual std::string versions() const = 0;

  virtual NcclId new_nccl_id() const = 0;
  /// Creates this rank's communicator without blocking; see joined(). All ranks pass the same `id`.
  virtual std::unique_ptr<NcclCommunicator> make_communicator(const NcclId& id, int size, int rank,
                                                              int device_index) const = 0;
};

/// The only function that libdistrain_cuda.so exports, named kPluginEntry. Returns the plugin, or
/// null if the library was built for another kPluginInterface.
using PluginEntry = const Plugin* (*)(int interface);
inline constexpr char kPluginEntry[] = "distrain_cuda_plugin";
/// Increment this when the classes above change.
inline constexpr int kPluginInterface = 2;

}  // namespace distrain::cuda

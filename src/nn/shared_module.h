#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/autograd/parameter_versions.h"
#include "distrain/nn/module.h"
#include "distrain/nn/remote_module.h"
#include "distrain/rpc/agent.h"

namespace distrain::nn {

/// A parameter or buffer of a module. If a tensor has several names, `name` is the first.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// One exposed module and its replicas; see Note [Plain modules]. Thread-safe.
class SharedModule final : public autograd::VersionKeeper {
 public:
  /// Throws `invalid`, with the reason, if the module cannot be shared.
  SharedModule(rpc::Agent& agent, std::string name, std::function<detail::AnyNet()> make);
  ~SharedModule() override;

  // Exposed functions, called by RemoteModule.
  at::Tensor forward(rpc::CallContext& call, ForwardOptions options,
                     std::vector<at::Tensor> inputs);
  NamedParameters named_parameters(rpc::CallContext& call) {
    NamedParameters named;
    for (const auto& [its_name, parameter] : parameters_) {
      if (parameter.requires_grad()) named.emplace_back(its_name, call.agent.make_rref(parameter));
    }
    return named;
  }
  rpc::NamedTensors state() { return state_of("", Keep::kCopies); }
  rpc::RRef<rpc::NamedTensors> snapshot(rpc::CallContext& call, const std::string& prefix) {
    return call.agent.make_rref(state_of(prefix, has_rows_ ? Keep::kCopies : Keep::kVersions));
  }
  void load_state(rpc::NamedTensors state);

  void release_versions() override;

 private:
  struct Replica;
  class BorrowedReplica;

  // Whether state_of() copies parameters or shares their memory, which row-wise updates overwrite.
  enum class Keep { kCopies, kVersions };

  rpc::NamedTensors state_of(const std::string& prefix, Keep keep);
  Replica* take_idle();
  std::unique_ptr<Replica> make_replica();
  std::unique_ptr<Replica> replica_of(detail::AnyNet net);
  void renew(Replica& replica, const autograd::ParameterRead& read);
  void check_unchanged(Replica& replica, bool training) const;
  static bool is_saved(const Replica& replica);

  rpc::Agent& agent_;
  const std::string name_;
  std::function<detail::AnyNet()> make_;
  std::vector<NamedTensor> parameters_;
  bool has_rows_ = false;          // has tables whose rows are updated in place
  std::vector<at::Tensor> empty_;  // empty tensors that idle replicas' parameters point to
  // Changed under a ParameterUpdate, read under a ParameterRead. Buffers need no synchronization of
  // streams, because only exposed functions use them, and these run on the default stream.
  std::vector<NamedTensor> buffers_;
  uint64_t buffers_generation_ = 1;

  std::mutex making_;  // held while a replica is made, so that only one is made at a time
  std::mutex mutex_;   // guards `replicas_` and each replica's `in_forward`
  std::vector<std::unique_ptr<Replica>> replicas_;
};

}  // namespace distrain::nn

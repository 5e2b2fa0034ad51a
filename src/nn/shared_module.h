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

/// What a module consists of. A tensor that it uses twice is there once, by its first name.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// One exposed module and its replicas; see Note [Plain modules]. Thread-safe.
class SharedModule final : public autograd::VersionKeeper {
 public:
  /// Throws `invalid`, naming what it is, for a module that cannot be trained so.
  SharedModule(rpc::Agent& agent, std::string name, std::function<detail::AnyNet()> make);
  ~SharedModule() override;

  // What RemoteModule calls.
  at::Tensor forward(rpc::CallContext& call, ForwardTerms terms, std::vector<at::Tensor> inputs);
  std::vector<rpc::RRef<at::Tensor>> parameter_rrefs(rpc::CallContext& call);
  std::vector<std::string> parameter_names() const;
  NamedTensors state() { return state_of("", Keep::kCopies); }
  rpc::RRef<NamedTensors> held_state(rpc::CallContext& call, const std::string& prefix);
  void load_state(NamedTensors state);

  void let_go() override;

 private:
  struct Replica;
  class Lease;

  // Of the parameters: copies, or versions of those that updates do not write to in place.
  enum class Keep { kCopies, kVersions };

  NamedTensors state_of(const std::string& prefix, Keep keep);
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
  bool has_rows_ = false;            // tables whose rows are updated in place
  std::vector<at::Tensor> nothing_;  // for each parameter, what an idle version of it is
  // Changed under a ParameterUpdate, read under a ParameterRead. Nobody but exposed functions does
  // either, and those run under the default streams of workers: so what they do with buffers, and
  // the buffers' memory, is in order on a device by itself. Parameters others change, too.
  std::vector<NamedTensor> buffers_;
  uint64_t buffers_generation_ = 1;

  std::mutex making_;  // held while a replica is made: one at a time
  std::mutex mutex_;   // of the list and of what says whether a replica is idle
  std::vector<std::unique_ptr<Replica>> replicas_;
};

}  // namespace distrain::nn

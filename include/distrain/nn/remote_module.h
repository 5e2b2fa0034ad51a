#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/rpc/agent.h"

namespace distrain::nn {

namespace detail {

template <class Module>
std::vector<rpc::RRef<at::Tensor>> share_parameters(rpc::CallContext& context,
                                                    const rpc::RRef<Module>& module) {
  std::vector<rpc::RRef<at::Tensor>> shared;
  for (const at::Tensor& parameter : module.local_value().parameters()) {
    shared.push_back(context.agent.make_rref(parameter));
  }
  return shared;
}

}  // namespace detail

/// Makes Module usable as RemoteModule<Module>, under `name`. On every rank, before join().
///
/// Module has a type `Constructor` that names its constructor's parameters (see
/// Agent::expose_class), `forward`, not overloaded, and `parameters()`: a range of tensors.
template <class Module>
void expose_module(rpc::Agent& agent, const std::string& name) {
  agent.expose_class<Module>(name);
  agent.expose<&Module::forward>(name + ".forward");
  agent.expose<&detail::share_parameters<Module>>(name + ".parameters");
}

/// A module on another rank, used like one here. A handle: it can be an argument of a call, and the
/// module lives as long as any rank holds one.
template <class Module>
class RemoteModule {
 public:
  RemoteModule() = default;
  /// Makes the module on `to`; returns at once. What goes wrong there is thrown by its first use.
  template <class... Args>
  RemoteModule(rpc::Agent& agent, const rpc::To& to, Args&&... args)
      : module_(agent.remote_new<Module>(to, std::forward<Args>(args)...)) {}

  /// Module::forward on its rank; in a context its result carries gradients.
  template <class... Args>
  auto forward(Args&&... args) const {
    return module_.template rpc_sync<&Module::forward>(std::forward<Args>(args)...);
  }
  template <class... Args>
  auto forward_async(Args&&... args) const {
    return module_.template rpc_async<&Module::forward>(std::forward<Args>(args)...);
  }

  /// References to the parameters, in the order of Module::parameters(): for a
  /// DistributedOptimizer.
  std::vector<rpc::RRef<at::Tensor>> remote_parameters() const {
    return module_.handle()->agent().template rpc_sync<&detail::share_parameters<Module>>(
        module_.owner(), module_);
  }

  const rpc::RRef<Module>& rref() const { return module_; }
  int owner() const { return module_.owner(); }

 private:
  rpc::RRef<Module> module_;

 public:
  static constexpr auto kFields = std::tuple(&RemoteModule::module_);
};

}  // namespace distrain::nn

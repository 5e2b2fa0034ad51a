#include "distrain/nn/remote_module.h"

#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include "distrain/base/error.h"
#include "distrain/rpc/to_device.h"
#include "modules.h"
#include "shared_module.h"

namespace distrain::nn {

namespace {

uint64_t default_seed(int rank) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard lock(generator.mutex());
  return generator.current_seed() + (static_cast<uint64_t>(rank) << 32);
}

/// Calls F without a deadline, because moving a whole state may take any time.
template <auto F, class... Args>
auto without_deadline(const rpc::RRef<SharedModule>& module, const Args&... args) {
  return module.handle()->agent().rpc_sync<F>(rpc::To(module.owner()).without_deadline(), module,
                                              args...);
}

std::vector<at::Tensor> for_owner(const rpc::RRef<SharedModule>& module,
                                  std::vector<at::Tensor> inputs) {
  for (at::Tensor& input : inputs) {
    if (input.defined()) input = rpc::for_rank(module.handle()->agent(), module.owner(), input);
  }
  return inputs;
}

}  // namespace

RemoteModule<ByName>::RemoteModule(rpc::Agent& agent, const rpc::To& to, const std::string& name,
                                   const Encode& arguments)
    : random_(default_seed(agent.rank())), name_hash_(base::hash_of(name)) {
  if (!is_installed(agent)) {
    base::invalid("this agent has no modules: call nn::install(agent) before join()");
  }
  const rpc::ContextScope outside(0);  // tensor arguments are not recorded for a backward pass
  const rpc::RawReply reply = agent
                                  .call_raw(to, kAttachFunction,
                                            [&](rpc::Encoder& encoder) {
                                              rpc::encode<std::string>(encoder, name);
                                              arguments(encoder);
                                            })
                                  .take();
  module_ = agent.finish<rpc::RRef<SharedModule>>(reply);
}

ForwardOptions RemoteModule<ByName>::next_options() const {
  return {training_, at::GradMode::is_enabled(), random_.key() ^ name_hash_, random_.next()};
}

at::Tensor RemoteModule<ByName>::forward_all(const std::vector<at::Tensor>& inputs) const {
  return module_.rpc_sync<&SharedModule::forward>(next_options(), for_owner(module_, inputs));
}

base::Future<at::Tensor> RemoteModule<ByName>::forward_all_async(
    const std::vector<at::Tensor>& inputs) const {
  return module_.rpc_async<&SharedModule::forward>(next_options(), for_owner(module_, inputs));
}

std::vector<rpc::RRef<at::Tensor>> RemoteModule<ByName>::remote_parameters() const {
  return module_.rpc_sync<&SharedModule::parameter_rrefs>();
}

std::vector<std::string> RemoteModule<ByName>::parameter_names() const {
  return module_.rpc_sync<&SharedModule::parameter_names>();
}

rpc::NamedTensors RemoteModule<ByName>::state() const {
  return without_deadline<&SharedModule::state>(module_);
}

rpc::RRef<rpc::NamedTensors> RemoteModule<ByName>::snapshot(const std::string& prefix) const {
  return without_deadline<&SharedModule::snapshot>(module_, prefix);
}

void RemoteModule<ByName>::load_state(const rpc::NamedTensors& state) const {
  without_deadline<&SharedModule::load_state>(module_, state);
}

}  // namespace distrain::nn

#include "distrain/autograd/parameter_versions.h"

#include <torch/csrc/autograd/grad_mode.h>

#include "runtime.h"

namespace distrain::autograd {

// Holding a plain reference is safe because the agent owns its Runtime.
ParameterRead::ParameterRead(rpc::Agent& agent)
    : runtime_(*Runtime::of(agent)),
      lock_(runtime_.parameters_lock),
      outer_(base::thread_state().observer) {
  runtime_.parameter_streams.read(agent.device());
  base::thread_state().observer = this;
}

at::Tensor ParameterRead::version(const at::Tensor& parameter) const {
  runtime_.parameter_streams.read(parameter);
  at::Tensor version = parameter.variable_data();
  if (parameter.requires_grad() && at::GradMode::is_enabled()) {
    torch::autograd::impl::set_gradient_edge(version,
                                             torch::autograd::impl::gradient_edge(parameter));
  }
  return version;
}

void ParameterRead::renew(const at::Tensor& version, const at::Tensor& parameter) const {
  runtime_.parameter_streams.read(parameter);
  version.unsafeGetTensorImpl()->shallow_copy_from(parameter.variable_data().getIntrusivePtr());
}

std::vector<at::Tensor> current_versions(rpc::Agent& agent,
                                         const std::vector<at::Tensor>& parameters) {
  const ParameterRead read(agent);
  std::vector<at::Tensor> versions;
  versions.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) versions.push_back(read.version(parameter));
  return versions;
}

void add_version_keeper(rpc::Agent& agent, std::weak_ptr<VersionKeeper> keeper) {
  Runtime& runtime = *Runtime::of(agent);
  const std::unique_lock lock(runtime.parameters_lock);
  runtime.version_keepers.push_back(std::move(keeper));
}

ParameterUpdate::ParameterUpdate(rpc::Agent& agent)
    : runtime_(*Runtime::of(agent)), lock_(runtime_.parameters_lock) {
  runtime_.parameter_streams.update(agent.device());
  std::erase_if(runtime_.version_keepers, [](const std::weak_ptr<VersionKeeper>& known) {
    const auto keeper = known.lock();
    if (keeper) keeper->release_versions();
    return !keeper;
  });
}

bool ParameterUpdate::unshare(const at::Tensor& parameter) const {
  runtime_.parameter_streams.update(parameter);
  if (parameter.storage().use_count() <= 1) return false;
  const at::NoGradGuard no_grad;
  at::Tensor moved = parameter;
  moved.set_data(parameter.detach().clone());
  // A graph that has saved the parameter itself, not a version, must fail in its backward pass.
  torch::autograd::impl::bump_version(moved);
  return true;
}

}  // namespace distrain::autograd

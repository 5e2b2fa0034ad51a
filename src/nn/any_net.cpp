#include <array>

#include <c10/util/Type.h>

#include "distrain/base/error.h"
#include "distrain/nn/module.h"

namespace distrain::nn::detail {

namespace {

using torch::nn::AnyModule;
using torch::nn::AnyValue;

constexpr size_t kMostInputs = 8;

template <size_t... I>
AnyValue call(AnyModule& module, const std::vector<at::Tensor>& inputs, std::index_sequence<I...>) {
  return module.any_forward(at::Tensor(inputs[I])...);
}

// Passes the tensors as separate arguments, as AnyModule::any_forward() requires.
AnyValue call(AnyModule& module, const std::vector<at::Tensor>& inputs) {
  using Call = AnyValue (*)(AnyModule&, const std::vector<at::Tensor>&);
  static constexpr auto kCalls = []<size_t... N>(std::index_sequence<N...>) {
    return std::array<Call, sizeof...(N)>{
        [](AnyModule& to, const std::vector<at::Tensor>& given) -> AnyValue {
          return call(to, given, std::make_index_sequence<N>());
        }...};
  }
  (std::make_index_sequence<kMostInputs + 1>());
  if (inputs.size() >= kCalls.size()) {
    base::invalid("forward() of a module takes at most " + std::to_string(kMostInputs) +
                  " tensors, not " + std::to_string(inputs.size()));
  }
  return kCalls[inputs.size()](module, inputs);
}

at::Tensor tensor_of(AnyValue& value) {
  const at::Tensor* tensor = value.try_get<at::Tensor>();
  if (tensor) return *tensor;
  base::invalid("its forward() gives " + c10::demangle(value.type_info().name()) +
                ", not a tensor");
}

}  // namespace

AnyNet any_net(AnyModule module) {
  if (module.is_empty()) base::invalid("make() gave no module");
  const std::shared_ptr<torch::nn::Module> pointer = module.ptr();
  return {pointer, [module](const std::vector<at::Tensor>& inputs) mutable {
            AnyValue value = call(module, inputs);
            return tensor_of(value);
          }};
}

// SequentialImpl::forward() takes separate arguments, so do here what it does with `inputs`.
AnyNet any_net(torch::nn::Sequential module) {
  if (module->is_empty()) base::invalid("make() gave a Sequential without modules");
  return {module.ptr(), [module](const std::vector<at::Tensor>& inputs) mutable {
            auto it = module->begin();
            AnyValue value = call(*it, inputs);
            for (++it; it != module->end(); ++it) value = it->any_forward(std::move(value));
            return tensor_of(value);
          }};
}

}  // namespace distrain::nn::detail

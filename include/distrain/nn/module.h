#pragma once

#include <any>
#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include "distrain/nn/remote_module.h"
#include "distrain/rpc/agent.h"

namespace distrain::nn {

namespace detail {

struct AnyNet {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> forward;
};

AnyNet any_net(torch::nn::AnyModule module);
AnyNet any_net(torch::nn::Sequential module);

template <std::derived_from<torch::nn::Module> M>
AnyNet any_net(std::shared_ptr<M> module) {
  if constexpr (std::is_base_of_v<torch::nn::SequentialImpl, M>) {
    return any_net(torch::nn::Sequential(std::move(module)));
  } else {
    using Result = typename rpc::FunctionTraits<&M::forward>::Returned;
    static_assert(std::is_convertible_v<Result, at::Tensor>,
                  "forward() of this module does not give a tensor: put it into one that does");
    return any_net(torch::nn::AnyModule(std::move(module)));
  }
}

template <class Holder>
requires torch::detail::is_module_holder<Holder>::value AnyNet any_net(const Holder& holder) {
  return any_net(holder.ptr());
}

/// A function that creates a module, and the arguments that a rank has sent for the function.
struct Recipe {
  std::function<AnyNet()> make;
  std::any arguments;
  /// Describes how the arguments `asked` differ from `made`; "" if they are equal.
  std::string (*difference)(const std::any& made, const std::any& asked) = nullptr;
};
using Factory = std::function<Recipe(rpc::Decoder&)>;

template <class T>
std::string difference_of(size_t number, const T& made, const T& asked) {
  if constexpr (std::equality_comparable<T>) {
    if (made == asked) return {};
    if constexpr (std::is_arithmetic_v<T> || std::is_convertible_v<T, std::string>) {
      return c10::str("argument ", number, " is ", asked, ", not ", made);
    }
    return c10::str("argument ", number, " is another one");
  }
  return {};  // values without == are taken to be equal
}

template <class Arguments>
std::string first_difference(const std::any& made, const std::any& asked) {
  const auto first = [&]<size_t... I>(std::index_sequence<I...>) {
    [[maybe_unused]] const auto& x = *std::any_cast<Arguments>(&made);
    [[maybe_unused]] const auto& y = *std::any_cast<Arguments>(&asked);
    std::string text;
    static_cast<void>(
        (... || !(text = difference_of(I + 1, std::get<I>(x), std::get<I>(y))).empty()));
    return text;
  };
  return first(std::make_index_sequence<std::tuple_size_v<Arguments>>());
}

template <class Make, class R, class... Params>
Factory factory(Make make, const std::function<R(Params...)>&) {
  using Arguments = std::tuple<std::decay_t<Params>...>;
  return [make](rpc::Decoder& decoder) {
    auto arguments = decode_arguments<std::decay_t<Params>...>(decoder);
    return Recipe{[make, arguments] { return any_net(std::apply(make, arguments)); },
                  std::move(arguments), &first_difference<Arguments>};
  };
}

void add_factory(rpc::Agent& agent, const std::string& name, Factory factory);

}  // namespace detail

// Note [Plain modules]
//
// A torch::nn module keeps its parameters in members, so an update between the forward and the
// backward pass of one trainer would break that backward pass. So each in-flight pass has a module
// of its own, a replica, which make() creates. The parameters that are optimized and saved are
// separate tensors with the first replica's values. The replicas' parameters are versions of these
// (see autograd/parameter_versions.h) without memory of their own, renewed when a pass begins.
//
// Replicas are made one at a time, and their memory is freed at once, so a module needs at most
// twice its size. Further replicas of an Embedding or EmbeddingBag have no memory for the table. A
// replica is idle when no graph has a handle of its parameters. A `sparse` lookup saves nothing of
// its table, which may be too big to copy. So updates of such a module wait for its forward passes,
// and copy only a saved table.
//
// Each replica has copies of the buffers. A forward pass that writes a buffer (BatchNorm's running
// statistics) is refused, because the other replicas would not see the change. Dropout and other
// random operations draw from a generator seeded by a key sent with the call.

/// Exposes the module that `make` returns to all ranks, as RemoteModule `name`, before join().
///
/// `make` returns a torch::nn module (a holder, shared_ptr, Sequential or AnyModule) whose
/// forward() takes tensors and returns a tensor. The arguments of `make` come from the first
/// RemoteModule: numbers, strings and Serializable types. `make` is called again, on several
/// threads and possibly concurrently, for further in-flight passes. Each call must make the same
/// module, except for the values of parameters and buffers; in later calls `normal_`, `uniform_`
/// and the like leave tensors unchanged, and no random operation advances the default generator.
/// The module must not keep anything of a pass in its members.
///
/// Each rank has one module for each name, made on the agent's device at the first request for it.
/// The module lives as long as the agent. The first request fails with `invalid` if the module
/// cannot be shared: if it keeps running statistics, has a table with `max_norm`, or has parameters
/// that share memory or have none. One parameter tensor may be used in several places.
template <class Make>
requires requires(typename decltype(std::function(std::declval<Make>()))::result_type module) {
  detail::any_net(std::move(module));
}
void expose_module(rpc::Agent& agent, const std::string& name, Make make) {
  detail::add_factory(agent, name, detail::factory(make, std::function(make)));
}

}  // namespace distrain::nn

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

#include "distrain/nn/arguments.h"
#include "distrain/nn/remote_module.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/function_traits.h"

namespace distrain::nn {

namespace detail {

/// A module of whichever type.
struct AnyNet {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> forward;
};

AnyNet any_net(torch::nn::AnyModule module);
AnyNet any_net(torch::nn::Sequential module);

template <class M>
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

/// How one module is made, again and again.
struct Recipe {
  std::function<AnyNet()> make;
  std::any arguments;
};

struct Factory {
  std::function<Recipe(rpc::Decoder&)> read;
  /// Returns how the arguments `asked` differ from `made`, or "".
  std::function<std::string(const std::any& made, const std::any& asked)> difference;
};

template <class T>
std::string difference_of(size_t number, const T& made, const T& asked) {
  if constexpr (std::equality_comparable<T>) {
    if (made == asked) return {};
    if constexpr (std::is_arithmetic_v<T> || std::is_convertible_v<T, std::string>) {
      return c10::str("argument ", number, " is ", asked, ", not ", made);
    }
    return c10::str("argument ", number, " is another one");
  }
  return {};  // nobody can tell
}

template <class Make, class R, class... Params>
Factory factory(Make make, const std::function<R(Params...)>&) {
  using Arguments = std::tuple<std::decay_t<Params>...>;
  Factory result;
  result.read = [make](rpc::Decoder& decoder) {
    auto arguments = decode_arguments<std::decay_t<Params>...>(decoder);
    return Recipe{[make, arguments] { return any_net(std::apply(make, arguments)); }, arguments};
  };
  result.difference = [](const std::any& made, const std::any& asked) {
    const auto first = [&]<size_t... I>(std::index_sequence<I...>) {
      [[maybe_unused]] const auto& x = *std::any_cast<Arguments>(&made);
      [[maybe_unused]] const auto& y = *std::any_cast<Arguments>(&asked);
      std::string text;
      static_cast<void>(
          (... || !(text = difference_of(I + 1, std::get<I>(x), std::get<I>(y))).empty()));
      return text;
    };
    return first(std::index_sequence_for<Params...>());
  };
  return result;
}

void add_factory(rpc::Agent& agent, const std::string& name, Factory factory);

}  // namespace detail

// Note [Plain modules]
//
// A torch::nn module keeps its parameters in members, so two passes at a time through one module
// use the same tensors: an update between one's forward and its backward breaks it, or, where the
// members are pointed to other values, gives it gradients of values that it has not seen. Here
// make() is called once for each pass in flight. The values that the first module gives its
// parameters are moved to tensors that are optimised and saved. The parameters of all modules, the
// replicas, are versions of these (see autograd/parameter_versions.h), renewed at the beginning of
// a pass; they have no memory of their own. Replicas are made one at a time, and their memory is
// freed at once, so a module takes at most twice its size; an Embedding or EmbeddingBag that is the
// whole module is made without memory for its table. The graph of a pass holds what it has saved of
// its replica, so a replica is free once nobody else has a handle of any of its parameters.
//
// A lookup in an Embedding or EmbeddingBag that is `sparse` saves nothing of the table, which may
// be too big to copy. So updates wait for its module's forward passes, and copy only a saved table.
//
// Buffers are copied into each replica. A forward pass that changes one (BatchNorm's running
// statistics) would change it for that replica alone, and is refused.
//
// Dropout and whatever else draws random numbers gets those of a key that comes with the call.

/// Offers the module that make() makes to all ranks, as RemoteModule: before join().
///
/// `make` gives a torch::nn module: a holder, a shared_ptr, a Sequential or an AnyModule, whose
/// forward() takes tensors and gives one. It may have parameters, which the first RemoteModule
/// gives: numbers, strings and whatever is Serializable. It is called on several threads, at times
/// at once, also later, for further passes in flight, and each time makes the same but for the
/// values of parameters and buffers. Then the random numbers that it draws move no generator, and
/// what fills a tensor with random numbers of the default generator (`normal_`, `uniform_`) leaves
/// the tensor as it is. The module keeps nothing of a pass in its members.
///
/// There is one module for each name and rank, made when the first asks for it, on the agent's
/// device; it lives as long as the agent. What cannot be trained so is refused then, by `invalid`
/// that names it: a module that keeps running statistics, a table with `max_norm`, parameters that
/// share their memory or have none. A parameter may be used in several places, if it is one tensor.
template <class Make>
void expose_module(rpc::Agent& agent, const std::string& name, Make make) {
  detail::add_factory(agent, name, detail::factory(make, std::function(make)));
}

}  // namespace distrain::nn

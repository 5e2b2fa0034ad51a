#pragma once

#include <utility>

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

namespace detail {

template <auto method, class Traits = FunctionTraits<method>, class Args = typename Traits::Args>
struct OfLocal;
template <auto method, class Traits, class... Args>
struct OfLocal<method, Traits, std::tuple<Args...>> {
  static typename Traits::Returned call(CallContext& context, Args... args) {
    return (context.agent.local<typename Traits::Self>().*method)(std::move(args)...);
  }
};

}  // namespace detail

/// A function to expose and to call, for a member function of an object that each rank provides:
///
///   agent.provide(std::make_shared<Counter>());
///   agent.expose<of_local<&Counter::add>>("Counter.add");
///   agent.rpc_sync<of_local<&Counter::add>>("ps", 3);
template <auto method>
inline constexpr auto of_local = &detail::OfLocal<method>::call;

}  // namespace distrain::rpc

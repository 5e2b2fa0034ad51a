#pragma once

#include <utility>

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

namespace detail {

template <auto method>
struct OfLocal;
template <class T, class R, bool N, class... Params, R (T::*method)(Params...) noexcept(N)>
struct OfLocal<method> {
  static R call(CallContext& context, Params... params) {
    return (context.agent.local<T>().*method)(std::forward<Params>(params)...);
  }
};
template <class T, class R, bool N, class... Params, R (T::*method)(Params...) const noexcept(N)>
struct OfLocal<method> {
  static R call(CallContext& context, Params... params) {
    return (context.agent.local<T>().*method)(std::forward<Params>(params)...);
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

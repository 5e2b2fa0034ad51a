#pragma once

#include <tuple>
#include <type_traits>

#include "distrain/base/future.h"

namespace distrain::rpc {

struct CallContext;

/// Templates that deduce the parameter and result types of an exposed function from its type.
namespace detail {

template <class R>
struct Unwrapped {
  using type = std::decay_t<R>;
};
template <>
struct Unwrapped<void> {
  using type = base::Unit;
};
template <class R>
struct Unwrapped<base::Future<R>> {
  using type = base::detail::Stored<R>;
};

template <class... Params>
struct WithoutContext {
  static constexpr bool kTakesContext = false;
  using Args = std::tuple<std::decay_t<Params>...>;
};
template <class... Params>
struct WithoutContext<CallContext&, Params...> : WithoutContext<Params...> {
  static constexpr bool kTakesContext = true;
};

template <class R, class S, class... Params>
struct Signature : WithoutContext<Params...> {
  using Returned = R;                          ///< as declared; may be a Future or void
  using Result = typename Unwrapped<R>::type;  ///< the value that is sent back; Unit for void
  using Self = S;                              ///< the class of a member function, or void
  static constexpr bool kReturnsFuture = base::detail::IsFuture<R>::value;
};

template <class F>
struct SignatureOf {
  static_assert(!std::is_same_v<F, F>,
                "only these can be called remotely: a function, a member function without &, && or "
                "volatile, and a lambda without captures or auto parameters");
};
template <class R, bool N, class... P>
struct SignatureOf<R (*)(P...) noexcept(N)> : Signature<R, void, P...> {};
template <class R, class S, bool N, class... P>
struct SignatureOf<R (S::*)(P...) noexcept(N)> : Signature<R, S, P...> {};
template <class R, class S, bool N, class... P>
struct SignatureOf<R (S::*)(P...) const noexcept(N)> : Signature<R, S, P...> {};
template <class F>
requires requires { &F::operator(); }
struct SignatureOf<F> : SignatureOf<decltype(&F::operator())> {
  using Self = void;
};

}  // namespace detail

template <auto F>
using FunctionTraits = detail::SignatureOf<std::remove_const_t<decltype(F)>>;

/// The addresses of these tags, which are equal in all translation units, identify F and T.
template <auto F>
inline constexpr char kFunctionTag = 0;
template <class T>
inline constexpr char kClassTag = 0;

}  // namespace distrain::rpc

// The three ways to make a call, and functions that tests call in each of them.
#pragma once

#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "distrain/rpc/agent.h"

namespace distrain::testing {

enum class Form { kSync, kAsync, kRemote };
inline constexpr Form kForms[] = {Form::kSync, Form::kAsync, Form::kRemote};

/// Calls F on `to` in the given form and returns its result.
template <auto F, class... Args>
auto call_as(Form form, rpc::Agent& agent, const rpc::To& to, const Args&... args) {
  using R = typename rpc::FunctionTraits<F>::Result;
  if (form == Form::kSync) return agent.rpc_sync<F>(to, args...);
  if (form == Form::kRemote) return agent.remote<F>(to, args...).to_here();
  if constexpr (std::is_same_v<R, base::Unit>) {
    agent.rpc_async<F>(to, args...).wait();
    return R();
  } else {
    return agent.rpc_async<F>(to, args...).wait();
  }
}
/// Calls the member function F of the object that `ref` refers to, in the given form.
template <auto F, class T, class... Args>
auto call_as(Form form, const rpc::RRef<T>& ref, const Args&... args) {
  using R = typename rpc::FunctionTraits<F>::Result;
  if (form == Form::kSync) return ref.template rpc_sync<F>(args...);
  if (form == Form::kRemote) return ref.template remote<F>(args...).to_here();
  if constexpr (std::is_same_v<R, base::Unit>) {
    ref.template rpc_async<F>(args...).wait();
    return R();
  } else {
    return ref.template rpc_async<F>(args...).wait();
  }
}

/// Operators of torch, as they are.
inline constexpr auto kAdd =
    static_cast<at::Tensor (*)(const at::Tensor&, const at::Tensor&, const at::Scalar&)>(&at::add);
inline constexpr auto kAddScalar =
    static_cast<at::Tensor (*)(const at::Tensor&, const at::Scalar&, const at::Scalar&)>(&at::add);
inline constexpr auto kNonzero = static_cast<at::Tensor (*)(const at::Tensor&)>(&at::nonzero);

using TensorRef = rpc::RRef<at::Tensor>;
inline at::Tensor add_three(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  return a + b + c;
}
inline at::Tensor sum_of_list(const std::vector<at::Tensor>& all) {
  at::Tensor total = all.at(0);
  for (size_t i = 1; i < all.size(); ++i) total = total + all[i];
  return total;
}
inline at::Tensor add_to_ref(const TensorRef& ref, const at::Tensor& x) {
  return ref.to_here() + x;
}
inline at::Tensor add_refs(const TensorRef& a, const TensorRef& b) {
  return a.to_here() + b.to_here();
}
/// Computes for a while.
inline int64_t heavy(at::Tensor x) {
  for (int i = 1; i < 100; ++i) x = x * i / (i + 1);
  return 0;
}

inline void expose_forms(rpc::Agent& agent) {
  agent.expose<kAdd>("aten::add");
  agent.expose<kAddScalar>("aten::add.Scalar");
  agent.expose<kNonzero>("aten::nonzero");
  agent.expose<&add_three>("add_three");
  agent.expose<&sum_of_list>("sum_of_list");
  agent.expose<&add_to_ref>("add_to_ref");
  agent.expose<&add_refs>("add_refs");
  agent.expose<&heavy>("heavy");
}

/// Returns an uncoalesced sparse tensor with 3 entries, two of them in one row.
inline at::Tensor sparse_tensor() {
  return at::sparse_coo_tensor(at::tensor({0, 1, 1, 2, 0, 2}, at::kLong).view({2, 3}),
                               at::tensor({3.F, 4.F, 5.F}), {2, 3});
}
inline bool same_tensor(const at::Tensor& a, const at::Tensor& b) {
  return a.is_sparse() == b.is_sparse() && at::equal(a.to_dense(), b.to_dense());
}

}  // namespace distrain::testing

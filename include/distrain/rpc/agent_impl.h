#pragma once

// Definitions of the templates in agent.h and rref.h.

#include <c10/core/InferenceMode.h>

#include "distrain/rpc/agent.h"
#include "distrain/rpc/error.h"

namespace distrain::rpc {

/// The name of the function that every agent exposes for RRef::to_here() and RRef::created().
inline constexpr const char* kFetchFunction = "distrain.rref.fetch";

namespace detail {

template <class T>
constexpr OwnedValue::EncodeFunction encode_function() {
  if constexpr (Serializable<T>) {
    return [](Encoder& encoder, const void* value) {
      rpc::encode<T>(encoder, *static_cast<const T*>(value));
    };
  } else {
    return nullptr;
  }
}

template <class R>
void answer(const ReplyPtr& reply, R value) {
  if (reply->target()) {
    reply->store(std::make_shared<R>(std::move(value)), typeid(R), encode_function<R>());
  } else if constexpr (Serializable<R>) {
    reply->send([&value](Encoder& encoder) { rpc::encode<R>(encoder, value); });
  } else {
    base::invalid("the function's result does not travel: call it with remote()");
  }
}

// A call of a member function encodes an RRef to the object before the arguments.
template <class Self>
using Object = std::conditional_t<std::is_void_v<Self>, std::tuple<>, std::tuple<RRef<Self>>>;

template <auto F>
void run_exposed(CallContext& context, Decoder& decoder, const ReplyPtr& reply) {
  using Traits = FunctionTraits<F>;
  const auto invoke = [&](const auto&... bound) -> typename Traits::Returned {
    auto args = rpc::decode<typename Traits::Args>(decoder);
    decoder.in.expect_end();
    return std::apply(
        [&](auto&... values) -> typename Traits::Returned {
          if constexpr (Traits::kTakesContext) {
            return std::invoke(F, bound..., context, std::move(values)...);
          } else {
            return std::invoke(F, bound..., std::move(values)...);
          }
        },
        args);
  };
  const auto run = [&](const auto&... bound) {
    if constexpr (Traits::kReturnsFuture) {
      // The tuple keeps the object alive until the call is answered.
      auto answer_with = [reply, object = std::make_tuple(bound...)](
                             base::Result<typename Traits::Result>& result) {
        static_cast<void>(object);
        if (!result.ok()) {
          base::Error error = result.error();
          // An error without a rank arose on this rank, so the called function has failed.
          if (error.rank < 0 && error.kind == base::ErrorKind::kInternal) {
            error.kind = base::ErrorKind::kRemoteFailed;
          }
          return reply->fail(std::move(error));
        }
        try {
          answer<typename Traits::Result>(reply, result.unchecked());
        } catch (...) {
          reply->fail(error_in_flight(base::ErrorKind::kInternal));
        }
      };
      const auto future = invoke(bound...);
      if (future.done()) return answer_with(future.state()->use_result());
      future.on_complete(context.agent.executor(), std::move(answer_with));
    } else if constexpr (std::is_void_v<typename Traits::Returned>) {
      invoke(bound...);
      answer(reply, base::Unit{});
    } else {
      answer<typename Traits::Result>(reply, invoke(bound...));
    }
  };
  // If F is a member function, the decoded RRef keeps its object alive during the call.
  std::apply([&](const auto&... object) { run(object.local_pointer()...); },
             rpc::decode<Object<typename Traits::Self>>(decoder));
}

template <class T, class Constructor>
struct RunConstructor;
template <class T, class... Params>
struct RunConstructor<T, T(Params...)> {
  using Args = std::tuple<std::decay_t<Params>...>;
  static void run(CallContext&, Decoder& decoder, const ReplyPtr& reply) {
    auto args = rpc::decode<Args>(decoder);
    decoder.in.expect_end();
    auto object =
        std::apply([](auto&... values) { return std::make_shared<T>(std::move(values)...); }, args);
    reply->store(std::move(object), typeid(T), encode_function<T>());
  }
};

/// True if converting an argument to T would silently drop its fraction.
template <class T, class Arg>
inline constexpr bool kTruncates = std::is_integral_v<T>&& std::is_floating_point_v<Arg>;

// Encodes each argument as its parameter's type, without a copy if it already has that type.
template <class Tuple>
struct EncodeAll;
template <class... Ts>
struct EncodeAll<std::tuple<Ts...>> {
  template <class... Args>
  static void encode_all(Encoder& encoder, const Args&... args) {
    static_assert(sizeof...(Ts) == sizeof...(Args),
                  "a wrong number of arguments for this function");
    (encode_one<Ts>(encoder, args), ...);
  }

 private:
  template <class T, class Arg>
  static void encode_one(Encoder& encoder, const Arg& arg) {
    if constexpr (std::is_same_v<T, Arg>) {
      rpc::encode<T>(encoder, arg);
    } else {
      static_assert(std::is_convertible_v<const Arg&, T>,
                    "an argument does not convert to the type of its parameter");
      static_assert(!kTruncates<T, Arg>,
                    "an argument with a fraction for an integer parameter: convert it before");
      const T converted = static_cast<T>(arg);
      if constexpr (std::is_integral_v<T> && std::is_integral_v<Arg> && !std::is_same_v<T, bool>) {
        if (static_cast<Arg>(converted) != arg || (converted < T()) != (arg < Arg())) {
          base::invalid("the argument " + std::to_string(arg) +
                        " is outside the range of its parameter's type");
        }
      }
      rpc::encode<T>(encoder, converted);
    }
  }
};

template <auto F>
using EncodeCall =
    EncodeAll<decltype(std::tuple_cat(std::declval<Object<typename FunctionTraits<F>::Self>>(),
                                      std::declval<typename FunctionTraits<F>::Args>()))>;
template <class T>
using EncodeConstructor = EncodeAll<typename RunConstructor<T, typename T::Constructor>::Args>;

/// Waits on `owner` until the value exists. If `wants_value`, the reply has a copy of the value.
inline base::Future<RawReply> ask_owner(const std::shared_ptr<RRefHandle>& handle, const To& owner,
                                        bool wants_value) {
  return handle->agent().call_raw(owner, kFetchFunction, [&](Encoder& encoder) {
    encode_rref(encoder, handle);
    encoder.out.put(wants_value);
  });
}

/// True for results whose decoding runs no code of the user.
template <class R>
inline constexpr bool kDecodesOwnCode =
    std::is_arithmetic_v<R> || std::is_same_v<R, at::Tensor> || std::is_same_v<R, std::string>;

template <auto method, class Traits = FunctionTraits<method>, class Args = typename Traits::Args>
struct OfLocal;
template <auto method, class Traits, class... Args>
struct OfLocal<method, Traits, std::tuple<Args...>> {
  static typename Traits::Returned call(CallContext& context, Args... args) {
    return (context.agent.local<typename Traits::Self>().*method)(std::move(args)...);
  }
};

}  // namespace detail

template <auto F>
void Agent::expose(const std::string& name) {
  expose_tag(&kFunctionTag<F>, name, &detail::run_exposed<F>);
}

template <class T>
void Agent::expose_class(const std::string& name) {
  expose_tag(&kClassTag<T>, name, &detail::RunConstructor<T, typename T::Constructor>::run);
}

template <auto F, class... Args>
base::Future<RawReply> Agent::call(const To& to, const std::shared_ptr<RRefHandle>& target,
                                   CallForm form, Args&&... args) {
  const auto fill = [&](Encoder& encoder) { detail::EncodeCall<F>::encode_all(encoder, args...); };
  return call_raw(to, name_of(&kFunctionTag<F>, "this function"), fill, target, form);
}

template <class R>
R Agent::finish(const RawReply& reply) {
  const std::shared_ptr<InMessage> message = open(reply);
  Decoder in(*message);
  R value = rpc::decode<R>(in);
  in.in.expect_end();
  return value;
}

template <class R>
base::Future<R> Agent::finish_async(const base::Future<RawReply>& reply) {
  const auto promise = std::make_shared<base::Promise<R>>(reply.state()->loop());
  const auto result = promise->future();
  const auto decode = [this, promise](RawReply& raw) {
    try {
      if (!promise->future().done()) promise->set(finish<R>(raw));
    } catch (...) {
      promise->fail(error_in_flight(base::ErrorKind::kInternal));
    }
  };
  reply.state()->on_ready([this, promise, decode, source = reply.state()](auto& raw) {
    if (!raw.ok()) {
      promise->fail(raw.error());
    } else if (detail::kDecodesOwnCode<R> && raw.unchecked().is_plain()) {
      const c10::InferenceMode no_inference(false);  // whatever the completing thread is in
      decode(raw.unchecked());
    } else {
      executor().post_behind(source->queued_work(),
                             [decode, source] { decode(source->result().unchecked()); });
    }
  });
  result.state()->on_cancel([source = std::weak_ptr(reply.state())] {
    const auto known = source.lock();
    if (!known) return;
    known->cancel();
    // If the reply has arrived but is not decoded yet, releases its contents.
    if (known->result().ok()) known->result().unchecked().give_up();
  });
  return result;
}

template <auto F, class... Args>
auto Agent::rpc_sync(const To& to, Args&&... args) -> typename FunctionTraits<F>::Result {
  using R = typename FunctionTraits<F>::Result;
  return finish<R>(call<F>(to, nullptr, CallForm::kSync, std::forward<Args>(args)...).take());
}

template <auto F, class... Args>
auto Agent::rpc_async(const To& to, Args&&... args) {
  using R = typename FunctionTraits<F>::Result;
  base::Future<RawReply> reply =
      call<F>(to, nullptr, CallForm::kAsync, std::forward<Args>(args)...);
  if constexpr (std::is_same_v<R, base::Unit>) {
    return reply.then(inline_executor(), [](RawReply& answer) { answer.open(); });
  } else {
    return finish_async<R>(reply);
  }
}

template <auto F, class... Args>
auto Agent::remote(const To& to, Args&&... args) -> RRef<typename FunctionTraits<F>::Result> {
  std::shared_ptr<RRefHandle> handle = new_handle(rank_of(to));
  // The future is ignored, because the handle receives the call's error.
  static_cast<void>(call<F>(to, handle, CallForm::kRemote, std::forward<Args>(args)...));
  return RRef<typename FunctionTraits<F>::Result>(std::move(handle));
}

template <class T, class... Args>
RRef<T> Agent::remote_new(const To& to, Args&&... args) {
  std::shared_ptr<RRefHandle> handle = new_handle(rank_of(to));
  const auto fill = [&](Encoder& encoder) {
    detail::EncodeConstructor<T>::encode_all(encoder, args...);
  };
  // The future is ignored, because the handle receives the call's error.
  static_cast<void>(
      call_raw(to, name_of(&kClassTag<T>, "this class"), fill, handle, CallForm::kRemote));
  return RRef<T>(std::move(handle));
}

template <class T>
RRef<T> Agent::make_rref(std::shared_ptr<T> value) {
  std::shared_ptr<RRefHandle> handle = new_handle(rank());
  OwnedValue& owned = *handle->owned();
  owned.type = typeid(T);
  owned.encode = detail::encode_function<T>();
  owned.value.set(std::move(value));
  return RRef<T>(std::move(handle));
}

template <class T>
To RRef<T>::owning_rank() const {
  return To(owner()).timeout(timeout_);
}

template <class T>
base::Future<void> RRef<T>::created() const {
  if (is_owner()) {
    return handle_->owned()->value.future().shared().then(handle_->agent().inline_executor(),
                                                          [](std::shared_ptr<void>&) {});
  }
  const auto promise = std::make_shared<base::Promise<void>>(handle_->agent().event_loop());
  handle_->created().state()->on_ready([promise](base::Status& call) {
    if (!call.ok()) promise->fail(call.error());
  });
  const auto reply = detail::ask_owner(handle_, owning_rank(), false);
  reply.state()->on_ready([promise](base::Result<RawReply>& result) {
    result.ok() ? promise->set() : promise->fail(result.error());
  });
  return promise->future();
}

template <class T>
T RRef<T>::to_here() const requires Serializable<T> {
  if (is_owner()) return *static_cast<T*>(handle_->local(typeid(T), timeout_).get());
  if (const auto created = handle_->created(); created.done()) created.wait();  // may throw
  return handle_->agent().template finish<T>(
      detail::ask_owner(handle_, owning_rank(), true).take());
}

template <class T>
base::Future<T> RRef<T>::to_here_async() const requires Serializable<T> {
  Agent& agent = handle_->agent();
  if (is_owner()) {
    return handle_->owned()->value.future().shared().then(
        agent.inline_executor(), [handle = handle_](std::shared_ptr<void>&) {
          return *static_cast<T*>(handle->local(typeid(T)).get());
        });
  }
  const base::Future<void> created = handle_->created();
  if (created.done() && !created.wait_result().ok()) {
    return base::Future<T>::failed(created.wait_result().error());
  }
  return agent.template finish_async<T>(detail::ask_owner(handle_, owning_rank(), true));
}

template <class T>
template <auto F, class... Args>
auto RRef<T>::rpc_sync(Args&&... args) const {
  return handle_->agent().template rpc_sync<F>(owning_rank(), *this, std::forward<Args>(args)...);
}

template <class T>
template <auto F, class... Args>
auto RRef<T>::rpc_async(Args&&... args) const {
  return handle_->agent().template rpc_async<F>(owning_rank(), *this, std::forward<Args>(args)...);
}

template <class T>
template <auto F, class... Args>
auto RRef<T>::remote(Args&&... args) const {
  return handle_->agent().template remote<F>(owning_rank(), *this, std::forward<Args>(args)...);
}

/// Lets agents expose and call a member function of the object that the called rank provides:
///
///   agent.provide(std::make_shared<Counter>());
///   agent.expose<of_local<&Counter::add>>("Counter.add");
///   agent.rpc_sync<of_local<&Counter::add>>("ps", 3);
template <auto method>
inline constexpr auto of_local = &detail::OfLocal<method>::call;

}  // namespace distrain::rpc

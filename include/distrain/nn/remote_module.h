#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/base/random.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/named_tensors.h"
#include "distrain/rpc/serialize.h"

namespace distrain::nn {

class SharedModule;
using NamedParameters = std::vector<std::pair<std::string, rpc::RRef<at::Tensor>>>;

/// Enables RemoteModule<> on this rank. Call it before join() and before other threads call torch;
/// repeated calls do nothing. expose_module(agent, name, make) calls it.
void install(rpc::Agent& agent);

namespace detail {

template <class Module>
std::vector<rpc::RRef<at::Tensor>> share_parameters(rpc::CallContext& context,
                                                    const rpc::RRef<Module>& module) {
  std::vector<rpc::RRef<at::Tensor>> shared;
  for (const at::Tensor& parameter : module.local_value().parameters()) {
    shared.push_back(context.agent.make_rref(parameter));
  }
  return shared;
}

template <class Module>
void set_training(const rpc::RRef<Module>& module, bool on) {
  module.local_value().train(on);
}

template <class Module>
concept HasForward = std::is_member_function_pointer_v<decltype(&Module::forward)>;
template <class Module>
concept HasTraining = requires(Module module) {
  module.train(true);
};

}  // namespace detail

/// Enables RemoteModule<Module>, with the wire name `name`. Call it on every rank before join().
///
/// Module needs a type `Constructor` that lists its constructor's parameters (see
/// Agent::expose_class), a `forward` without overloads, and `parameters()`, a range of tensors. It
/// may have `train(bool)`.
template <class Module>
void expose_module(rpc::Agent& agent, const std::string& name) {
  agent.expose_class<Module>(name);
  agent.expose<&Module::forward>(name + ".forward");
  agent.expose<&detail::share_parameters<Module>>(name + ".parameters");
  if constexpr (detail::HasTraining<Module>) {
    agent.expose<&detail::set_training<Module>>(name + ".train");
  }
}

// Arguments of a function that the sender knows only by name. Each argument is sent with its type.
// The receiver converts numbers to the parameter's type; other types must match.
//
// On the wire: u32 count, then for each argument: u8 kind · type name (kOther only) · value.

enum class ArgumentKind : uint8_t { kBool = 0, kInteger = 1, kReal = 2, kText = 3, kOther = 4 };

namespace detail {

/// Throws `invalid`, because argument number `number` (from 1) is `given` instead of type `wanted`.
[[noreturn]] void refuse_argument(size_t number, const std::string& given,
                                  const std::type_info& wanted);
[[noreturn]] void refuse_count(size_t given, size_t wanted);
std::string kind_name(ArgumentKind kind);
std::string type_name(std::string_view mangled);

template <class T>
void encode_argument(rpc::Encoder& encoder, const T& value) {
  const auto put = [&encoder]<class As>(ArgumentKind kind, const As& as) {
    encoder.out.put(static_cast<uint8_t>(kind));
    rpc::encode<As>(encoder, as);
  };
  if constexpr (std::is_same_v<T, bool>) {
    put(ArgumentKind::kBool, value);
  } else if constexpr (std::is_integral_v<T>) {
    put(ArgumentKind::kInteger, static_cast<int64_t>(value));
  } else if constexpr (std::is_floating_point_v<T>) {
    put(ArgumentKind::kReal, static_cast<double>(value));
  } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    put(ArgumentKind::kText, std::string(std::string_view(value)));
  } else {
    encoder.out.put(static_cast<uint8_t>(ArgumentKind::kOther));
    encoder.out.put(std::string(typeid(T).name()));
    rpc::encode<T>(encoder, value);
  }
}

template <class T>
T decode_argument(rpc::Decoder& decoder, size_t number) {
  const auto kind = static_cast<ArgumentKind>(decoder.in.get<uint8_t>());
  constexpr bool kTakesInteger = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;
  if (kind == ArgumentKind::kOther) {
    const std::string type(decoder.in.get_string());
    if constexpr (!std::is_arithmetic_v<T> && !std::is_same_v<T, std::string>) {
      if (type == typeid(T).name()) return rpc::decode<T>(decoder);
    }
    refuse_argument(number, type_name(type), typeid(T));
  }
  if constexpr (std::is_same_v<T, bool>) {
    if (kind == ArgumentKind::kBool) return decoder.in.get<bool>();
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (kind == ArgumentKind::kText) return rpc::decode<std::string>(decoder);
  } else if constexpr (kTakesInteger) {
    if (kind == ArgumentKind::kInteger) {
      const auto value = decoder.in.get<int64_t>();
      if constexpr (std::is_integral_v<T>) {
        // A uint64 is sent as the int64 with the same bits, so any value fits a 64-bit T.
        if (sizeof(T) < sizeof(value) && !std::in_range<T>(value)) {
          refuse_argument(number, std::to_string(value), typeid(T));
        }
      }
      return static_cast<T>(value);
    }
    if constexpr (std::is_floating_point_v<T>) {
      if (kind == ArgumentKind::kReal) return static_cast<T>(decoder.in.get<double>());
    }
  }
  refuse_argument(number, kind_name(kind), typeid(T));
}

}  // namespace detail

template <class... Args>
void encode_arguments(rpc::Encoder& encoder, const Args&... args) {
  encoder.out.put(static_cast<uint32_t>(sizeof...(Args)));
  (detail::encode_argument(encoder, args), ...);
}

/// Throws `invalid` if the number or the types of the arguments do not match `Ts`.
template <class... Ts>
std::tuple<Ts...> decode_arguments(rpc::Decoder& decoder) {
  const auto count = decoder.in.get<uint32_t>();
  if (count != sizeof...(Ts)) detail::refuse_count(count, sizeof...(Ts));
  const auto decode = [&decoder]<size_t... I>(std::index_sequence<I...>) {
    // A braced list is evaluated from left to right, which is the order of encoding.
    return std::tuple<Ts...>{detail::decode_argument<Ts>(decoder, I + 1)...};
  };
  auto values = decode(std::index_sequence_for<Ts...>());
  decoder.in.expect_end();
  return values;
}

/// Tag of RemoteModule<>, which refers to an exposed torch::nn module by name.
struct ByName {};

/// A handle of a module on another rank. It can be an argument of a call. The module lives as long
/// as any rank holds a handle of it.
template <class Module = ByName>
class RemoteModule {
 public:
  RemoteModule() = default;
  /// Creates the module on `to` without waiting. The first use of the handle throws any error.
  template <class... Args>
  RemoteModule(rpc::Agent& agent, const rpc::To& to, Args&&... args)
      : module_(agent.remote_new<Module>(to, std::forward<Args>(args)...)) {}
  /// Refers to a module that exists.
  explicit RemoteModule(rpc::RRef<Module> module) : module_(std::move(module)) {}

  /// Calls Module::forward on the owner. In an autograd context, gradients pass through the call.
  template <class... Args>
  auto forward(Args&&... args) const requires detail::HasForward<Module> {
    return module_.template rpc_sync<&Module::forward>(std::forward<Args>(args)...);
  }
  template <class... Args>
  auto forward_async(Args&&... args) const requires detail::HasForward<Module> {
    return module_.template rpc_async<&Module::forward>(std::forward<Args>(args)...);
  }

  /// Returns references to the parameters, in the order of Module::parameters().
  std::vector<rpc::RRef<at::Tensor>> remote_parameters() const {
    return module_.handle()->agent().template rpc_sync<&detail::share_parameters<Module>>(
        module_.owner(), module_);
  }

  /// Calls Module::train(on) on the owner, and waits. The mode is the module's, for all handles.
  void train(bool on = true) const requires detail::HasTraining<Module> {
    module_.handle()->agent().template rpc_sync<&detail::set_training<Module>>(module_.owner(),
                                                                               module_, on);
  }
  void eval() const requires detail::HasTraining<Module> { train(false); }

  const rpc::RRef<Module>& rref() const { return module_; }
  int owner() const { return module_.owner(); }

 private:
  rpc::RRef<Module> module_;

 public:
  static constexpr auto kFields = std::tuple(&RemoteModule::module_);
};

struct ForwardOptions {
  bool training = true;
  bool recording = true;  ///< record a graph for a backward pass
  uint64_t seed = 0;
  uint64_t number = 0;  ///< `seed` and `number` together determine the pass's random numbers
  static constexpr auto kFields = std::tuple(&ForwardOptions::training, &ForwardOptions::recording,
                                             &ForwardOptions::seed, &ForwardOptions::number);
};

/// Numbers the passes of a RemoteModule, so that each pass has its own random numbers. Copies share
/// the count. If a RandomSeries is sent to another rank, the received one gets a new key, derived
/// from the sender's key and count, so that no two ranks draw the same numbers. Thread-safe.
class RandomSeries {
 public:
  explicit RandomSeries(uint64_t key = 0) : key_(key) {}
  uint64_t key() const { return key_; }
  uint64_t next() const { return used_->fetch_add(1); }

 private:
  uint64_t key_;
  std::shared_ptr<std::atomic<uint64_t>> used_ = std::make_shared<std::atomic<uint64_t>>(0);
};

/// A handle of a torch::nn module that a rank exposes (see module.h). Each forward pass uses one
/// version of the parameters, so any number of ranks may train the module concurrently, in every
/// mode of a DistributedOptimizer over remote_parameters().
///
/// The handle is cheap to copy and can be an argument of a call. Each handle has its own training
/// mode and random numbers. Thread-safe except for train(), eval() and seed().
template <>
class RemoteModule<ByName> {
 public:
  RemoteModule() = default;
  /// Attaches to the module `name` on `to`, and waits. The first handle creates the module by
  /// make(args...). Throws `not_found`, with the known names, if `to` exposes no such module, and
  /// `invalid` if `args` do not fit make() or differ from the first handle's, or if the module
  /// cannot be shared (see expose_module()).
  template <class... Args>
  RemoteModule(rpc::Agent& agent, const rpc::To& to, const std::string& name, const Args&... args)
      : RemoteModule(agent, to, name,
                     Encode([&](rpc::Encoder& encoder) { encode_arguments(encoder, args...); })) {}

  /// Calls the module's forward(). Gradients pass through the call in an autograd context, unless
  /// a NoGradGuard is active. Throws `remote_failed` with the module's error message.
  template <class... Tensors>
  at::Tensor forward(const Tensors&... inputs) const {
    return forward_all({at::Tensor(inputs)...});
  }
  template <class... Tensors>
  base::Future<at::Tensor> forward_async(const Tensors&... inputs) const {
    return forward_all_async({at::Tensor(inputs)...});
  }
  at::Tensor forward_all(const std::vector<at::Tensor>& inputs) const;
  base::Future<at::Tensor> forward_all_async(const std::vector<at::Tensor>& inputs) const;

  /// Sets the mode of this handle's passes, as torch::nn::Module::train(). The default is training.
  void train(bool on = true) { training_ = on; }
  void eval() { train(false); }
  bool is_training() const { return training_; }

  /// Seeds the random numbers of later passes, for instance of dropout. They depend on `key` and on
  /// the number of passes that this handle and its copies have made since. The default key depends
  /// on the seed of torch's default generator and on this rank. Sending the handle to another rank
  /// counts as a pass, and the received handle gets a new key.
  void seed(uint64_t key) { random_ = RandomSeries(key); }

  /// Returns references to the parameters that require a gradient, each once, in torch's order.
  std::vector<rpc::RRef<at::Tensor>> remote_parameters() const {
    std::vector<rpc::RRef<at::Tensor>> references;
    for (const auto& [name, reference] : named_parameters()) references.push_back(reference);
    return references;
  }
  /// Returns the parameters' names, in the order of remote_parameters().
  std::vector<std::string> parameter_names() const {
    std::vector<std::string> names;
    for (const auto& [name, reference] : named_parameters()) names.push_back(name);
    return names;
  }
  NamedParameters named_parameters() const;

  /// Returns copies of the parameters and buffers on the CPU, as a consistent snapshot.
  rpc::NamedTensors state() const;
  /// Copies the state on the module's rank and puts `prefix` before each tensor's name.
  rpc::RRef<rpc::NamedTensors> snapshot(const std::string& prefix) const;
  /// Loads `state`. Throws `bad_data` and changes nothing if names, shapes or dtypes differ.
  void load_state(const rpc::NamedTensors& state) const;

  int owner() const { return module_.owner(); }

 private:
  using Encode = std::function<void(rpc::Encoder&)>;
  RemoteModule(rpc::Agent& agent, const rpc::To& to, const std::string& name,
               const Encode& arguments);
  ForwardOptions next_options() const;

  rpc::RRef<SharedModule> module_;
  bool training_ = true;
  RandomSeries random_;
  uint64_t name_hash_ = 0;  // makes modules with the same key draw different numbers

 public:
  static constexpr auto kFields = std::tuple(&RemoteModule::module_, &RemoteModule::training_,
                                             &RemoteModule::random_, &RemoteModule::name_hash_);
};

}  // namespace distrain::nn

template <>
struct distrain::rpc::Serializer<distrain::nn::RandomSeries> {
  static void encode(Encoder& encoder, const nn::RandomSeries& series) {
    encoder.out.put(base::Random({series.key(), series.next(), 1}).next());
  }
  static nn::RandomSeries decode(Decoder& decoder) {
    return nn::RandomSeries(decoder.in.get<uint64_t>());
  }
};

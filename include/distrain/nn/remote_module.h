#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/base/random.h"
#include "distrain/nn/arguments.h"
#include "distrain/rpc/agent.h"

namespace distrain::nn {

class SharedModule;

/// Tensors by the names that torch's modules give them, such as `0.weight`.
using NamedTensors = std::map<std::string, at::Tensor>;

/// Lets this rank use RemoteModule<>, on whichever rank the module is. Before join(), once or more,
/// and before other threads call torch; expose_module(agent, name, make) does so.
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

}  // namespace detail

/// Makes Module usable as RemoteModule<Module>, under `name`. On every rank, before join().
///
/// Module has a type `Constructor` that names its constructor's parameters (see
/// Agent::expose_class), `forward`, not overloaded, and `parameters()`: a range of tensors.
template <class Module>
void expose_module(rpc::Agent& agent, const std::string& name) {
  agent.expose_class<Module>(name);
  agent.expose<&Module::forward>(name + ".forward");
  agent.expose<&detail::share_parameters<Module>>(name + ".parameters");
}

/// RemoteModule<>: a torch::nn module, by the name that it has on its rank.
struct ByName {};

/// A module on another rank, used like one here. A handle: it can be an argument of a call, and the
/// module lives as long as any rank holds one.
template <class Module = ByName>
class RemoteModule {
 public:
  RemoteModule() = default;
  /// Makes the module on `to`; returns at once. What goes wrong there is thrown by its first use.
  template <class... Args>
  RemoteModule(rpc::Agent& agent, const rpc::To& to, Args&&... args)
      : module_(agent.remote_new<Module>(to, std::forward<Args>(args)...)) {}

  /// Module::forward on its rank; in a context its result carries gradients.
  template <class... Args>
  auto forward(Args&&... args) const {
    return module_.template rpc_sync<&Module::forward>(std::forward<Args>(args)...);
  }
  template <class... Args>
  auto forward_async(Args&&... args) const {
    return module_.template rpc_async<&Module::forward>(std::forward<Args>(args)...);
  }

  /// References to the parameters for a DistributedOptimizer, in Module::parameters()' order.
  std::vector<rpc::RRef<at::Tensor>> remote_parameters() const {
    return module_.handle()->agent().template rpc_sync<&detail::share_parameters<Module>>(
        module_.owner(), module_);
  }

  const rpc::RRef<Module>& rref() const { return module_; }
  int owner() const { return module_.owner(); }

 private:
  rpc::RRef<Module> module_;

 public:
  static constexpr auto kFields = std::tuple(&RemoteModule::module_);
};

/// How a forward pass is to be made.
struct ForwardTerms {
  bool training = true;
  bool recording = true;  ///< for a backward pass
  uint64_t seed = 0;
  uint64_t number = 0;
  static constexpr auto kFields = std::tuple(&ForwardTerms::training, &ForwardTerms::recording,
                                             &ForwardTerms::seed, &ForwardTerms::number);
};

/// The series of random numbers that the passes of a handle draw. Copies share the series; one that
/// travels begins a series of its own, which follows from the sender's key and count, so that no
/// two ranks draw the same numbers. Thread-safe.
class RandomSeries {
 public:
  explicit RandomSeries(uint64_t key = 0) : key_(key) {}
  uint64_t key() const { return key_; }
  uint64_t next() const { return used_->fetch_add(1); }

 private:
  uint64_t key_;
  std::shared_ptr<std::atomic<uint64_t>> used_ = std::make_shared<std::atomic<uint64_t>>(0);
};

/// A torch::nn module that its rank has exposed (see module.h), shared by all who name it. Each
/// forward pass is made on one version of its parameters, so any number of ranks may train it at a
/// time, in every mode of a DistributedOptimizer over remote_parameters().
///
/// A cheap handle, which can be an argument of a call. Training mode and random numbers are each
/// handle's own. Thread-safe but for train(), eval() and seed().
template <>
class RemoteModule<ByName> {
 public:
  RemoteModule() = default;
  /// The module `name` of `to`; the first makes it there, with these arguments for its make().
  /// Waits for it. Throws `not_found` with the names there are, `invalid` for arguments of other
  /// types, or other than the first one's, and for a module that cannot be trained so.
  template <class... Args>
  RemoteModule(rpc::Agent& agent, const rpc::To& to, const std::string& name, const Args&... args)
      : RemoteModule(agent, to, name,
                     Encode([&](rpc::Encoder& encoder) { encode_arguments(encoder, args...); })) {}

  /// Its forward() of these tensors. Gradients go through it in a context; outside of one, or under
  /// a NoGradGuard, it records nothing. Throws `remote_failed` with what the module said.
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

  /// As torch::nn::Module::train(), for the passes of this handle: at first they train.
  void train(bool on = true) { training_ = on; }
  void eval() { train(false); }
  bool is_training() const { return training_; }

  /// What the next passes draw, in dropout for instance, depends on `key` and on how many passes
  /// were made since, with this handle or copies of it: so a step does the same in every run. At
  /// first the key comes from the seed of torch's default generator and this rank's number. A
  /// handle that travels counts as a pass, and draws numbers of its own where it arrives.
  void seed(uint64_t key) { random_ = RandomSeries(key); }

  /// References to the parameters that require a gradient, in torch's order, each once.
  std::vector<rpc::RRef<at::Tensor>> remote_parameters() const;

  /// Names of the parameters that require a gradient, in the order of remote_parameters().
  std::vector<std::string> parameter_names() const;

  /// Copies of parameters and buffers, on the CPU, all of one moment.
  NamedTensors state() const;
  /// The same, left on the module's rank, with `prefix` before each name.
  rpc::RRef<NamedTensors> held_state(const std::string& prefix) const;
  /// Copies all at once, or throws `bad_data` for other names, shapes or dtypes.
  void load_state(const NamedTensors& state) const;

  int owner() const { return module_.owner(); }

 private:
  using Encode = std::function<void(rpc::Encoder&)>;
  RemoteModule(rpc::Agent& agent, const rpc::To& to, const std::string& name,
               const Encode& arguments);
  ForwardTerms next_terms() const;

  rpc::RRef<SharedModule> module_;
  bool training_ = true;
  RandomSeries random_;
  uint64_t name_hash_ = 0;  // modules with one key draw different numbers

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

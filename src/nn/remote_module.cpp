// RemoteModule<> on the caller, and the modules that a rank exposes to it.

#include "distrain/nn/remote_module.h"

#include <any>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>

#include "distrain/rpc/to_device.h"
#include "keyed_random.h"
#include "shared_module.h"

namespace distrain::nn {

using base::ErrorKind;

namespace {

/// Name of the exposed function that returns a module by name, and creates it if necessary.
/// Request: text name · arguments of make().
constexpr const char* kAttachFunction = "distrain.nn.attach";

/// The modules that one rank has exposed. Thread-safe.
class Modules {
 public:
  void add(const std::string& name, detail::Factory factory) {
    auto entry = std::make_shared<Entry>();
    entry->factory = std::move(factory);
    std::lock_guard lock(mutex_);
    if (!entries_.emplace(name, std::move(entry)).second) {
      base::invalid("a module '" + name + "' is exposed already");
    }
  }

  /// Returns the module that `request` (see kAttachFunction) names. The first request creates it.
  std::shared_ptr<SharedModule> find_or_make(rpc::CallContext& call, rpc::Decoder& request) {
    rpc::Agent& agent = call.agent;
    const auto name = rpc::decode<std::string>(request);
    std::shared_ptr<Entry> entry;
    {
      std::lock_guard lock(mutex_);
      const auto it = entries_.find(name);
      if (it == entries_.end()) {
        std::string known;
        for (const auto& item : entries_) known += (known.empty() ? "" : ", ") + item.first;
        if (known.empty()) known = "none at all";
        throw base::Exception(ErrorKind::kNotFound,
                              agent.name() + " exposes no module '" + name + "', but " + known);
      }
      entry = it->second;
    }
    detail::Recipe recipe;
    try {
      recipe = entry->factory(request);
    } catch (const base::Exception& e) {
      if (e.kind() != ErrorKind::kInvalid) throw;
      base::Error error = e.error();
      error.message = "module " + name + ": " + error.message;
      throw base::Exception(std::move(error));
    }
    const base::BlockingScope waits;  // another thread may be creating the module
    std::lock_guard lock(entry->mutex);
    if (!entry->module) {
      auto module = std::make_shared<SharedModule>(agent, name, std::move(recipe.make));
      autograd::add_version_keeper(agent, module);
      entry->module = std::move(module);
      entry->arguments = std::move(recipe.arguments);
      entry->made_for = call.caller.rank;
      return entry->module;
    }
    const std::string other = recipe.difference(entry->arguments, recipe.arguments);
    if (other.empty()) return entry->module;
    base::invalid(c10::str("module ", name, " on rank ", agent.rank(), " was made for rank ",
                           entry->made_for, " with other arguments than rank ", call.caller.rank,
                           " gives: ", other));
  }

  std::atomic<bool> is_installed{false};

 private:
  struct Entry {
    detail::Factory factory;
    std::mutex mutex;  // guards the members below
    std::any arguments;
    int made_for = 0;  // the rank of the first request
    std::shared_ptr<SharedModule> module;
  };

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Entry>> entries_;
};

uint64_t default_seed(int rank) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard lock(generator.mutex());
  return generator.current_seed() + (static_cast<uint64_t>(rank) << 32);
}

/// Calls F without a deadline, because moving a whole state may take any time.
template <auto F, class... Args>
auto without_deadline(const rpc::RRef<SharedModule>& module, const Args&... args) {
  return module.handle()->agent().rpc_sync<F>(rpc::To(module.owner()).without_deadline(), module,
                                              args...);
}

std::vector<at::Tensor> for_owner(const rpc::RRef<SharedModule>& module,
                                  std::vector<at::Tensor> inputs) {
  for (at::Tensor& input : inputs) {
    if (input.defined()) input = rpc::for_rank(module.handle()->agent(), module.owner(), input);
  }
  return inputs;
}

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

at::Tensor tensor_of(AnyValue value) {
  const at::Tensor* tensor = value.try_get<at::Tensor>();
  if (tensor) return *tensor;
  base::invalid("its forward() gives " + c10::demangle(value.type_info().name()) +
                ", not a tensor");
}

}  // namespace

void install(rpc::Agent& agent) {
  if (agent.shared<Modules>()->is_installed.exchange(true)) return;
  KeyedRandom::install();
  const auto attach = [](rpc::CallContext& call, rpc::Decoder& in, const rpc::ReplyPtr& reply) {
    const auto module = call.agent.local<Modules>().find_or_make(call, in);
    reply->send([&](rpc::Encoder& encoder) {
      rpc::encode<rpc::RRef<SharedModule>>(encoder, call.agent.make_rref(module));
    });
  };
  agent.expose_raw(kAttachFunction, attach);
  agent.expose<&SharedModule::forward>("distrain.nn.forward");
  agent.expose<&SharedModule::named_parameters>("distrain.nn.named_parameters");
  agent.expose<&SharedModule::state>("distrain.nn.state");
  agent.expose<&SharedModule::snapshot>("distrain.nn.snapshot");
  agent.expose<&SharedModule::load_state>("distrain.nn.load_state");
}

RemoteModule<ByName>::RemoteModule(rpc::Agent& agent, const rpc::To& to, const std::string& name,
                                   const Encode& arguments)
    : random_(default_seed(agent.rank())), name_hash_(base::hash_of(name)) {
  if (!agent.shared<Modules>()->is_installed) {
    base::invalid("this agent has no modules: call nn::install(agent) before join()");
  }
  const rpc::ContextScope outside(0);  // tensor arguments are not recorded for a backward pass
  const auto request = [&](rpc::Encoder& encoder) {
    rpc::encode<std::string>(encoder, name);
    arguments(encoder);
  };
  module_ =
      agent.finish<rpc::RRef<SharedModule>>(agent.call_raw(to, kAttachFunction, request).take());
}

ForwardOptions RemoteModule<ByName>::next_options() const {
  return {training_, at::GradMode::is_enabled(), random_.key() ^ name_hash_, random_.next()};
}

at::Tensor RemoteModule<ByName>::forward_all(const std::vector<at::Tensor>& inputs) const {
  return module_.rpc_sync<&SharedModule::forward>(next_options(), for_owner(module_, inputs));
}

base::Future<at::Tensor> RemoteModule<ByName>::forward_all_async(
    const std::vector<at::Tensor>& inputs) const {
  return module_.rpc_async<&SharedModule::forward>(next_options(), for_owner(module_, inputs));
}

NamedParameters RemoteModule<ByName>::named_parameters() const {
  return module_.rpc_sync<&SharedModule::named_parameters>();
}

rpc::NamedTensors RemoteModule<ByName>::state() const {
  return without_deadline<&SharedModule::state>(module_);
}

rpc::RRef<rpc::NamedTensors> RemoteModule<ByName>::snapshot(const std::string& prefix) const {
  return without_deadline<&SharedModule::snapshot>(module_, prefix);
}

void RemoteModule<ByName>::load_state(const rpc::NamedTensors& state) const {
  without_deadline<&SharedModule::load_state>(module_, state);
}

namespace detail {

AnyNet any_net(AnyModule module) {
  if (module.is_empty()) base::invalid("make() gave no module");
  return {module.ptr(), [module](const std::vector<at::Tensor>& inputs) mutable {
            return tensor_of(call(module, inputs));
          }};
}

// Runs the modules one by one, because SequentialImpl::forward() takes separate arguments.
AnyNet any_net(torch::nn::Sequential module) {
  if (module->is_empty()) base::invalid("make() gave a Sequential without modules");
  return {module.ptr(), [module](const std::vector<at::Tensor>& inputs) mutable {
            auto it = module->begin();
            AnyValue value = call(*it, inputs);
            for (++it; it != module->end(); ++it) value = it->any_forward(std::move(value));
            return tensor_of(std::move(value));
          }};
}

std::string type_name(std::string_view mangled) {
  return c10::demangle(std::string(mangled).c_str());
}

std::string kind_name(ArgumentKind kind) {
  constexpr std::array kNames = {"a bool", "an integer", "a floating-point number", "a text"};
  const auto number = static_cast<size_t>(kind);
  return number < kNames.size() ? kNames[number] : "of an unknown kind";
}

void refuse_argument(size_t number, const std::string& given, const std::type_info& wanted) {
  base::invalid("argument " + std::to_string(number) + " is " + given + ", not " +
                type_name(wanted.name()));
}

void refuse_count(size_t given, size_t wanted) {
  base::invalid("it is made with " + std::to_string(wanted) + " arguments, not " +
                std::to_string(given));
}

void add_factory(rpc::Agent& agent, const std::string& name, Factory factory) {
  install(agent);
  agent.local<Modules>().add(name, std::move(factory));
}

}  // namespace detail

}  // namespace distrain::nn

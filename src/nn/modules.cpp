#include "modules.h"

#include <any>
#include <map>
#include <mutex>

#include <c10/util/StringUtil.h>

#include "distrain/base/error.h"
#include "distrain/base/thread_state.h"
#include "distrain/nn/module.h"
#include "keyed_random.h"
#include "shared_module.h"

namespace distrain::nn {

using base::ErrorKind;

namespace {

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
      if (it != entries_.end()) {
        entry = it->second;
      } else {
        std::string known;
        for (const auto& item : entries_) known += (known.empty() ? "" : ", ") + item.first;
        throw base::Exception(ErrorKind::kNotFound, agent.name() + " exposes no module '" + name +
                                                        "', but " +
                                                        (known.empty() ? "none at all" : known));
      }
    }
    detail::Recipe recipe;
    try {
      recipe = entry->factory.read(request);
    } catch (const base::Exception& e) {
      base::Error error = e.error();
      if (error.kind == ErrorKind::kInvalid)
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
    const std::string other = entry->factory.difference(entry->arguments, recipe.arguments);
    if (other.empty()) return entry->module;
    base::invalid(c10::str("module ", name, " on rank ", agent.rank(), " was made for rank ",
                           entry->made_for, " with other arguments than rank ", call.caller.rank,
                           " gives: ", other));
  }

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

}  // namespace

bool is_installed(rpc::Agent& agent) {
  try {
    agent.local<Modules>();
    return true;
  } catch (const base::Exception& e) {
    if (e.kind() != ErrorKind::kNotFound) throw;
    return false;
  }
}

void install(rpc::Agent& agent) {
  if (is_installed(agent)) return;
  KeyedRandom::install();
  agent.provide(std::make_shared<Modules>());
  agent.expose_raw(kAttachFunction,
                   [](rpc::CallContext& call, rpc::Decoder& request, const rpc::ReplyPtr& reply) {
                     const auto module = call.agent.local<Modules>().find_or_make(call, request);
                     reply->send([&](rpc::Encoder& encoder) {
                       rpc::encode<rpc::RRef<SharedModule>>(encoder, call.agent.make_rref(module));
                     });
                   });
  agent.expose<&SharedModule::forward>("distrain.nn.forward");
  agent.expose<&SharedModule::parameter_rrefs>("distrain.nn.parameters");
  agent.expose<&SharedModule::parameter_names>("distrain.nn.parameter_names");
  agent.expose<&SharedModule::state>("distrain.nn.state");
  agent.expose<&SharedModule::snapshot>("distrain.nn.snapshot");
  agent.expose<&SharedModule::load_state>("distrain.nn.load_state");
}

namespace detail {

void add_factory(rpc::Agent& agent, const std::string& name, Factory factory) {
  install(agent);
  agent.local<Modules>().add(name, std::move(factory));
}

}  // namespace detail

}  // namespace distrain::nn

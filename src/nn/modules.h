#pragma once

#include <any>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "distrain/nn/module.h"
#include "distrain/rpc/agent.h"
#include "shared_module.h"

namespace distrain::nn {

/// The modules that one rank has exposed. Thread-safe.
class Modules {
 public:
  void add(const std::string& name, detail::Factory factory);

  /// The one that is asked for: text name · arguments of its make(). Made here if it is not there.
  std::shared_ptr<SharedModule> find_or_make(rpc::Agent& agent, rpc::Decoder& request);

 private:
  struct Entry {
    detail::Factory factory;
    std::mutex mutex;  // of what follows
    std::any arguments;
    std::shared_ptr<SharedModule> module;
  };

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Entry>> entries_;
};

/// Null if nn::install() was not called.
Modules* modules_of(rpc::Agent& agent);

/// The function that finds or makes a module, for RemoteModule.
inline constexpr const char* kAttachFunction = "distrain.nn.attach";

}  // namespace distrain::nn

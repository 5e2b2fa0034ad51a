#include "shared_module.h"

#include <map>
#include <set>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>

#include "distrain/rpc/to_device.h"
#include "keyed_random.h"

namespace distrain::nn {

namespace {

using base::invalid;

template <class... Norms>
bool keeps_statistics(const torch::nn::Module& module) {
  const auto does = [](const auto* norm) { return norm && norm->options.track_running_stats(); };
  return (does(dynamic_cast<const Norms*>(&module)) || ...);
}

// Returns the tensor's dtype and shape as text.
std::string text_of(const at::Tensor& tensor) {
  return std::string(c10::toString(tensor.scalar_type())) + " " + c10::str(tensor.sizes());
}

// Refuses modules with running statistics. SharedModule::check_unchanged() might miss a change,
// because some of torch's kernels write the statistics without incrementing the tensor's version.
void refuse_running_statistics(const torch::nn::Module& root, const std::string& name) {
  for (const auto& item : root.named_modules(name)) {
    using namespace torch::nn;
    if (!keeps_statistics<BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl,
                          InstanceNorm2dImpl, InstanceNorm3dImpl>(*item.value())) {
      continue;
    }
    invalid(
        "module " + item.key() + " (" + item.value()->name() +
        ") writes its running statistics in training: trainers that share it would write them at "
        "the same time; use GroupNorm or LayerNorm, or track_running_stats(false)");
  }
}

// Refuses parameters and buffers that an update cannot replace. `module` is the module's name.
void refuse_parameters(const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers, const std::string& module) {
  std::map<const void*, std::string> by_memory;
  for (const auto& [name, tensor] : parameters) {
    const std::string who = "parameter " + module + "." + name;
    if (tensor.layout() != at::kStrided) invalid(who + " is sparse: it must be dense");
    if (!tensor.is_leaf()) invalid(who + " is computed from others: it must be a leaf");
    if (!tensor.is_non_overlapping_and_dense()) {
      invalid(who + " (" + text_of(tensor) + ") has elements that share their memory");
    }
    if (tensor.device().is_meta()) invalid(who + " has no memory: it is on the meta device");
  }
  const auto look = [&](const NamedTensor& item) {
    const auto [it, is_new] =
        by_memory.emplace(item.tensor.storage().unsafeGetStorageImpl(), item.name);
    if (is_new) return;
    invalid("module " + module + ": " + it->second + " and " + item.name +
            " share their memory: register the same tensor twice, or two tensors");
  };
  for (const NamedTensor& parameter : parameters) look(parameter);
  for (const NamedTensor& buffer : buffers) {
    if (by_memory.contains(buffer.tensor.storage().unsafeGetStorageImpl())) look(buffer);
  }
}

// Returns true if an Embedding(Bag) in `root` has sparse gradients. Refuses tables with max_norm.
bool has_row_gradients(const torch::nn::Module& root, const std::string& name) {
  bool has_rows = false;
  const auto look = [&](const auto& item, const auto* table) {
    if (!table) return;
    has_rows = has_rows || table->options.sparse();
    if (!table->options.max_norm()) return;
    invalid("module " + item.key() + " (" + item.value()->name() +
            ") rescales its rows in forward(): trainers that share it would write them at the same "
            "time; leave out max_norm");
  };
  for (const auto& item : root.named_modules(name)) {
    look(item, item.value()->template as<torch::nn::EmbeddingImpl>());
    look(item, item.value()->template as<torch::nn::EmbeddingBagImpl>());
  }
  return has_rows;
}

// Refuses a replica whose tensors `again` differ from those of the first replica.
void check_alike(const std::vector<NamedTensor>& first, const std::vector<NamedTensor>& again,
                 const std::string& module) {
  const auto differ = [&](const std::string& how) {
    invalid("module " + module + ": make() gave another one than at first: " + how);
  };
  if (first.size() != again.size()) {
    differ(std::to_string(again.size()) + " parameters or buffers, not " +
           std::to_string(first.size()));
  }
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i].name != again[i].name) differ(again[i].name + ", not " + first[i].name);
    const auto expected = text_of(first[i].tensor), found = text_of(again[i].tensor);
    if (expected != found) differ(first[i].name + " is " + found + ", not " + expected);
  }
}

// Calls `check` with the indices and the weight if `module` is, or begins with, an Embedding(Bag).
void check_lookup(const torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
                  void (*check)(const at::Tensor& index, const at::Tensor& table)) {
  if (inputs.empty() || !inputs[0].defined()) return;
  if (const auto* all = module.as<torch::nn::SequentialImpl>()) {
    return check_lookup(*all->begin()->ptr(), inputs, check);
  }
  const auto* table = module.as<torch::nn::EmbeddingImpl>();
  const auto* bag = module.as<torch::nn::EmbeddingBagImpl>();
  if (table || bag) check(inputs[0], table ? table->weight : bag->weight);
}

template <class Items>
std::vector<NamedTensor> each_once(const Items& items) {
  std::vector<NamedTensor> result;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : items) {
    if (!item.value().defined() || !seen.insert(item.value().unsafeGetTensorImpl()).second)
      continue;
    result.push_back({item.key(), item.value()});
  }
  return result;
}

void point_to(const at::Tensor& tensor, const at::Tensor& values) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
}

// Moves `parameter` to `device` and into storage of its own: see Note [Parameter versions].
void own_storage_on(const at::Tensor& parameter, c10::Device device) {
  if (parameter.device() != device) {
    point_to(parameter, rpc::to_device(parameter.detach(), device));
  } else if (parameter.storage().use_count() > 1) {
    point_to(parameter, parameter.detach().clone());
  }
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  const base::BlockingScope waits;  // to_host() waits for the device
  const auto both = rpc::to_host({a, b});
  const at::Tensor x = both[0].contiguous(), y = both[1].contiguous();
  return x.nbytes() == y.nbytes() &&
         (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

std::string one_line(std::string text) {
  text = text.substr(0, text.find_last_not_of(" \n") + 1);
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

/// Returns the inputs' dtypes and shapes: "; its inputs: Float [2, 3], Long [2]".
std::string inputs_text(const std::vector<at::Tensor>& inputs) {
  std::string text;
  for (const at::Tensor& input : inputs) {
    text += (text.empty() ? "; its inputs: " : ", ");
    text += input.defined() ? text_of(input) : "an undefined tensor";
  }
  return text;
}

/// If `net` is a Table, not a subclass, returns a function that makes Tables without weight memory.
template <class Table>
std::function<detail::AnyNet()> maker_of_tables(const detail::AnyNet& net) {
  const torch::nn::Module& module = *net.module;
  if (typeid(module) != typeid(Table)) return {};
  const auto& table = *module.as<Table>();
  auto options = table.options;
  options._weight(at::empty({1, 1}, table.weight.options().requires_grad(false)));
  return [options] {
    auto own = options;
    own._weight(options._weight().expand({own.num_embeddings(), own.embedding_dim()}));
    return detail::any_net(std::make_shared<Table>(own));
  };
}

}  // namespace

struct SharedModule::Replica {
  detail::AnyNet net;
  std::vector<at::Tensor> parameters;
  std::vector<size_t> handles;  // each parameter's use count when no pass is in flight
  std::vector<NamedTensor> buffers;
  std::vector<int64_t> changes;  // version counters of parameters and buffers before the pass
  uint64_t buffers_generation = 0;
  bool buffers_compared = false;
  bool holds_storage = false;  // set by the pass under a ParameterRead, reset under an update
  bool in_forward = false;     // guarded by SharedModule::mutex_
};

// Returns true if an autograd graph has saved a parameter. If not, copies each at::Tensor and drops
// the copy: the atomic count orders the reads of graphs that other threads released before the next
// pass.
bool SharedModule::is_saved(const Replica& replica) {
  for (size_t i = 0; i < replica.parameters.size(); ++i) {
    if (replica.parameters[i].use_count() != replica.handles[i]) return true;
  }
  for (at::Tensor parameter : replica.parameters) parameter.reset();
  return false;
}

SharedModule::Replica* SharedModule::take_idle() {
  std::lock_guard lock(mutex_);
  for (const auto& replica : replicas_) {
    if (replica->in_forward || is_saved(*replica)) continue;
    replica->in_forward = true;
    return replica.get();
  }
  return nullptr;
}

/// An idle or new replica for one forward pass.
class SharedModule::BorrowedReplica {
 public:
  explicit BorrowedReplica(SharedModule& module) : module_(module), replica_(module.take_idle()) {
    if (replica_) return;
    const base::BlockingScope waits;  // another thread may be making a replica
    std::lock_guard making(module_.making_);
    if ((replica_ = module_.take_idle())) return;
    auto made = module_.make_replica();
    made->in_forward = true;
    replica_ = made.get();
    std::lock_guard lock(module_.mutex_);
    module_.replicas_.push_back(std::move(made));
  }
  /// Destroys the replica if end() was not called, because a failed pass may have changed it.
  ~BorrowedReplica() {
    if (!replica_) return;
    std::unique_ptr<Replica> dropped;
    std::lock_guard lock(module_.mutex_);
    const auto it = std::ranges::find(module_.replicas_, replica_, &std::unique_ptr<Replica>::get);
    dropped = std::move(*it);
    module_.replicas_.erase(it);
  }
  BorrowedReplica(const BorrowedReplica&) = delete;

  Replica& operator*() const { return *replica_; }
  /// Ends the forward pass. The graph may still use the replica.
  void end() {
    std::lock_guard lock(module_.mutex_);
    std::exchange(replica_, nullptr)->in_forward = false;
  }

 private:
  SharedModule& module_;
  Replica* replica_;
};

SharedModule::SharedModule(rpc::Agent& agent, std::string name,
                           std::function<detail::AnyNet()> make)
    : agent_(agent), name_(std::move(name)), make_(std::move(make)) {
  detail::AnyNet net = make_();
  if (!net.module) base::invalid("module " + name_ + ": make() gave none");
  refuse_running_statistics(*net.module, name_);
  parameters_ = each_once(net.module->named_parameters());
  buffers_ = each_once(net.module->named_buffers());
  refuse_parameters(parameters_, buffers_, name_);
  has_rows_ = has_row_gradients(*net.module, name_);
  if (parameters_.size() == 1 && buffers_.empty() && net.module->children().empty()) {
    for (auto& make : {maker_of_tables<torch::nn::EmbeddingImpl>(net),
                       maker_of_tables<torch::nn::EmbeddingBagImpl>(net)}) {
      if (make) make_ = make;
    }
  }
  const at::NoGradGuard no_grad;
  const autograd::ParameterUpdate update(agent_);  // orders reads after the copies on the device
  for (auto& [its_name, parameter] : parameters_) {
    own_storage_on(parameter, agent_.device());
    empty_.push_back(at::empty({0}, parameter.options().requires_grad(false)));
    // Use new tensors with the same storage, because `net` becomes the first replica.
    parameter = parameter.variable_data().requires_grad_(parameter.requires_grad());
  }
  for (auto& [its_name, buffer] : buffers_)
    buffer = rpc::to_device(buffer.detach(), agent_.device());
  replicas_.push_back(replica_of(std::move(net)));
}

SharedModule::~SharedModule() = default;

std::unique_ptr<SharedModule::Replica> SharedModule::make_replica() {
  detail::AnyNet net;
  {
    const at::AutoGradMode as_at_first(true);
    const KeyedRandom discarded(0, 0, KeyedRandom::Fills::kIgnored);
    net = make_();
  }
  check_alike(parameters_, each_once(net.module->named_parameters()), name_);
  {
    const autograd::ParameterRead read(agent_);
    check_alike(buffers_, each_once(net.module->named_buffers()), name_);
  }
  return replica_of(std::move(net));
}

// Makes a replica of `net` without parameter memory. renew() makes it share this module's memory.
std::unique_ptr<SharedModule::Replica> SharedModule::replica_of(detail::AnyNet net) {
  auto replica = std::make_unique<Replica>();
  replica->net = std::move(net);
  const auto parameters = each_once(replica->net.module->named_parameters());
  replica->buffers = each_once(replica->net.module->named_buffers());
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor parameter = parameters[i].tensor;
    const at::Tensor& leaf = parameters_[i].tensor;
    parameter.set_requires_grad(leaf.requires_grad());
    if (leaf.requires_grad()) {
      using namespace torch::autograd;
      impl::set_gradient_edge(parameter, impl::gradient_edge(leaf));
    }
    point_to(parameter, empty_[i]);
    replica->parameters.push_back(std::move(parameter));
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    // Do not count the reference from the local `parameters`, which is destroyed on return.
    replica->handles.push_back(replica->parameters[i].use_count() - 1);
  }
  return replica;
}

void SharedModule::renew(Replica& replica, const autograd::ParameterRead& read) {
  replica.holds_storage = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    read.renew(replica.parameters[i], parameters_[i].tensor);
  }
  if (replica.buffers_generation != buffers_generation_) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      point_to(replica.buffers[i].tensor, buffers_[i].tensor.clone());
    }
    replica.buffers_generation = buffers_generation_;
  }
  replica.changes.clear();
  for (const at::Tensor& parameter : replica.parameters) {
    replica.changes.push_back(parameter._version());
  }
  for (const auto& [its_name, buffer] : replica.buffers) {
    replica.changes.push_back(buffer._version());
  }
}

// Throws `invalid` if the forward pass has written to a parameter or buffer. Each replica's first
// training pass also compares the buffers' values, because some of torch's kernels write running
// statistics without incrementing the tensor's version.
void SharedModule::check_unchanged(Replica& replica, bool training) const {
  for (size_t i = 0; i < replica.parameters.size(); ++i) {
    if (replica.parameters[i]._version() == replica.changes[i]) continue;
    base::invalid("module " + name_ + " writes its parameter " + parameters_[i].name +
                  " in forward(): trainers that share it would write it at the same time");
  }
  const bool compare = training && !replica.buffers_compared;
  for (size_t i = 0; i < replica.buffers.size(); ++i) {
    const auto& [its_name, buffer] = replica.buffers[i];
    bool changed = buffer._version() != replica.changes[replica.parameters.size() + i];
    if (!changed && compare) {
      const autograd::ParameterRead read(agent_);
      // If a concurrent load_state() has changed `buffers_`, the values cannot be compared.
      if (replica.buffers_generation != buffers_generation_) return;
      changed = !same_bytes(buffer, buffers_[i].tensor);
    }
    if (!changed) continue;
    const auto dot = its_name.rfind('.');
    const std::string path = dot == std::string::npos ? "" : its_name.substr(0, dot);
    const auto owner =
        path.empty() ? replica.net.module : replica.net.module->named_modules()[path];
    base::invalid("module " + name_ + (path.empty() ? "" : "." + path) + " (" + owner->name() +
                  ") writes its buffer " + its_name.substr(dot + 1) +
                  " in forward(): trainers that share it would write it at the same time");
  }
  if (training) replica.buffers_compared = true;
}

at::Tensor SharedModule::forward(rpc::CallContext& call, ForwardOptions options,
                                 std::vector<at::Tensor> inputs) {
  const at::AutoGradMode recording(options.recording && rpc::current_context() != 0);
  const std::vector<at::Tensor> given = inputs;
  for (at::Tensor& input : inputs) {
    if (input.defined()) input = rpc::to_device(input, agent_.device());
  }
  BorrowedReplica borrowed(*this);
  // Updates of a table write rows in place, so hold `read` during the whole lookup.
  std::optional<autograd::ParameterRead> read(std::in_place, agent_);
  renew(*borrowed, *read);
  if (!has_rows_) read.reset();
  torch::nn::Module& module = *(*borrowed).net.module;
  module.train(options.training);
  at::Tensor result;
  try {
    const KeyedRandom random(options.seed, options.number);
    check_lookup(module, given, &rpc::check_rows);
    result = (*borrowed).net.forward(inputs);
  } catch (...) {
    base::Error error = rpc::error_in_flight(base::ErrorKind::kRemoteFailed);
    const std::string where = "module '" + name_ + "' on " + agent_.name() + " (rank " +
                              std::to_string(agent_.rank()) + "): ";
    try {  // if a row number is out of range, replace torch's "index out of range in self"
      check_lookup(module, given, &rpc::expect_rows);
      error.message = where + one_line(error.message) + inputs_text(given);
    } catch (const c10::Error& e) {
      error.message = where + e.what_without_backtrace();
    }
    throw base::Exception(std::move(error));
  }
  check_unchanged(*borrowed, options.training);
  read.reset();
  borrowed.end();
  if (!result.defined())
    base::invalid("module " + name_ + " (" + module.name() + ") gave no tensor");
  return rpc::for_rank(agent_, call.caller.rank, result);
}

rpc::NamedTensors SharedModule::state_of(const std::string& prefix, Keep keep) {
  const at::NoGradGuard no_grad;
  std::vector<std::string> names;
  std::vector<at::Tensor> values;
  {
    const autograd::ParameterRead read(agent_);
    for (const auto& [its_name, parameter] : parameters_) {
      names.push_back(prefix + its_name);
      const at::Tensor version = read.version(parameter).detach();
      values.push_back(keep == Keep::kCopies ? version.clone() : version);
    }
    for (const auto& [its_name, buffer] : buffers_) {
      names.push_back(prefix + its_name);
      values.push_back(buffer.clone());
    }
  }
  values = rpc::to_host(values);
  rpc::NamedTensors state;
  for (size_t i = 0; i < names.size(); ++i) state.emplace(names[i], values[i]);
  return state;
}

void SharedModule::load_state(rpc::NamedTensors state) {
  const base::BlockingScope waits;  // load_state() waits for the device and for readers
  const at::NoGradGuard no_grad;
  const autograd::ParameterUpdate update(agent_);
  const auto differ = [this](const std::string& how) {
    base::bad_data("the state is not of module " + name_ + ": " + how);
  };
  rpc::NamedTensors unknown = state;
  for (const auto* items : {&parameters_, &buffers_}) {
    for (const auto& [its_name, tensor] : *items) {
      unknown.erase(its_name);
      const auto it = state.find(its_name);
      if (it == state.end()) differ("it has no " + its_name);
      const std::string given = it->second.defined() ? text_of(it->second) : "undefined";
      if (given != text_of(tensor)) differ(its_name + " is " + given + ", not " + text_of(tensor));
    }
  }
  if (!unknown.empty()) differ("there is no " + unknown.begin()->first);
  for (const auto& [its_name, parameter] : parameters_) {
    update.unshare(parameter);
    at::Tensor(parameter).copy_(state.at(its_name));
  }
  for (auto& [its_name, buffer] : buffers_) {
    buffer = at::empty_like(buffer).copy_(state.at(its_name));
  }
  ++buffers_generation_;
}

void SharedModule::release_versions() {
  std::lock_guard lock(mutex_);
  for (const auto& replica : replicas_) {
    // If `has_rows_`, each forward pass holds a ParameterRead, which excludes updates, so none runs
    // now.
    const bool in_use = (replica->in_forward && !has_rows_) || is_saved(*replica);
    if (!replica->holds_storage || in_use) continue;
    for (size_t i = 0; i < empty_.size(); ++i) point_to(replica->parameters[i], empty_[i]);
    replica->holds_storage = false;
  }
}

}  // namespace distrain::nn

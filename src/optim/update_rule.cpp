#include "distrain/optim/update_rule.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>

#include "distrain/base/error.h"
#include "distrain/rows/kernels.h"

namespace distrain::optim {
namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  base::invalid(c10::str(parts...));
}

// The rows of a sparse gradient on the CPU, grouped for the kernels.
struct CpuRows {
  explicit CpuRows(const at::Tensor& gradient)
      : numbers(gradient._indices().select(0, 0).contiguous()),
        values(gradient._values().contiguous()),
        // Row numbers are not negative, so they may be read as unsigned.
        groups({reinterpret_cast<const uint64_t*>(numbers.const_data_ptr<int64_t>()),
                static_cast<size_t>(numbers.numel())}) {}

  const at::Tensor numbers;  // int64 [n]
  const at::Tensor values;   // [n, the parameter's other dimensions]
  const rows::IdGroups groups;
};

// Returns the sum of the weights of a mean that decays by `beta`, after `step` steps.
double bias_correction(double beta, int64_t step) {
  return 1 - std::pow(beta, static_cast<double>(step));
}

// Returns the parameter's state of this name, at first like `parameter` and full of `at_first`.
at::Tensor& kept(UpdateRule::Loaded& own, const std::string& name, const at::Tensor& parameter,
                 double at_first) {
  at::Tensor& value = own.kept[name];
  if (!value.defined()) value = at::full_like(parameter, at_first);
  return value;
}

// One update of a parameter or, if `of_rows`, of copies of some rows.
struct Update {
  UpdateRule::Loaded& own;  // with this step
  at::Tensor& parameter;
  const at::Tensor& gradient;
  const double lr;
  const bool of_rows;

  at::Tensor& kept(const char* name, double at_first = 0) const {
    return optim::kept(own, name, parameter, at_first);
  }
};

// For each rule: state_of() returns the names of the state's tensors, in the order of
// rows::RowArrays, update() updates a parameter, and row_rule() is UpdateRule::row_rule().
using Names = std::vector<std::string>;

[[noreturn]] void refuse_rows(const OptimizerOptions& options, const char* with = "") {
  refuse(to_fields(options).name, with, " cannot take sparse gradients");
}

// Returns the weight decay that is added to the gradient.
double added_decay(const AdamW&) { return 0; }
double added_decay(const Rprop&) { return 0; }
double added_decay(const auto& others) { return others.weight_decay; }

Names state_of(const Sgd& sgd) { return sgd.momentum == 0 ? Names() : Names{"momentum_buffer"}; }
void update(const Sgd& sgd, const Update& now) {
  at::Tensor direction = now.gradient;
  if (sgd.momentum != 0) {
    at::Tensor& velocity = now.kept("momentum_buffer");
    if (now.own.steps == 1) {
      velocity = direction.clone();
    } else {
      velocity.mul_(sgd.momentum).add_(direction, 1 - sgd.dampening);
    }
    direction = sgd.nesterov ? direction.add(velocity, sgd.momentum) : velocity;
  }
  now.parameter.add_(direction, -now.lr);
}
rows::RowRule row_rule(const Sgd& sgd) {
  if (sgd.momentum != 0) refuse_rows(sgd, " with momentum");
  if (sgd.weight_decay != 0) refuse_rows(sgd, " with weight_decay");
  return {.optimizer = rows::Optimizer::kSgd};
}

Names state_of(const Adagrad&) { return {"sum"}; }
void update(const Adagrad& adagrad, const Update& now) {
  at::Tensor& sum = now.kept("sum", adagrad.initial_accumulator_value);
  sum.addcmul_(now.gradient, now.gradient);
  const double decay = 1 + static_cast<double>(now.own.steps - 1) * adagrad.lr_decay;
  now.parameter.addcdiv_(now.gradient, sum.sqrt().add_(adagrad.eps), -now.lr / decay);
}
rows::RowRule row_rule(const Adagrad& adagrad) {
  if (adagrad.weight_decay != 0) refuse_rows(adagrad, " with weight_decay");
  return {.optimizer = rows::Optimizer::kAdagrad,
          .lr_decay = adagrad.lr_decay,
          .initial_accumulator_value = adagrad.initial_accumulator_value,
          .eps = adagrad.eps};
}

// Adam, and AdamW: they differ in what the weight decay changes.
Names state_of(const auto& adam) {
  if (adam.amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return {"exp_avg", "exp_avg_sq"};
}
void update(const auto& adam, const Update& now) {
  const double shrinking = adam.weight_decay - added_decay(adam);  // of the parameter itself
  if (shrinking != 0) now.parameter.mul_(1 - now.lr * shrinking);
  at::Tensor& first = now.kept("exp_avg");
  first.mul_(adam.beta1).add_(now.gradient, 1 - adam.beta1);
  at::Tensor second = now.kept("exp_avg_sq");
  second.mul_(adam.beta2).addcmul_(now.gradient, now.gradient, 1 - adam.beta2);
  if (adam.amsgrad) {
    at::Tensor& largest = now.kept("max_exp_avg_sq");
    second = at::maximum_out(largest, largest, second);
  }
  const double of_second = std::sqrt(bias_correction(adam.beta2, now.own.steps));
  // SparseAdam adds eps before the bias correction.
  const double eps = now.of_rows ? adam.eps / of_second : adam.eps;
  const at::Tensor scale = second.sqrt().div_(of_second).add_(eps);
  now.parameter.addcdiv_(first, scale, -now.lr / bias_correction(adam.beta1, now.own.steps));
}
rows::RowRule row_rule(const auto& adam) {
  constexpr bool kIsAdamW = std::is_same_v<decltype(adam), const AdamW&>;
  if (adam.amsgrad) refuse_rows(adam, " with amsgrad");
  if (added_decay(adam) != 0) refuse_rows(adam, " with weight_decay");
  return {.optimizer = kIsAdamW ? rows::Optimizer::kAdamW : rows::Optimizer::kAdam,
          .eps = adam.eps,
          .beta1 = adam.beta1,
          .beta2 = adam.beta2,
          .weight_decay = adam.weight_decay};
}

Names state_of(const RmsProp& rmsprop) {
  Names names = {"square_avg"};
  if (rmsprop.centered) names.push_back("grad_avg");
  if (rmsprop.momentum != 0) names.push_back("momentum_buffer");
  return names;
}
void update(const RmsProp& rmsprop, const Update& now) {
  at::Tensor& squares = now.kept("square_avg");
  squares.mul_(rmsprop.alpha).addcmul_(now.gradient, now.gradient, 1 - rmsprop.alpha);
  at::Tensor scale = squares;
  if (rmsprop.centered) {
    at::Tensor& mean = now.kept("grad_avg");
    mean.mul_(rmsprop.alpha).add_(now.gradient, 1 - rmsprop.alpha);
    scale = squares.addcmul(mean, mean, -1);
  }
  scale = scale.sqrt().add_(rmsprop.eps);
  if (rmsprop.momentum != 0) {
    at::Tensor& velocity = now.kept("momentum_buffer");
    velocity.mul_(rmsprop.momentum).addcdiv_(now.gradient, scale);
    now.parameter.add_(velocity, -now.lr);
  } else {
    now.parameter.addcdiv_(now.gradient, scale, -now.lr);
  }
}
rows::RowRule row_rule(const RmsProp& rmsprop) {
  if (rmsprop.weight_decay != 0 || rmsprop.momentum != 0 || rmsprop.centered) {
    refuse_rows(rmsprop, " with weight_decay, momentum or centered");
  }
  return {.optimizer = rows::Optimizer::kRmsProp, .eps = rmsprop.eps, .alpha = rmsprop.alpha};
}

Names state_of(const Adadelta&) { return {"square_avg", "acc_delta"}; }
void update(const Adadelta& adadelta, const Update& now) {
  at::Tensor &squares = now.kept("square_avg"), &deltas = now.kept("acc_delta");
  squares.mul_(adadelta.rho).addcmul_(now.gradient, now.gradient, 1 - adadelta.rho);
  const at::Tensor scale = squares.add(adadelta.eps).sqrt_();
  const at::Tensor delta = deltas.add(adadelta.eps).sqrt_().div_(scale).mul_(now.gradient);
  deltas.mul_(adadelta.rho).addcmul_(delta, delta, 1 - adadelta.rho);
  now.parameter.add_(delta, -now.lr);
}

Names state_of(const Adamax&) { return {"exp_avg", "exp_inf"}; }
void update(const Adamax& adamax, const Update& now) {
  const at::Tensor& first = now.kept("exp_avg").lerp_(now.gradient, 1 - adamax.beta1);
  at::Tensor& norm = now.kept("exp_inf").mul_(adamax.beta2);
  at::maximum_out(norm, norm, now.gradient.abs().add_(adamax.eps));
  now.parameter.addcdiv_(first, norm, -now.lr / bias_correction(adamax.beta1, now.own.steps));
}

Names state_of(const Rprop&) { return {"prev", "step_size"}; }
void update(const Rprop& rprop, const Update& now) {
  at::Tensor &previous = now.kept("prev"), &size = now.kept("step_size", now.lr);
  const at::Tensor product = previous * now.gradient, turned = product < 0;  // another sign
  size =
      at::where(product > 0, size * rprop.eta_plus, at::where(turned, size * rprop.eta_minus, size))
          .clamp_(rprop.min_step, rprop.max_step);
  previous.copy_(now.gradient.masked_fill(turned, 0));
  now.parameter.addcmul_(previous.sign(), size, -1);
}

rows::RowRule row_rule(const Adadelta& adadelta) { refuse_rows(adadelta); }
rows::RowRule row_rule(const Adamax& adamax) { refuse_rows(adamax); }
rows::RowRule row_rule(const Rprop& rprop) { refuse_rows(rprop); }

[[noreturn]] void bad_state(size_t i, const std::string& what) {
  base::bad_data("the optimizer's state of parameter " + std::to_string(i) + ": " + what);
}

}  // namespace

UpdateRule::UpdateRule(const OptimizerOptions& options)
    : options_(options),
      names_(std::visit([](const auto& chosen) { return state_of(chosen); }, options)) {
  validate(options);
}

ParameterState UpdateRule::state(size_t i) const {
  ParameterState state = own_.contains(i) ? own_.at(i).kept : ParameterState();
  state["step"] = at::full({}, step_count(i), at::kLong);
  return state;
}

UpdateRule::Loaded UpdateRule::load(size_t i, const at::Tensor& parameter,
                                    const ParameterState& state) const {
  int64_t steps = state.empty() ? 0 : 1;
  if (const auto found = state.find("step"); found != state.end()) {
    const at::Tensor& step = found->second;
    const double value = step.defined() && step.numel() == 1 ? step.item<double>() : -1;
    const bool is_count = value >= 0 && value < 1e15 && value == std::floor(value);
    if (!is_count) bad_state(i, "step is no whole number from 0");
    steps = static_cast<int64_t>(value);  // torch.optim has float steps
  } else if (names_ != Names{"momentum_buffer"} && !names_.empty()) {
    bad_state(i, "no step");  // only torch.optim.SGD has none
  }
  ParameterState kept;
  for (const std::string& name : names_) {
    const auto it = state.find(name);
    if (it == state.end()) continue;
    const at::Tensor& value = it->second;
    if (!value.defined() || value.sizes() != parameter.sizes() ||
        value.scalar_type() != parameter.scalar_type()) {
      bad_state(i, name + " is not of the parameter's shape and dtype");
    }
    // Where the parameter is and laid out as it is, wherever the state was read.
    kept[name] = at::empty_like(parameter).copy_(value);
  }
  if (kept.size() + state.count("step") != state.size()) bad_state(i, "of another optimizer");
  if (steps > 0 && kept.size() != names_.size()) bad_state(i, "incomplete");
  return {std::move(kept), steps};
}

// Torch adds sparse to dense, not dense to sparse.
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() ? a : b;
  return a.is_sparse() && !b.is_sparse() ? b + a : a + b;
}

double clip_scale(double norm_squared, double max_norm) {
  constexpr double kEpsilon = 1e-6;
  if (!std::isfinite(norm_squared)) {
    throw base::Exception(base::ErrorKind::kNotFinite,
                          "the norm of the gradients is not finite: they cannot be clipped");
  }
  return std::min(1.0, max_norm / (std::sqrt(norm_squared) + kEpsilon));
}

rpc::NamedTensors flatten(const std::vector<std::string>& parameters,
                          const std::vector<ParameterState>& states) {
  rpc::NamedTensors flat;
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (const auto& [name, value] : states.at(i)) flat[parameters[i] + "." + name] = value;
  }
  return flat;
}

std::vector<ParameterState> unflatten(const std::vector<std::string>& parameters,
                                      const rpc::NamedTensors& flat) {
  std::vector<ParameterState> states(parameters.size());
  for (const auto& [key, value] : flat) {
    const size_t dot = key.rfind('.');
    const auto it = std::find(parameters.begin(), parameters.end(), key.substr(0, dot));
    if (dot == std::string::npos || it == parameters.end()) {
      base::bad_data("the optimizer's state has " + key + ", which is of no parameter");
    }
    states[static_cast<size_t>(it - parameters.begin())][key.substr(dot + 1)] = value;
  }
  return states;
}

double norm_squared(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  double sum = 0;
  std::map<c10::DeviceIndex, at::Tensor> sums;  // on devices: the host waits once for each
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    if (gradient.is_sparse() && gradient.sparse_dim() == 1 && gradient.is_cpu() &&
        gradient.scalar_type() == at::kFloat) {
      const CpuRows sparse(gradient);
      const auto dim =
          static_cast<size_t>(sparse.values.numel() / std::max<int64_t>(sparse.numbers.numel(), 1));
      sum += rows::gradient_norm_squared(
          dim, sparse.groups, {sparse.values.const_data_ptr<float>()}, 0, sparse.groups.size());
      continue;
    }
    const at::Tensor values = gradient.is_sparse() ? gradient.coalesce()._values() : gradient;
    if (values.numel() == 0) continue;
    if (values.is_cpu()) {
      const double norm = values.norm().item<double>();
      sum += norm * norm;
    } else {
      const at::Tensor squared = values.norm().to(at::kDouble).square();
      at::Tensor& there = sums[values.device().index()];
      there = there.defined() ? there + squared : squared;
    }
  }
  for (const auto& [device, there] : sums) sum += there.item<double>();
  return sum;
}

void UpdateRule::check(size_t i, const at::Tensor& parameter, const at::Tensor& gradient) const {
  if (!parameter.defined()) refuse("parameter ", i, " is an undefined tensor");
  if (!gradient.defined()) refuse("parameter ", i, " has no gradient");
  if (!parameter.is_floating_point() || parameter.layout() != at::kStrided) {
    refuse("parameter ", i, " is not a dense floating point tensor");
  }
  const auto check_equal = [i](const char* is, const auto& its, const char* own, const auto& of) {
    if (its != of) refuse("the gradient of parameter ", i, is, its, ", the parameter ", own, of);
  };
  check_equal(" has shape ", gradient.sizes(), "", parameter.sizes());
  check_equal(" is ", gradient.scalar_type(), "", parameter.scalar_type());
  check_equal(" is on ", gradient.device(), "on ", parameter.device());
  if (gradient.layout() != at::kStrided &&
      (gradient.layout() != at::kSparse || gradient.sparse_dim() != 1)) {
    refuse("the gradient of parameter ", i, " is neither dense nor sparse by rows");
  }
  if (!gradient.is_sparse()) return;
  row_rule();  // throws if the rule cannot update rows
  if (gradient.is_cpu() && gradient._nnz() > 0) {
    const auto [least, greatest] = at::aminmax(gradient._indices());
    if (least.item<int64_t>() < 0 || greatest.item<int64_t>() >= parameter.size(0)) {
      refuse("the gradient of parameter ", i, " is for a row outside 0 to ", parameter.size(0) - 1);
    }
  }
}

rows::RowRule UpdateRule::row_rule() const {
  return std::visit([](const auto& chosen) { return optim::row_rule(chosen); }, options_);
}

// Updates the rows of a parameter on the CPU with the fused kernels. Returns false if they cannot:
// on a device, and for types of half precision.
bool UpdateRule::apply_on_cpu(Loaded& own, const at::Tensor& parameter, const at::Tensor& gradient,
                              double scale) const {
  constexpr int64_t kRowsPerTask = 1024;
  const at::ScalarType type = parameter.scalar_type();
  if (!parameter.is_cpu() || !parameter.is_contiguous() ||
      (type != at::kFloat && type != at::kDouble)) {
    return false;
  }
  const CpuRows sparse(gradient);
  const rows::RowRule rule = row_rule();
  const auto dim = static_cast<size_t>(parameter.numel() / std::max<int64_t>(parameter.size(0), 1));
  const auto update = [&]<class T>(T) {
    rows::RowArrays<T> arrays{.values = parameter.mutable_data_ptr<T>()};
    size_t state = 0;
    for (const std::string& name : names_) {
      at::Tensor& value = kept(own, name, parameter, rule.initial_accumulator_value);
      value = value.contiguous();
      arrays.states[state++] = value.mutable_data_ptr<T>();
    }
    const rows::Gradients<T> gradients{sparse.values.const_data_ptr<T>()};
    at::parallel_for(0, static_cast<int64_t>(sparse.groups.size()), kRowsPerTask,
                     [&](int64_t first, int64_t last) {
                       rows::update_arrays(arrays, dim, rule, {lr(), own.steps, scale},
                                           sparse.groups, gradients, static_cast<size_t>(first),
                                           static_cast<size_t>(last));
                     });
  };
  type == at::kFloat ? update(0.0F) : update(0.0);
  parameter.unsafeGetTensorImpl()->bump_version();  // as torch's in-place operations
  return true;
}

void UpdateRule::apply_by_torch(Loaded& own, at::Tensor& parameter, const at::Tensor& gradient,
                                bool of_rows) const {
  std::visit(
      [&](const auto& chosen) {
        const double decay = added_decay(chosen);
        update(chosen, {own, parameter, decay != 0 ? gradient.add(parameter, decay) : gradient,
                        lr(), of_rows});
      },
      options_);
}

// Updates copies of the rows and of their state as a dense parameter, and copies them back.
void UpdateRule::apply_to_copies(Loaded& own, at::Tensor& parameter,
                                 const at::Tensor& gradient) const {
  const at::Tensor sum = gradient.coalesce();  // has each row once
  const at::Tensor numbers = sum._indices().select(0, 0);
  Loaded copies{{}, own.steps};
  for (const std::string& name : names_) {
    copies.kept[name] =
        kept(own, name, parameter, row_rule().initial_accumulator_value).index_select(0, numbers);
  }
  at::Tensor rows = parameter.index_select(0, numbers);
  apply_by_torch(copies, rows, sum._values(), true);
  parameter.index_copy_(0, numbers, rows);
  for (auto& [name, value] : own.kept) value.index_copy_(0, numbers, copies.kept[name]);
}

void UpdateRule::apply(size_t i, at::Tensor& parameter, const at::Tensor& gradient, double scale) {
  check(i, parameter, gradient);
  const at::NoGradGuard no_grad;
  Loaded& own = own_[i];
  ++own.steps;
  if (gradient.is_sparse() && apply_on_cpu(own, parameter, gradient, scale)) return;
  const at::Tensor scaled = scale == 1 ? gradient : gradient * scale;
  if (gradient.is_sparse()) return apply_to_copies(own, parameter, scaled);
  apply_by_torch(own, parameter, scaled, false);
}

}  // namespace distrain::optim

#include "distrain/optim/update_rule.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include "distrain/base/error.h"
#include "distrain/rows/kernels.h"
#include "validate.h"

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

// Returns the weight decay that is added to the gradient.
double added_decay(const AdamW&) { return 0; }
double added_decay(const Rprop&) { return 0; }
double added_decay(const auto& others) { return others.weight_decay; }

// Returns the names of the state's tensors. `adam` may be AdamW, too.
using Names = std::vector<std::string>;
Names state_of(const Sgd& sgd) { return sgd.momentum == 0 ? Names() : Names{"momentum_buffer"}; }
Names state_of(const Adagrad&) { return {"sum"}; }
Names state_of(const auto& adam) {
  if (adam.amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return {"exp_avg", "exp_avg_sq"};
}
Names state_of(const RmsProp& rmsprop) {
  Names names = {"square_avg"};
  if (rmsprop.centered) names.push_back("grad_avg");
  if (rmsprop.momentum != 0) names.push_back("momentum_buffer");
  return names;
}
Names state_of(const Adadelta&) { return {"square_avg", "acc_delta"}; }
Names state_of(const Adamax&) { return {"exp_avg", "exp_inf"}; }
Names state_of(const Rprop&) { return {"prev", "step_size"}; }

template <class Options>
class RuleWith : public UpdateRule {
 public:
  explicit RuleWith(const Options& options)
      : UpdateRule(options.lr, added_decay(options), state_of(options)), options_(options) {}

  rows::RowRule row_rule() const override { refuse_rows(); }

 protected:
  [[noreturn]] void refuse_rows(const char* with = "") const {
    refuse(to_fields(options_).name, with, " cannot take sparse gradients");
  }
  const Options options_;
};

class SgdRule final : public RuleWith<Sgd> {
  using RuleWith::RuleWith;

  void update(size_t i, int64_t step, at::Tensor& parameter, const at::Tensor& gradient,
              bool) override {
    at::Tensor direction = gradient;
    if (options_.momentum != 0) {
      at::Tensor& velocity = kept(i, "momentum_buffer", parameter);
      if (step == 1) {
        velocity = direction.clone();
      } else {
        velocity.mul_(options_.momentum).add_(direction, 1 - options_.dampening);
      }
      direction = options_.nesterov ? direction.add(velocity, options_.momentum) : velocity;
    }
    parameter.add_(direction, -lr());
  }

  rows::RowRule row_rule() const override {
    if (options_.momentum != 0) refuse_rows(" with momentum");
    if (options_.weight_decay != 0) refuse_rows(" with weight_decay");
    return {.optimizer = rows::Optimizer::kSgd};
  }
};

class AdagradRule final : public RuleWith<Adagrad> {
  using RuleWith::RuleWith;

  void update(size_t i, int64_t step, at::Tensor& parameter, const at::Tensor& gradient,
              bool) override {
    at::Tensor& sum = kept(i, "sum", parameter, options_.initial_accumulator_value);
    sum.addcmul_(gradient, gradient);
    const double decay = 1 + static_cast<double>(step - 1) * options_.lr_decay;
    parameter.addcdiv_(gradient, sum.sqrt().add_(options_.eps), -lr() / decay);
  }

  rows::RowRule row_rule() const override {
    if (options_.weight_decay != 0) refuse_rows(" with weight_decay");
    return {.optimizer = rows::Optimizer::kAdagrad,
            .lr_decay = options_.lr_decay,
            .initial_accumulator_value = options_.initial_accumulator_value,
            .eps = options_.eps};
  }
};

// Adam, and AdamW: they differ in what the weight decay changes.
template <class Options>
class AdamRule final : public RuleWith<Options> {
  using Base = RuleWith<Options>;
  using Base::Base, Base::kept, Base::lr, Base::options_, Base::refuse_rows;
  static constexpr bool kIsAdamW = std::is_same_v<Options, AdamW>;

  void update(size_t i, int64_t step, at::Tensor& parameter, const at::Tensor& gradient,
              bool of_rows) override {
    if (kIsAdamW && options_.weight_decay != 0) parameter.mul_(1 - lr() * options_.weight_decay);
    at::Tensor& first = kept(i, "exp_avg", parameter);
    first.mul_(options_.beta1).add_(gradient, 1 - options_.beta1);
    at::Tensor second = kept(i, "exp_avg_sq", parameter);
    second.mul_(options_.beta2).addcmul_(gradient, gradient, 1 - options_.beta2);
    if (options_.amsgrad) {
      at::Tensor& largest = kept(i, "max_exp_avg_sq", parameter);
      second = at::maximum_out(largest, largest, second);
    }
    const double of_second = std::sqrt(bias_correction(options_.beta2, step));
    // SparseAdam adds eps before the bias correction.
    const double eps = of_rows ? options_.eps / of_second : options_.eps;
    const at::Tensor scale = second.sqrt().div_(of_second).add_(eps);
    parameter.addcdiv_(first, scale, -lr() / bias_correction(options_.beta1, step));
  }

  rows::RowRule row_rule() const override {
    if (options_.amsgrad) refuse_rows(" with amsgrad");
    if (!kIsAdamW && options_.weight_decay != 0) refuse_rows(" with weight_decay");
    return {.optimizer = kIsAdamW ? rows::Optimizer::kAdamW : rows::Optimizer::kAdam,
            .eps = options_.eps,
            .beta1 = options_.beta1,
            .beta2 = options_.beta2,
            .weight_decay = options_.weight_decay};
  }
};

class RmsPropRule final : public RuleWith<RmsProp> {
  using RuleWith::RuleWith;

  void update(size_t i, int64_t, at::Tensor& parameter, const at::Tensor& gradient, bool) override {
    at::Tensor& squares = kept(i, "square_avg", parameter);
    squares.mul_(options_.alpha).addcmul_(gradient, gradient, 1 - options_.alpha);
    at::Tensor scale = squares;
    if (options_.centered) {
      at::Tensor& mean = kept(i, "grad_avg", parameter);
      mean.mul_(options_.alpha).add_(gradient, 1 - options_.alpha);
      scale = squares.addcmul(mean, mean, -1);
    }
    scale = scale.sqrt().add_(options_.eps);
    if (options_.momentum != 0) {
      at::Tensor& velocity = kept(i, "momentum_buffer", parameter);
      velocity.mul_(options_.momentum).addcdiv_(gradient, scale);
      parameter.add_(velocity, -lr());
    } else {
      parameter.addcdiv_(gradient, scale, -lr());
    }
  }

  rows::RowRule row_rule() const override {
    if (options_.weight_decay != 0 || options_.momentum != 0 || options_.centered) {
      refuse_rows(" with weight_decay, momentum or centered");
    }
    return {.optimizer = rows::Optimizer::kRmsProp, .eps = options_.eps, .alpha = options_.alpha};
  }
};

class AdadeltaRule final : public RuleWith<Adadelta> {
  using RuleWith::RuleWith;

  void update(size_t i, int64_t, at::Tensor& parameter, const at::Tensor& gradient, bool) override {
    at::Tensor& squares = kept(i, "square_avg", parameter);
    at::Tensor& deltas = kept(i, "acc_delta", parameter);
    squares.mul_(options_.rho).addcmul_(gradient, gradient, 1 - options_.rho);
    const at::Tensor scale = squares.add(options_.eps).sqrt_();
    const at::Tensor delta = deltas.add(options_.eps).sqrt_().div_(scale).mul_(gradient);
    deltas.mul_(options_.rho).addcmul_(delta, delta, 1 - options_.rho);
    parameter.add_(delta, -lr());
  }
};

class AdamaxRule final : public RuleWith<Adamax> {
  using RuleWith::RuleWith;

  void update(size_t i, int64_t step, at::Tensor& parameter, const at::Tensor& gradient,
              bool) override {
    const at::Tensor& first = kept(i, "exp_avg", parameter).lerp_(gradient, 1 - options_.beta1);
    at::Tensor& norm = kept(i, "exp_inf", parameter).mul_(options_.beta2);
    at::maximum_out(norm, norm, gradient.abs().add_(options_.eps));
    parameter.addcdiv_(first, norm, -lr() / bias_correction(options_.beta1, step));
  }
};

class RpropRule final : public RuleWith<Rprop> {
  using RuleWith::RuleWith;

  void update(size_t i, int64_t, at::Tensor& parameter, const at::Tensor& gradient, bool) override {
    at::Tensor& previous = kept(i, "prev", parameter);
    at::Tensor& size = kept(i, "step_size", parameter, lr());
    const at::Tensor product = previous * gradient, turned = product < 0;  // the sign has changed
    size = at::where(product > 0, size * options_.eta_plus,
                     at::where(turned, size * options_.eta_minus, size))
               .clamp_(options_.min_step, options_.max_step);
    previous.copy_(gradient.masked_fill(turned, 0));
    parameter.addcmul_(previous.sign(), size, -1);
  }
};

[[noreturn]] void bad_state(size_t i, const std::string& what) {
  base::bad_data("the optimizer's state of parameter " + std::to_string(i) + ": " + what);
}

}  // namespace

UpdateRule::Loaded& UpdateRule::own(size_t i) {
  if (own_.size() <= i) own_.resize(i + 1);
  return own_[i];
}

at::Tensor& UpdateRule::kept(size_t i, const char* name, const at::Tensor& parameter,
                             double at_first) {
  at::Tensor& value = own(i).kept[name];
  if (!value.defined()) value = at::full_like(parameter, at_first);
  return value;
}

void UpdateRule::set_lr_factor(double factor) {
  check_lr_factor(factor);
  lr_factor_ = factor;
}

ParameterState UpdateRule::state(size_t i) const {
  ParameterState state = i < own_.size() ? own_[i].kept : ParameterState();
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

void UpdateRule::adopt(size_t i, Loaded loaded) { own(i) = std::move(loaded); }

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
      sum += rows::gradient_norm_squared<float>(
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

// Updates the rows of a parameter on the CPU with the fused kernels. Returns false if they cannot:
// on a device, and for types of half precision.
bool UpdateRule::apply_on_cpu(size_t i, int64_t step, const at::Tensor& parameter,
                              const at::Tensor& gradient, double scale) {
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
      at::Tensor& value = kept(i, name.c_str(), parameter, rule.initial_accumulator_value);
      value = value.contiguous();
      arrays.states[state++] = value.mutable_data_ptr<T>();
    }
    const rows::Gradients<T> gradients{sparse.values.const_data_ptr<T>()};
    at::parallel_for(0, static_cast<int64_t>(sparse.groups.size()), kRowsPerTask,
                     [&](int64_t first, int64_t last) {
                       rows::update_arrays(arrays, dim, rule, {lr(), step, scale}, sparse.groups,
                                           gradients, static_cast<size_t>(first),
                                           static_cast<size_t>(last));
                     });
  };
  type == at::kFloat ? update(0.0F) : update(0.0);
  parameter.unsafeGetTensorImpl()->bump_version();  // as torch's in-place operations
  return true;
}

// Updates copies of the rows and of their state as a dense parameter, and copies them back.
void UpdateRule::apply_to_copies(size_t i, int64_t step, at::Tensor& parameter,
                                 const at::Tensor& gradient) {
  const at::Tensor sum = gradient.coalesce();  // has each row once
  const at::Tensor numbers = sum._indices().select(0, 0);
  ParameterState whole, copies;
  for (const std::string& name : names_) {
    whole[name] = kept(i, name.c_str(), parameter, row_rule().initial_accumulator_value);
    copies[name] = whole[name].index_select(0, numbers);
  }
  at::Tensor rows = parameter.index_select(0, numbers);
  own(i).kept = copies;
  const auto restored = c10::make_scope_exit([&] { own(i).kept = whole; });
  update(i, step, rows, sum._values(), true);
  parameter.index_copy_(0, numbers, rows);
  for (auto& [name, value] : whole) value.index_copy_(0, numbers, own(i).kept[name]);
}

void UpdateRule::apply(size_t i, at::Tensor& parameter, const at::Tensor& gradient, double scale) {
  check(i, parameter, gradient);
  const at::NoGradGuard no_grad;
  const int64_t step = ++own(i).steps;
  if (gradient.is_sparse() && apply_on_cpu(i, step, parameter, gradient, scale)) return;
  const at::Tensor scaled = scale == 1 ? gradient : gradient * scale;
  if (gradient.is_sparse()) return apply_to_copies(i, step, parameter, scaled);
  update(i, step, parameter, weight_decay_ != 0 ? scaled.add(parameter, weight_decay_) : scaled,
         false);
}

std::unique_ptr<UpdateRule> make_update_rule(const OptimizerOptions& options) {
  validate(options);
  if (const auto* o = std::get_if<Sgd>(&options)) return std::make_unique<SgdRule>(*o);
  if (const auto* o = std::get_if<Adagrad>(&options)) return std::make_unique<AdagradRule>(*o);
  if (const auto* o = std::get_if<AdamW>(&options)) return std::make_unique<AdamRule<AdamW>>(*o);
  if (const auto* o = std::get_if<RmsProp>(&options)) return std::make_unique<RmsPropRule>(*o);
  if (const auto* o = std::get_if<Adadelta>(&options)) return std::make_unique<AdadeltaRule>(*o);
  if (const auto* o = std::get_if<Adamax>(&options)) return std::make_unique<AdamaxRule>(*o);
  if (const auto* o = std::get_if<Rprop>(&options)) return std::make_unique<RpropRule>(*o);
  return std::make_unique<AdamRule<Adam>>(std::get<Adam>(options));
}

}  // namespace distrain::optim

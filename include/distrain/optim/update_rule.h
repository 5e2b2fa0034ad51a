#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/optim/learning_rate_schedule.h"
#include "distrain/rows/rule.h"
#include "distrain/rpc/named_tensors.h"

namespace distrain::optim {

// With sparse gradients the rules update only the rows of a step and their state, as rows::RowRule
// says, and lack some options: UpdateRule::row_rule().

/// Options of torch.optim.SGD. Sparse gradients: plain SGD only.
struct Sgd {
  double lr = 1e-3;
  double momentum = 0;
  double weight_decay = 0;
  double dampening = 0;
  bool nesterov = false;  ///< wants momentum and no dampening
};

/// Options of torch.optim.Adagrad. Sparse gradients: no weight decay.
struct Adagrad {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
};

/// Options of torch.optim.Adam; with sparse gradients it is torch.optim.SparseAdam (the moments of
/// a row decay only when the row has a gradient): no weight decay, no amsgrad.
struct Adam {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  ///< added to the gradient (L2), as Adam's and not AdamW's
  bool amsgrad = false;
};

/// Options of torch.optim.AdamW: as Adam, but each update first shrinks the parameter itself by lr
/// * weight_decay (Loshchilov and Hutter, 2019). Sparse gradients: no amsgrad.
struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
};

/// Options of torch.optim.RMSprop. Sparse gradients: no weight decay, no momentum, not centered.
struct RmsProp {
  double lr = 1e-2;
  double alpha = 0.99;  ///< by which the mean of the squares decays
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;  ///< divides by the gradients' deviation from their mean
};

/// Options of torch.optim.Adadelta. No sparse gradients, as with Adamax and Rprop.
struct Adadelta {
  double lr = 1;
  double rho = 0.9;  ///< by which the means of the squares decay
  double eps = 1e-6;
  double weight_decay = 0;
};

/// Options of torch.optim.Adamax.
struct Adamax {
  double lr = 2e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
};

/// Options of torch.optim.Rprop.
struct Rprop {
  double lr = 1e-2;  ///< the first step size, from which later ones follow, also with a schedule
  double eta_minus = 0.5, eta_plus = 1.2;
  double min_step = 1e-6, max_step = 50;
};

using OptimizerOptions = std::variant<Sgd, Adagrad, Adam, AdamW, RmsProp, Adadelta, Adamax, Rprop>;

/// An optimizer that keeps one sum of squares for each row of a table of the layer `table`. It is
/// Adagrad for all other parameters.
inline constexpr const char* kRowwiseAdagrad = "rowwise-adagrad";

/// OptimizerOptions as plain data, for the command line and the wire.
struct OptimizerFields {
  std::string name;  ///< in small letters, as "rmsprop"; from_fields() takes kRowwiseAdagrad
  std::map<std::string, double> values;  ///< by the names above; flags are 0 or 1

  bool operator==(const OptimizerFields&) const = default;
  static constexpr auto kFields = std::tuple(&OptimizerFields::name, &OptimizerFields::values);
};

/// An optimizer's state of one parameter, by PyTorch's names: `step` (int64 scalar, on the CPU),
/// `momentum_buffer`, `sum`, `exp_avg`, `exp_avg_sq`, `max_exp_avg_sq`, `square_avg`, `grad_avg`,
/// `acc_delta`, `exp_inf`, `prev`, `step_size`.
using ParameterState = rpc::NamedTensors;

/// Name the states' tensors "<parameter>.<name>", and back (`bad_data` for unknown parameters).
rpc::NamedTensors flatten(const std::vector<std::string>& parameters,
                          const std::vector<ParameterState>& states);
std::vector<ParameterState> unflatten(const std::vector<std::string>& parameters,
                                      const rpc::NamedTensors& flat);

/// Returns the squared L2 norm of all gradients. Repeated rows of a sparse gradient are summed.
double norm_squared(const std::vector<at::Tensor>& gradients);

/// Returns the factor, at most 1, that limits gradients of this squared norm to `max_norm`. Throws
/// `not_finite`, as torch.nn.utils.clip_grad_norm_ with error_if_nonfinite.
double clip_scale(double norm_squared, double max_norm);

/// Returns the sum of two gradients, each dense, sparse or undefined (no gradient).
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b);

OptimizerFields to_fields(const OptimizerOptions& options);

/// Throws `invalid` if an option is out of range.
void validate(const OptimizerOptions& options);
/// Throws `invalid` if `factor` is negative or not finite.
void check_lr_factor(double factor);

/// Other fields keep their defaults. Throws `invalid` for unknown names and values out of range.
OptimizerOptions from_fields(const OptimizerFields& fields);

/// Updates parameters in place and owns their state. Parameters are known by their index, so a
/// parameter's tensor may be replaced between two updates. Not thread-safe.
class UpdateRule {
 public:
  /// Throws as validate().
  explicit UpdateRule(const OptimizerOptions& options);

  /// Updates `parameter` by `gradient` times `scale`: of the same shape, floating dtype and device,
  /// dense or sparse COO with one sparse dimension (rows; repeated rows count summed). A sparse
  /// gradient touches its rows and their state only; one without rows counts as a step. Throws as
  /// check().
  void apply(size_t i, at::Tensor& parameter, const at::Tensor& gradient, double scale = 1);

  /// Throws `invalid` for a gradient that apply() would not take.
  void check(size_t i, const at::Tensor& parameter, const at::Tensor& gradient) const;

  /// Returns the number of updates of parameter `i`.
  int64_t step_count(size_t i) const { return own_.contains(i) ? own_.at(i).steps : 0; }

  /// Sets the learning rate of the next updates to the configured one times `factor`. Throws as
  /// check_lr_factor().
  void set_lr_factor(double factor) {
    check_lr_factor(factor);
    lr_factor_ = factor;
  }

  /// Returns the tensors of parameter `i`'s state themselves, which the next update changes.
  ParameterState state(size_t i) const;
  /// Returns a copy of `state`, which may be that of torch.optim's `state_dict()["state"][i]`, on
  /// the parameter's device, for adopt(). Throws `bad_data` if it is of another rule or shape.
  /// Changes nothing, so that all parameters are loaded or none.
  struct Loaded {
    ParameterState kept;
    int64_t steps = 0;
  };
  Loaded load(size_t i, const at::Tensor& parameter, const ParameterState& state) const;
  void adopt(size_t i, Loaded loaded) { own_[i] = std::move(loaded); }

  /// Returns the rule that updates rows, also by sparse gradients. Throws `invalid` for options
  /// that such updates lack.
  rows::RowRule row_rule() const;

 private:
  double lr() const {
    return std::visit([](const auto& chosen) { return chosen.lr; }, options_) * lr_factor_;
  }
  bool apply_on_cpu(Loaded& own, const at::Tensor& parameter, const at::Tensor& gradient,
                    double scale) const;
  void apply_to_copies(Loaded& own, at::Tensor& parameter, const at::Tensor& gradient) const;
  void apply_by_torch(Loaded& own, at::Tensor& parameter, const at::Tensor& gradient,
                      bool of_rows) const;

  const OptimizerOptions options_;
  const std::vector<std::string> names_;  // of the state's tensors
  double lr_factor_ = 1;
  std::map<size_t, Loaded> own_;  // by parameter
};

/// A job's optimizer, learning rate schedule and gradient clipping.
struct Rule {
  OptimizerOptions options;
  LearningRateSchedule schedule;  ///< see DistributedOptimizer::set_lr_factor
  double max_norm = 0;  ///< maximum gradient norm, see DistributedOptimizer::step; 0: no clipping
};

/// A Rule as command-line options.
struct RuleText {
  std::string optimizer = "sgd";  ///< OptimizerFields::name
  double lr = 0.01;
  double momentum = 0;                   ///< sgd and rmsprop only; others accept only 0
  std::optional<double> weight_decay;    ///< none: the optimizer's default
  std::string lr_schedule = "constant";  ///< LearningRateSchedule::parse
  double clip = 0;                       ///< Rule::max_norm
};

/// Parses and checks a rule. Throws `invalid` with a one-line message if `text` is not valid.
Rule make_rule(const RuleText& text);

}  // namespace distrain::optim

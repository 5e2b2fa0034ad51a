#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "distrain/base/error.h"
#include "distrain/optim/update_rule.h"

namespace distrain::optim {
namespace {

// Names of the alternatives of OptimizerOptions, in their order.
constexpr std::array kNames = {"sgd",     "adagrad",  "adam",   "adamw",
                               "rmsprop", "adadelta", "adamax", "rprop"};
constexpr OptimizerOptions kDefaults[] = {Sgd(),     Adagrad(),  Adam(),   AdamW(),
                                          RmsProp(), Adadelta(), Adamax(), Rprop()};

// Calls `visit(name, value)` for each field of `options`, which may be const.
template <class O, class F>
void visit_fields(O& options, F visit) {
  visit("lr", options.lr);
  if constexpr (requires { options.weight_decay; }) visit("weight_decay", options.weight_decay);
  if constexpr (requires { options.momentum; }) visit("momentum", options.momentum);
  if constexpr (requires { options.dampening; }) visit("dampening", options.dampening);
  if constexpr (requires { options.nesterov; }) visit("nesterov", options.nesterov);
  if constexpr (requires { options.lr_decay; }) visit("lr_decay", options.lr_decay);
  if constexpr (requires { options.initial_accumulator_value; })
    visit("initial_accumulator_value", options.initial_accumulator_value);
  if constexpr (requires { options.eps; }) visit("eps", options.eps);
  if constexpr (requires { options.alpha; }) visit("alpha", options.alpha);
  if constexpr (requires { options.centered; }) visit("centered", options.centered);
  if constexpr (requires { options.beta1; }) visit("beta1", options.beta1);
  if constexpr (requires { options.beta2; }) visit("beta2", options.beta2);
  if constexpr (requires { options.amsgrad; }) visit("amsgrad", options.amsgrad);
  if constexpr (requires { options.rho; }) visit("rho", options.rho);
  if constexpr (requires { options.eta_minus; }) visit("eta_minus", options.eta_minus);
  if constexpr (requires { options.eta_plus; }) visit("eta_plus", options.eta_plus);
  if constexpr (requires { options.min_step; }) visit("min_step", options.min_step);
  if constexpr (requires { options.max_step; }) visit("max_step", options.max_step);
}

}  // namespace

OptimizerFields to_fields(const OptimizerOptions& options) {
  OptimizerFields fields{std::string(kNames[options.index()]), {}};
  std::visit(
      [&](const auto& chosen) {
        visit_fields(chosen, [&](const char* field, auto value) {
          fields.values[field] = static_cast<double>(value);
        });
      },
      options);
  return fields;
}

void validate(const OptimizerOptions& options) {
  const OptimizerFields fields = to_fields(options);
  for (const auto& [field, value] : fields.values) {
    const auto is = [&field = field](auto... names) { return ((field == names) || ...); };
    const bool good = std::isfinite(value) && (value >= 0 || is("dampening")) &&  // as in torch
                      (value < 1 || !is("beta1", "beta2", "alpha", "eta_minus")) &&
                      (value <= 1 || !is("rho")) && (value > 1 || !is("eta_plus"));
    if (!good) base::invalid(fields.name + ": " + field + " cannot be " + std::to_string(value));
  }
  const Sgd* const sgd = std::get_if<Sgd>(&options);
  if (sgd && sgd->nesterov && (sgd->momentum <= 0 || sgd->dampening != 0)) {
    base::invalid("sgd: nesterov wants a momentum above 0 and no dampening");
  }
}

OptimizerOptions from_fields(const OptimizerFields& fields) {
  const std::string name = fields.name == kRowwiseAdagrad ? "adagrad" : fields.name;
  const auto known = std::ranges::find(kNames, name);
  if (known == std::end(kNames)) {
    base::invalid("no optimizer '" + fields.name + "': " + c10::Join(", ", kNames));
  }
  OptimizerOptions options = kDefaults[known - std::begin(kNames)];
  std::map<std::string, double> values = fields.values;
  std::visit(
      [&](auto& chosen) {
        visit_fields(chosen, [&](const char* field, auto& value) {
          const auto given = values.extract(field);
          if (given) value = static_cast<std::remove_reference_t<decltype(value)>>(given.mapped());
        });
      },
      options);
  if (!values.empty()) {
    base::invalid(fields.name + " has no option '" + values.begin()->first + "'");
  }
  validate(options);
  return options;
}

void check_lr_factor(double factor) {
  if (std::isfinite(factor) && factor >= 0) return;
  base::invalid("a learning rate cannot be multiplied by " + std::to_string(factor));
}

Rule make_rule(const RuleText& text) {
  OptimizerFields fields{text.optimizer, {{"lr", text.lr}}};
  if (text.weight_decay) fields.values["weight_decay"] = *text.weight_decay;
  // Optimizers without momentum do not have this field, and accept only 0 for the option.
  if (text.momentum != 0) fields.values["momentum"] = text.momentum;
  if (!std::isfinite(text.clip) || text.clip < 0) {
    base::invalid("gradients cannot be clipped to a norm of " + std::to_string(text.clip));
  }
  return {from_fields(fields), LearningRateSchedule::parse(text.lr_schedule), text.clip};
}

}  // namespace distrain::optim

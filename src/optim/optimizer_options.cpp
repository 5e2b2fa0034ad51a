#include <cmath>
#include <string>
#include <type_traits>

#include "distrain/base/error.h"
#include "validate.h"

namespace distrain::optim {
namespace {

using base::invalid;

// Names of the alternatives of OptimizerOptions, in their order.
constexpr const char* kNames[] = {"sgd", "adagrad", "adam", "adamw", "rmsprop"};

// Calls `visit(name, value)` for each field of `options`, which may be const.
template <class O, class F>
void visit_fields(O& options, F visit) {
  using Options = std::remove_const_t<O>;
  visit("lr", options.lr);
  visit("weight_decay", options.weight_decay);
  if constexpr (std::is_same_v<Options, Sgd>) {
    visit("momentum", options.momentum);
    visit("dampening", options.dampening);
    visit("nesterov", options.nesterov);
  } else if constexpr (std::is_same_v<Options, Adagrad>) {
    visit("lr_decay", options.lr_decay);
    visit("initial_accumulator_value", options.initial_accumulator_value);
    visit("eps", options.eps);
  } else if constexpr (std::is_same_v<Options, RmsProp>) {
    visit("alpha", options.alpha);
    visit("eps", options.eps);
    visit("momentum", options.momentum);
    visit("centered", options.centered);
  } else {
    visit("beta1", options.beta1);
    visit("beta2", options.beta2);
    visit("eps", options.eps);
    visit("amsgrad", options.amsgrad);
  }
}

template <class Options>
OptimizerOptions read_fields(OptimizerFields fields) {
  Options options;
  visit_fields(options, [&](const char* field, auto& value) {
    const auto given = fields.values.extract(field);
    if (given) value = static_cast<std::remove_reference_t<decltype(value)>>(given.mapped());
  });
  if (!fields.values.empty()) {
    invalid(fields.name + " has no option '" + fields.values.begin()->first + "'");
  }
  validate(options);
  return options;
}

}  // namespace

OptimizerFields to_fields(const OptimizerOptions& options) {
  OptimizerFields fields{kNames[options.index()], {}};
  std::visit(
      [&](const auto& chosen) {
        visit_fields(chosen, [&](const char* field, auto value) {
          fields.values[field] = static_cast<double>(value);
        });
      },
      options);
  return fields;
}

OptimizerOptions from_fields(const OptimizerFields& fields) {
  if (fields.name == "sgd") return read_fields<Sgd>(fields);
  if (fields.name == "adagrad") return read_fields<Adagrad>(fields);
  if (fields.name == "adam") return read_fields<Adam>(fields);
  if (fields.name == "adamw") return read_fields<AdamW>(fields);
  if (fields.name == "rmsprop") return read_fields<RmsProp>(fields);
  invalid("no optimizer '" + fields.name + "': sgd, adagrad, adam, adamw or rmsprop");
}

void validate(const OptimizerOptions& options) {
  const OptimizerFields fields = to_fields(options);
  for (const auto& [field, value] : fields.values) {
    const bool decay_rate = field == "beta1" || field == "beta2" || field == "alpha";
    const bool may_be_negative = field == "dampening";  // as in torch
    if (std::isfinite(value) && (value >= 0 || may_be_negative) && (value < 1 || !decay_rate)) {
      continue;
    }
    invalid(fields.name + ": " + field + " cannot be " + std::to_string(value));
  }
  if (const Sgd* sgd = std::get_if<Sgd>(&options)) {
    if (sgd->nesterov && (sgd->momentum <= 0 || sgd->dampening != 0)) {
      invalid("sgd: nesterov wants a momentum above 0 and no dampening");
    }
  }
}

void check_lr_factor(double factor) {
  if (std::isfinite(factor) && factor >= 0) return;
  invalid("a learning rate cannot be multiplied by " + std::to_string(factor));
}

}  // namespace distrain::optim

#include "distrain/optim/learning_rate_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/base/text.h"

namespace distrain::optim {
namespace {

using base::invalid;

constexpr const char* kForms =
    "constant, step:SIZE[,GAMMA], cosine:LENGTH[,FLOOR] or "
    "plateau:PATIENCE[,FACTOR[,FLOOR[,THRESHOLD]]], optionally after warmup:LENGTH+";

std::string to_text(int64_t count, ScheduleUnit unit) {
  return std::to_string(count) + (unit == ScheduleUnit::kEpochs ? "e" : "");
}

void check(bool good, const char* what, double value, const char* range) {
  if (good) return;
  invalid(fmt::format("--lr-schedule: {} cannot be {}: {}", what, base::shortest(value), range));
}

void check_length(const char* what, int64_t length) {
  check(length >= 1, what, static_cast<double>(length), "at least 1");
}

void check_floor(const char* what, double floor) {
  check(floor >= 0 && floor <= 1, what, floor, "from 0 to 1, as a part of the learning rate");
}

void check(const Constant&) {}
void check(const StepDecay& step) {
  check_length("a step schedule's size", step.size);
  check(std::isfinite(step.gamma) && step.gamma > 0, "a step schedule's gamma", step.gamma,
        "above 0");
}
void check(const Cosine& cosine) {
  check_length("a cosine schedule's length", cosine.length);
  check_floor("a cosine schedule's floor", cosine.floor);
}
void check(const Plateau& plateau) {
  check(plateau.patience >= 0, "a plateau schedule's patience",
        static_cast<double>(plateau.patience), "at least 0");
  check(plateau.factor > 0 && plateau.factor < 1, "a plateau schedule's factor", plateau.factor,
        "between 0 and 1");
  check_floor("a plateau schedule's floor", plateau.floor);
  check(plateau.threshold >= 0 && plateau.threshold < 1, "a plateau schedule's threshold",
        plateau.threshold, "from 0 to below 1");
}

std::optional<ScheduleUnit> unit_of(const LearningRateSchedule::Shape& shape) {
  if (const auto* step = std::get_if<StepDecay>(&shape)) return step->unit;
  if (const auto* cosine = std::get_if<Cosine>(&shape)) return cosine->unit;
  return std::nullopt;
}

// Returns the factor after `behind` steps or epochs (the shape's unit) since the warm-up.
double shape_factor(const LearningRateSchedule::Shape& shape, const ScheduleState& state,
                    int64_t behind) {
  if (const auto* step = std::get_if<StepDecay>(&shape)) {
    return std::pow(step->gamma, static_cast<double>(behind / step->size));
  }
  if (const auto* cosine = std::get_if<Cosine>(&shape)) {
    if (behind >= cosine->length) return cosine->floor;
    const double part = static_cast<double>(behind) / static_cast<double>(cosine->length);
    return cosine->floor + (1 - cosine->floor) * (1 + std::cos(std::numbers::pi * part)) / 2;
  }
  return state.factor;
}

// Reads the values of `name:value,value,…` in order.
class Part {
 public:
  explicit Part(std::string_view text) : text_(text), name_(text.substr(0, text.find(':'))) {
    if (name_.size() < text.size()) values_ = base::split(text.substr(name_.size() + 1), ',');
  }

  std::string_view name() const { return name_; }

  void length(const char* what, int64_t& into, ScheduleUnit& unit) {
    std::string_view text = take(what);
    if (text.ends_with('e')) {
      unit = ScheduleUnit::kEpochs;
      text.remove_suffix(1);
    }
    read(what, text, "a whole number of steps (500) or of epochs (5e)", into);
  }
  void count(const char* what, int64_t& into) { read(what, take(what), "a whole number", into); }
  void optional_real(const char* what, double& into) {
    if (next_ < values_.size()) read(what, take(what), "a number", into);
  }
  void end() const {
    if (next_ < values_.size()) refuse("{} is one value too many", values_[next_]);
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<const Args&...> what, const Args&... args) const {
    invalid(fmt::format("--lr-schedule {}: {}", text_, fmt::format(what, args...)));
  }
  std::string_view take(const char* what) {
    if (next_ == values_.size()) refuse("it wants a {}", what);
    return values_[next_++];
  }
  template <class T>
  void read(const char* what, std::string_view text, const char* wanted, T& into) const {
    const auto value = base::number<T>(text);
    if (!value) refuse("its {} is '{}', not {}", what, values_[next_ - 1], wanted);
    into = *value;
  }

  std::string_view text_;
  std::string_view name_;
  std::vector<std::string_view> values_;
  size_t next_ = 0;
};

LearningRateSchedule::Shape parse_shape(Part part) {
  LearningRateSchedule::Shape shape;
  if (part.name() == "step") {
    auto& step = shape.emplace<StepDecay>();
    part.length("size", step.size, step.unit);
    part.optional_real("gamma", step.gamma);
  } else if (part.name() == "cosine") {
    auto& cosine = shape.emplace<Cosine>();
    part.length("length", cosine.length, cosine.unit);
    part.optional_real("floor", cosine.floor);
  } else if (part.name() == "plateau") {
    auto& plateau = shape.emplace<Plateau>();
    part.count("patience", plateau.patience);
    part.optional_real("factor", plateau.factor);
    part.optional_real("floor", plateau.floor);
    part.optional_real("threshold", plateau.threshold);
  } else if (part.name() != "constant") {
    invalid(fmt::format("--lr-schedule: unknown schedule '{}': must be {}", part.name(), kForms));
  }
  part.end();
  return shape;
}

// Formats `values` without the trailing values that are equal to their defaults.
std::string optional_values(std::vector<double> values, const std::vector<double>& defaults) {
  while (!values.empty() && values.back() == defaults[values.size() - 1]) values.pop_back();
  std::string text;
  for (const double value : values) text += "," + base::shortest(value);
  return text;
}

std::string shape_text(const LearningRateSchedule::Shape& shape) {
  if (const auto* step = std::get_if<StepDecay>(&shape)) {
    return "step:" + to_text(step->size, step->unit) + "," + base::shortest(step->gamma);
  }
  if (const auto* cosine = std::get_if<Cosine>(&shape)) {
    return "cosine:" + to_text(cosine->length, cosine->unit) +
           optional_values({cosine->floor}, {Cosine().floor});
  }
  if (const auto* plateau = std::get_if<Plateau>(&shape)) {
    const Plateau other;
    return "plateau:" + std::to_string(plateau->patience) +
           optional_values({plateau->factor, plateau->floor, plateau->threshold},
                           {other.factor, other.floor, other.threshold});
  }
  return "constant";
}

}  // namespace

LearningRateSchedule::LearningRateSchedule(const Shape& shape, WarmUp warm_up)
    : shape_(shape), warm_up_(warm_up) {
  std::visit([](const auto& chosen) { check(chosen); }, shape_);
  check(warm_up_.length >= 0, "a warm-up's length", static_cast<double>(warm_up_.length),
        "at least 0");
  if (warm_up_.length == 0) warm_up_ = {};
  const auto unit = unit_of(shape_);
  if (warm_up_.length > 0 && unit && *unit != warm_up_.unit) {
    invalid("--lr-schedule " + text() +
            ": give both in steps or both in epochs (5e), as one begins where the other ends");
  }
}

LearningRateSchedule LearningRateSchedule::parse(std::string_view text) {
  WarmUp warm_up;
  std::string_view rest = text;
  Part first(text.substr(0, text.find('+')));
  if (first.name() == "warmup") {
    first.length("length", warm_up.length, warm_up.unit);
    first.end();
    check_length("a warm-up's length", warm_up.length);
    const size_t plus = text.find('+');
    rest = plus == std::string_view::npos ? "constant" : text.substr(plus + 1);
  }
  return LearningRateSchedule(parse_shape(Part(rest)), warm_up);
}

std::string LearningRateSchedule::text() const {
  if (warm_up_.length == 0) return shape_text(shape_);
  std::string text = "warmup:" + to_text(warm_up_.length, warm_up_.unit);
  if (!std::holds_alternative<Constant>(shape_)) text += "+" + shape_text(shape_);
  return text;
}

double LearningRateSchedule::factor(int64_t step, int64_t epoch) const {
  const auto behind = [&](ScheduleUnit unit) {
    return unit == ScheduleUnit::kEpochs ? epoch : step;
  };
  const int64_t warming = behind(warm_up_.unit);
  // The constructor has checked that the warm-up, if there is one, has the shape's unit.
  const int64_t since = behind(unit_of(shape_).value_or(warm_up_.unit)) - warm_up_.length;
  const double shaped = shape_factor(shape_, state_, std::max<int64_t>(since, 0));
  if (warming >= warm_up_.length) return shaped;
  return shaped * static_cast<double>(warming + 1) / static_cast<double>(warm_up_.length);
}

bool LearningRateSchedule::counts_epochs() const {
  return unit_of(shape_).value_or(warm_up_.unit) == ScheduleUnit::kEpochs;
}

void LearningRateSchedule::observe(double metric) {
  const auto* plateau = std::get_if<Plateau>(&shape_);
  if (!plateau) return;
  const double best = state_.best.value_or(std::numeric_limits<double>::infinity());
  if (metric < best * (1 - plateau->threshold)) {
    state_.best = metric;
    state_.bad = 0;
  } else {
    ++state_.bad;
  }
  if (state_.bad > plateau->patience) {
    state_.factor = std::max(state_.factor * plateau->factor, plateau->floor);
    state_.bad = 0;
  }
}

void LearningRateSchedule::load_state(const ScheduleState& state) {
  const bool sound = state.factor >= 0 && state.factor <= 1 && state.bad >= 0 &&
                     (!state.best || !std::isnan(*state.best));
  if (!sound || (!observes() && !(state == ScheduleState()))) {
    base::bad_data("the state of another schedule than " + text());
  }
  state_ = state;
}

}  // namespace distrain::optim

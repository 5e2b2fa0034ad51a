#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>

namespace distrain::optim {

/// What a schedule counts.
enum class ScheduleUnit : uint8_t { kSteps, kEpochs };

/// The rate stays as it is.
struct Constant {
  bool operator==(const Constant&) const = default;
};

/// The rate is multiplied by `gamma` every `size` steps or epochs: torch's StepLR.
struct StepDecay {
  int64_t size = 1;
  double gamma = 0.1;
  ScheduleUnit unit = ScheduleUnit::kSteps;
  bool operator==(const StepDecay&) const = default;
};

/// Half a cosine from the rate down to `floor` times the rate, within `length` steps or epochs; it
/// stays there. Until then it is torch's CosineAnnealingLR with eta_min = floor * lr.
struct Cosine {
  int64_t length = 1;
  double floor = 0;
  ScheduleUnit unit = ScheduleUnit::kSteps;
  bool operator==(const Cosine&) const = default;
};

/// The rate is multiplied by `factor`, down to `floor` times what it was, when more than `patience`
/// metrics in a row (losses: less is better) were not below the best one times 1 - threshold:
/// torch's ReduceLROnPlateau of mode min, threshold_mode rel, without cooldown and with eps 0.
struct Plateau {
  int64_t patience = 10;
  double factor = 0.1;
  double floor = 0;
  double threshold = 1e-4;
  bool operator==(const Plateau&) const = default;
};

/// The rate grows from 1/length of itself to itself within so many steps or epochs: torch's
/// LinearLR with start_factor = 1 / length and total_iters = length - 1. What follows begins to
/// count when it is over. Length 0: none.
struct WarmUp {
  int64_t length = 0;
  ScheduleUnit unit = ScheduleUnit::kSteps;
  bool operator==(const WarmUp&) const = default;
};

/// What a schedule has to remember of the metrics that it has seen: Plateau's, the others nothing.
struct ScheduleState {
  double factor = 1;
  std::optional<double> best;
  int64_t bad = 0;  ///< metrics in a row that were no better
  bool operator==(const ScheduleState&) const = default;
  static constexpr auto kFields =
      std::tuple(&ScheduleState::factor, &ScheduleState::best, &ScheduleState::bad);
};

/// How the learning rate changes while a job trains, as a factor of the rate that it begins with
/// (so each parameter group keeps its own): give it to DistributedOptimizer::set_lr_factor before
/// each step. A plain value; not thread-safe.
///
/// Its text is `constant`, `step:SIZE[,GAMMA]`, `cosine:LENGTH[,FLOOR]` or
/// `plateau:PATIENCE[,FACTOR[,FLOOR[,THRESHOLD]]]`, with `warmup:LENGTH+` before it or
/// `warmup:LENGTH` alone. Lengths are steps, with an `e` epochs: `warmup:5e+step:30e,0.1`.
class Schedule {
 public:
  using Shape = std::variant<Constant, StepDecay, Cosine, Plateau>;

  Schedule() = default;  ///< constant
  /// Throws `invalid` for numbers out of range, and if warm-up and shape count different things.
  explicit Schedule(const Shape& shape, WarmUp warm_up = {});

  /// Throws `invalid`, in one line, for a text that is none.
  static Schedule parse(std::string_view text);
  /// The shortest that parse() makes the same of.
  std::string text() const;

  /// For the step that has `step` steps of the job and `epoch` epochs behind it.
  double factor(int64_t step, int64_t epoch) const;

  /// Whether its lengths are epochs.
  bool counts_epochs() const;
  /// Whether it is to be told of metrics.
  bool observes() const { return std::holds_alternative<Plateau>(shape_); }
  /// Notes one evaluation's metric, if this schedule observes. NaN is no better than any number.
  void observe(double metric);

  const ScheduleState& state() const { return state_; }
  /// Throws `bad_data` for one that this schedule cannot have come to.
  void load_state(const ScheduleState& state);

  const Shape& shape() const { return shape_; }
  const WarmUp& warm_up() const { return warm_up_; }
  bool operator==(const Schedule&) const = default;

 private:
  Shape shape_;
  WarmUp warm_up_;
  ScheduleState state_;
};

}  // namespace distrain::optim

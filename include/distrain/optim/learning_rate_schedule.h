#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>

namespace distrain::optim {

enum class ScheduleUnit : uint8_t { kSteps, kEpochs };

struct Constant {
  bool operator==(const Constant&) const = default;
};

/// Multiplies the rate by `gamma` every `size` steps or epochs, as torch's StepLR.
struct StepDecay {
  int64_t size = 1;
  double gamma = 0.1;
  ScheduleUnit unit = ScheduleUnit::kSteps;
  bool operator==(const StepDecay&) const = default;
};

/// Lowers the rate to `floor` times the initial rate along half a cosine, in `length` steps or
/// epochs, as torch's CosineAnnealingLR with eta_min = floor * lr. Afterwards the rate stays there.
struct Cosine {
  int64_t length = 1;
  double floor = 0;
  ScheduleUnit unit = ScheduleUnit::kSteps;
  bool operator==(const Cosine&) const = default;
};

/// Multiplies the rate by `factor` when more than `patience` metrics in a row were not below the
/// best metric * (1 - threshold); lower is better. The rate does not fall below `floor` times the
/// initial rate. As torch's ReduceLROnPlateau with mode min, threshold_mode rel, cooldown 0, eps 0.
struct Plateau {
  int64_t patience = 10;
  double factor = 0.1;
  double floor = 0;
  double threshold = 1e-4;
  bool operator==(const Plateau&) const = default;
};

/// Raises the rate linearly from 1/length of the initial rate to the initial rate in `length` steps
/// or epochs, as torch's LinearLR with start_factor = 1 / length and total_iters = length - 1. The
/// main schedule counts from the end of the warm-up. Length 0 means no warm-up.
struct WarmUp {
  int64_t length = 0;
  ScheduleUnit unit = ScheduleUnit::kSteps;
  bool operator==(const WarmUp&) const = default;
};

/// A Plateau schedule's state. The other schedules' states keep the default values.
struct ScheduleState {
  double factor = 1;
  std::optional<double> best;
  int64_t bad = 0;  ///< consecutive metrics without improvement
  bool operator==(const ScheduleState&) const = default;
  static constexpr auto kFields =
      std::tuple(&ScheduleState::factor, &ScheduleState::best, &ScheduleState::bad);
};

/// A learning rate schedule. Pass factor(), which is relative to each parameter group's own initial
/// rate, to DistributedOptimizer::set_lr_factor before each step. Not thread-safe.
///
/// The text form is `constant`, `step:SIZE[,GAMMA]`, `cosine:LENGTH[,FLOOR]` or
/// `plateau:PATIENCE[,FACTOR[,FLOOR[,THRESHOLD]]]`, optionally after `warmup:LENGTH+`, or
/// `warmup:LENGTH` alone. Lengths are in steps, or in epochs with an `e`: `warmup:5e+step:30e,0.1`.
class LearningRateSchedule {
 public:
  using Shape = std::variant<Constant, StepDecay, Cosine, Plateau>;

  LearningRateSchedule() = default;
  /// Throws `invalid` if a number is out of range or if `warm_up` and `shape` have different units.
  explicit LearningRateSchedule(const Shape& shape, WarmUp warm_up = {});

  /// Throws `invalid` with a one-line message if `text` is not a schedule.
  static LearningRateSchedule parse(std::string_view text);
  /// Returns a short text that parse() turns into an equal schedule.
  std::string text() const;

  /// Returns the factor of the learning rate after `step` steps and `epoch` epochs of the job.
  double factor(int64_t step, int64_t epoch) const;

  /// Returns true if the lengths are in epochs.
  bool counts_epochs() const;
  /// Returns true if the schedule depends on metrics, so that observe() has to be called.
  bool observes() const { return std::holds_alternative<Plateau>(shape_); }
  /// Records an evaluation's metric; NaN counts as no improvement. Does nothing unless observes().
  void observe(double metric);

  const ScheduleState& state() const { return state_; }
  /// Throws `bad_data` if `state` is not a possible state of this schedule.
  void load_state(const ScheduleState& state);

  bool operator==(const LearningRateSchedule&) const = default;

 private:
  Shape shape_;
  WarmUp warm_up_;
  ScheduleState state_;
};

}  // namespace distrain::optim

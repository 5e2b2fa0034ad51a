#include <algorithm>

#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/nn/pipeline.h"

namespace distrain::nn {

namespace {

using base::invalid;
using Kind = PipelineStep::Kind;

std::string name_of(const PipelineStep& step) {
  return (step.kind == Kind::kForward ? "F" : "B") + std::to_string(step.micro_batch);
}

/// Returns the steps of a stage that runs up to `ahead` more forward than backward passes.
std::vector<PipelineStep> alternating(int64_t ahead, int64_t micro_batches) {
  std::vector<PipelineStep> steps;
  int64_t forward = 0;
  for (int64_t backward = 0; backward < micro_batches; ++backward) {
    while (forward < std::min(backward + ahead, micro_batches)) {
      steps.push_back({Kind::kForward, forward++});
    }
    steps.push_back({Kind::kBackward, backward});
  }
  return steps;
}

/// Throws `invalid` unless each micro-batch has one forward pass and then one backward pass.
/// Returns the maximum number of micro-batches between their passes.
int64_t check_row(const PipelineSchedule& schedule, size_t stage) {
  const auto refuse = [&](const PipelineStep& step, const char* what) {
    invalid(
        fmt::format("schedule {}: stage {}: {}{}", schedule.name, stage + 1, name_of(step), what));
  };
  std::vector<int> passes(static_cast<size_t>(schedule.micro_batches), 0);
  int64_t held = 0, peak = 0;
  for (const PipelineStep& step : schedule.stages[stage]) {
    if (step.micro_batch < 0 || step.micro_batch >= schedule.micro_batches) {
      refuse(step, " is of no micro-batch");
    }
    int& made = passes[static_cast<size_t>(step.micro_batch)];
    const int wanted = step.kind == Kind::kForward ? 0 : 1;
    if (made > wanted) refuse(step, " is there twice");
    if (made < wanted) refuse(step, " comes before its forward pass");
    ++made;
    held += step.kind == Kind::kForward ? 1 : -1;
    peak = std::max(peak, held);
  }
  for (size_t i = 0; i < passes.size(); ++i) {
    if (passes[i] == 2) continue;
    refuse({passes[i] == 0 ? Kind::kForward : Kind::kBackward, static_cast<int64_t>(i)},
           " is missing");
  }
  return peak;
}

}  // namespace

PipelineSchedule make_schedule(const std::string& name, int stages, int64_t micro_batches) {
  PipelineSchedule schedule{name, micro_batches, {}};
  if (name != "gpipe" && name != "1f1b" && name != "naive") {
    invalid("no schedule is called '" + name + "'");
  }
  for (int stage = 0; stage < stages; ++stage) {
    const int64_t ahead = name == "gpipe" ? micro_batches : name == "1f1b" ? stages - stage : 1;
    schedule.stages.push_back(alternating(ahead, micro_batches));
  }
  return schedule;
}

PipelineTimeline simulate(const PipelineSchedule& schedule) {
  const size_t stages = schedule.stages.size();
  const auto micro_batches = static_cast<size_t>(schedule.micro_batches);
  if (stages == 0 || schedule.micro_batches < 1) {
    invalid("schedule " + schedule.name + ": no stage or no micro-batch");
  }
  PipelineTimeline timeline;
  for (size_t stage = 0; stage < stages; ++stage) {
    timeline.activations.push_back(check_row(schedule, stage));
  }

  // End time of each pass by kind, stage and micro-batch; -1 if it has not run.
  const std::vector<std::vector<int64_t>> never(stages, std::vector<int64_t>(micro_batches, -1));
  std::vector<std::vector<int64_t>> done[] = {never, never};
  const auto ready_at = [&](size_t stage, const PipelineStep& step) -> int64_t {
    const bool forward = step.kind == Kind::kForward;
    if (stage == (forward ? 0 : stages - 1)) return 0;  // depends on no other stage
    return done[static_cast<size_t>(step.kind)][forward ? stage - 1 : stage + 1]
               [static_cast<size_t>(step.micro_batch)];
  };
  timeline.begin.resize(stages);
  std::vector<int64_t> free_at(stages, 0);
  size_t left = stages * micro_batches * 2;
  for (bool moved = true; moved && left > 0;) {
    moved = false;
    for (size_t stage = 0; stage < stages; ++stage) {
      const auto& row = schedule.stages[stage];
      while (timeline.begin[stage].size() < row.size()) {
        const PipelineStep& step = row[timeline.begin[stage].size()];
        const int64_t ready = ready_at(stage, step);
        if (ready < 0) break;
        const int64_t begin = std::max(free_at[stage], ready);
        timeline.begin[stage].push_back(begin);
        free_at[stage] = begin + 1;
        done[static_cast<size_t>(step.kind)][stage][static_cast<size_t>(step.micro_batch)] =
            begin + 1;
        --left;
        moved = true;
      }
    }
  }
  if (left > 0) invalid("schedule " + schedule.name + ": its stages wait for each other");
  timeline.length = *std::max_element(free_at.begin(), free_at.end());
  timeline.bubble = 1.0 - 2.0 * static_cast<double>(schedule.micro_batches) /
                              static_cast<double>(timeline.length);
  return timeline;
}

std::string to_text(const PipelineSchedule& schedule) {
  const PipelineTimeline timeline = simulate(schedule);
  const size_t stages = schedule.stages.size();
  const size_t width = std::to_string(schedule.micro_batches - 1).size() + 2;
  std::string text =
      fmt::format("{}, {} stages, {} micro-batches: {:.1f} % bubble\n", schedule.name, stages,
                  schedule.micro_batches, timeline.bubble * 100);
  for (size_t stage = 0; stage < stages; ++stage) {
    std::string line(static_cast<size_t>(timeline.length) * width, ' ');
    for (int64_t at = 0; at < timeline.length; ++at) line[static_cast<size_t>(at) * width] = '.';
    for (size_t i = 0; i < schedule.stages[stage].size(); ++i) {
      const std::string name = name_of(schedule.stages[stage][i]);
      line.replace(static_cast<size_t>(timeline.begin[stage][i]) * width, name.size(), name);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += fmt::format("  stage {:>{}}  {}  (holds {})\n", stage + 1,
                        std::to_string(stages).size(), line, timeline.activations[stage]);
  }
  return text;
}

std::vector<size_t> balanced_cuts(const std::vector<double>& costs, size_t stages) {
  std::vector<double> sums = {0};
  for (const double cost : costs) sums.push_back(sums.back() + cost);
  // Divides the first n layers into one stage, then into two, and so on. slowest[n] is the cost of
  // the slowest stage in the best division so far, and cuts[n] has the cuts of that division.
  std::vector<double> slowest = sums;
  std::vector<std::vector<size_t>> cuts(sums.size());
  for (size_t before = 1; before < stages; ++before) {
    for (size_t n = costs.size(); n > before; --n) {  // entries below n are for `before` stages
      const auto cost = [&](size_t at) { return std::max(slowest[at], sums[n] - sums[at]); };
      size_t best = before;
      for (size_t at = before + 1; at < n; ++at) best = cost(at) < cost(best) ? at : best;
      slowest[n] = cost(best);
      cuts[n] = cuts[best];
      cuts[n].push_back(best);
    }
  }
  return cuts.back();
}

}  // namespace distrain::nn

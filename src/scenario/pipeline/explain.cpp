// Checks the options of distrain pipeline, and answers --explain.

#include <span>

#include "distrain/base/error.h"
#include "distrain/nn/pipeline.h"
#include "pipeline.h"
#include "resnet.h"

namespace distrain::scenario {

namespace {

using base::invalid;

std::vector<BlockRange> cut(const PipelineOptions& options) {
  return cut_resnet(options.model, options.stages, options.split, options.classes,
                    options.image_size);
}

job::Json explain(const PipelineOptions& options, const nn::PipelineSchedule& schedule) {
  const nn::PipelineTimeline timeline = nn::simulate(schedule);
  const std::vector<std::string> blocks = resnet_blocks(options.model);
  const std::vector<BlockRange> ranges = cut(options);
  job::Json rows = job::Json::array();
  for (size_t stage = 0; stage < ranges.size(); ++stage) {
    job::Json steps = job::Json::array();
    for (const nn::PipelineStep& step : schedule.stages[stage]) {
      const bool forward = step.kind == nn::PipelineStep::Kind::kForward;
      steps.push_back({{"op", forward ? "forward" : "backward"},
                       {"micro_batch", step.micro_batch},
                       {"begin", timeline.begin[stage][steps.size()]}});
    }
    const auto own =
        std::span(blocks).subspan(ranges[stage].first, ranges[stage].last - ranges[stage].first);
    rows.push_back({{"stage", stage + 1},
                    {"activations", timeline.activations[stage]},
                    {"steps", std::move(steps)},
                    {"blocks", std::vector(own.begin(), own.end())}});
  }
  return {{"schedule", schedule.name},           {"stages", schedule.stages.size()},
          {"num_split", schedule.micro_batches}, {"length", timeline.length},
          {"bubble", timeline.bubble},           {"table", std::move(rows)}};
}

}  // namespace

void check_pipeline(const PipelineOptions& options) {
  cut(options);
  const bool saves = !options.checkpoint.dir.empty() || !options.checkpoint.resume.empty();
  const bool evaluates = !options.valid_data.empty() || !options.test_data.empty();
  if ((saves || evaluates) && options.num_split.size() > 1) {
    invalid(std::string(saves                         ? "--checkpoint and --resume need"
                        : !options.valid_data.empty() ? "--valid-data needs"
                                                      : "--test-data needs") +
            " a single number in --micro-batches: each number trains a separate model");
  }
  for (const int64_t num_split : options.num_split) {
    if (num_split > options.batch_size) {
      invalid("--micro-batches " + std::to_string(num_split) + ": a batch has only " +
              std::to_string(options.batch_size) + " images: give fewer, or a larger --batch-size");
    }
    check_resnet_input(options.image_size, options.batch_size / num_split);
    nn::simulate(nn::make_schedule(options.schedule, options.stages, num_split));
  }
  job::Plan::of_steps(options, options.batches);
}

std::string explain_pipeline(const PipelineOptions& options, bool for_people) {
  check_pipeline(options);
  std::string text;
  for (const int64_t num_split : options.num_split) {
    const auto schedule = nn::make_schedule(options.schedule, options.stages, num_split);
    text += for_people ? nn::to_text(schedule) : explain(options, schedule).dump() + '\n';
  }
  return text;
}

}  // namespace distrain::scenario

// What can be said of a pipeline before it runs.

#include <algorithm>

#include "distrain/base/error.h"
#include "distrain/models/resnet.h"
#include "distrain/scenario/pipeline.h"
#include "schedule.h"

namespace distrain::scenario {

namespace {

std::vector<models::BlockRange> cut(const PipelineOptions& options) {
  return models::cut_resnet(options.model, options.stages, options.split, options.classes,
                            options.image_size);
}

std::vector<std::string> names_of(const PipelineOptions& options, const models::BlockRange& range) {
  const std::vector<std::string> all = models::resnet_blocks(options.model);
  return {all.begin() + static_cast<std::ptrdiff_t>(range.first),
          all.begin() + static_cast<std::ptrdiff_t>(range.last)};
}

}  // namespace

void check_pipeline(const PipelineOptions& options) {
  cut(options);
  const bool saves = !options.checkpoint.dir.empty() || !options.checkpoint.resume.empty();
  if (saves && options.num_split.size() > 1) {
    throw base::Exception(base::ErrorKind::kInvalid,
                          "--checkpoint and --resume need one --num-split, not several: each "
                          "number trains a model of its own");
  }
  for (const int64_t num_split : options.num_split) {
    if (num_split > options.batch_size) {
      throw base::Exception(base::ErrorKind::kInvalid, "--num-split " + std::to_string(num_split) +
                                                           ": there are only " +
                                                           std::to_string(options.batch_size) +
                                                           " samples in a batch (--batch-size)");
    }
    models::check_resnet_input(options.image_size, options.batch_size / num_split);
    simulate(make_schedule(options.schedule, options.stages, num_split));
  }
}

job::Json explain_pipeline(const PipelineOptions& options, int64_t num_split) {
  job::Json json = to_json(make_schedule(options.schedule, options.stages, num_split));
  const std::vector<models::BlockRange> ranges = cut(options);
  for (size_t stage = 0; stage < ranges.size(); ++stage) {
    json["table"][stage]["blocks"] = names_of(options, ranges[stage]);
  }
  return json;
}

std::string explain_pipeline_in_words(const PipelineOptions& options, int64_t num_split) {
  return to_text(make_schedule(options.schedule, options.stages, num_split));
}

}  // namespace distrain::scenario

#include "split_log.h"

#include <algorithm>

#include "distrain/job/train_log.h"

namespace distrain::scenario {

namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace

void SplitLog::begin_split(int64_t num_split) {
  num_split_ = num_split;
  begun_ = base::Clock::now();
  if (!first_) first_ = begun_;
  results_.clear();
}

void SplitLog::batch(const BatchResult& result, int64_t epoch, int64_t step) {
  results_.push_back(result);
  ++steps_;
  if (options_.log_interval == 0 || step % options_.log_interval != 0) return;
  job::Json fields{
      {"epoch", epoch}, {"step", step}, {"num_split", num_split_}, {"loss", result.loss}};
  if (result.accuracy) fields["accuracy"] = *result.accuracy;
  fields["batch_s"] = result.batch_s;
  fields["samples_per_s"] = static_cast<double>(options_.batch_size) / result.batch_s;
  sink_.emit("step", fields);
}

void SplitLog::end_split() {
  if (results_.empty()) return;
  train_s_ = base::seconds_since(*first_);
  // The first batch pays for what is done once; one alone has to do.
  const size_t skipped = results_.size() > 1 ? 1 : 0;
  const auto median_of = [&](const auto& value) {
    std::vector<double> values;
    for (size_t i = skipped; i < results_.size(); ++i) values.push_back(value(results_[i]));
    return median(std::move(values));
  };
  const BatchResult& result = results_.back();
  const double batch_s = median_of([](const BatchResult& r) { return r.batch_s; });
  job::Json stage_s = job::Json::array();
  for (size_t stage = 0; stage < result.stage_s.size(); ++stage) {
    stage_s.push_back(result.stage_s[stage] ? job::Json(median_of([&](const BatchResult& r) {
      return *r.stage_s[stage];
    }))
                                            : job::Json());
  }
  last_ = {{"num_split", num_split_},
           {"schedule", options_.schedule},
           {"batches", results_.size()},
           {"batch_size", options_.batch_size},
           {"wall_s", base::seconds_since(begun_)},
           {"batch_s", batch_s},
           {"stage_s", std::move(stage_s)},
           {"activations", result.activations},
           {"samples_per_s", static_cast<double>(options_.batch_size) / batch_s},
           {"loss", result.loss}};
  if (result.accuracy) last_["accuracy"] = *result.accuracy;
  sink_.emit("split", last_);
  if (best_.is_null() || batch_s < best_["batch_s"]) {
    best_ = {{"num_split", num_split_}, {"batch_s", batch_s}};
  }
}

void SplitLog::add_to(job::Json& fields) const {
  fields["steps"] = steps_;
  fields["train_s"] = train_s_;
  if (last_.is_null()) return;
  for (const char* name : {"loss", "accuracy", "num_split", "batch_s", "samples_per_s"}) {
    if (last_.contains(name)) fields[name] = last_[name];
  }
  fields["best"] = best_;
}

}  // namespace distrain::scenario

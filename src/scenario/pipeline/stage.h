#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "distrain/autograd/context.h"
#include "distrain/data/named_tensors.h"
#include "distrain/models/resnet.h"
#include "distrain/rpc/agent.h"
#include "schedule.h"
#include "turns.h"

namespace distrain::scenario {

/// Until its peer dies: nobody knows how long a stage computes.
constexpr auto kAsLongAsItTakes = std::chrono::nanoseconds::max();

/// What the stages of one rank have of their job.
struct StageJob {
  double sleep_s = 0;  ///< `--inject stage=…`: in place of a whole batch's pass; 0: none

  /// Steps that wait when the agent is gone would wait, and keep their stage, for ever.
  ~StageJob();
  void add(std::weak_ptr<class PipelineStage> stage);

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<class PipelineStage>> stages_;
};

/// What one stage did in a batch.
struct StageReport {
  /// In which a step had the turn; none on an accelerator, which is only told then what to do.
  std::optional<double> compute_s;
  int64_t activations = 0;  ///< micro-batches that it held at most, between their two passes
  static constexpr auto kFields = std::tuple(&StageReport::compute_s, &StageReport::activations);
};

/// A stage of the pipeline on its worker, used through an RRef.
///
/// A step of the schedule runs when it has its turn: a forward pass once its input is here, a
/// backward pass once its gradients are. Until then it holds no thread. Inputs are fetched ahead of
/// their turn, so that a transfer and another micro-batch's computing overlap.
class PipelineStage : public std::enable_shared_from_this<PipelineStage> {
 public:
  /// Model, classes, pixels of an image's side, first and last block, seed: see ResNetStage. The
  /// device is one of the rank that makes it.
  using Constructor = PipelineStage(std::string, int64_t, int64_t, int64_t, int64_t, uint64_t,
                                    std::string);
  PipelineStage(const std::string& model, int64_t classes, int64_t image_size, int64_t first_block,
                int64_t last_block, uint64_t seed, const std::string& device);

  /// A batch of `batch_size` samples follows: micro-batches in the order of `row`. The call's
  /// context is the one that gathers the gradients of the micro-batches' contexts.
  void begin_batch(rpc::CallContext& call, std::vector<PipelineStep> row, int64_t batch_size);
  /// When all that the stage has to do for the batch, its update too, is done.
  StageReport end_batch();

  /// In the micro-batch's own context: fetches its input, from the stage before or the master, and
  /// passes it through.
  base::Future<at::Tensor> forward(rpc::CallContext& call, const rpc::RRef<at::Tensor>& input,
                                   int64_t micro_batch);

  /// Not in a context: passes `input` through by the statistics that batch norm has gathered.
  base::Future<at::Tensor> infer(rpc::CallContext& call, const rpc::RRef<at::Tensor>& input);

  std::vector<rpc::RRef<at::Tensor>> parameter_rrefs(rpc::CallContext& call);
  std::vector<std::string> parameter_names() const;
  /// Those of the current context, by parameter, on the CPU.
  data::NamedTensors gradients(rpc::CallContext& call);
  /// Parameters and buffers, on the CPU.
  data::NamedTensors state() const { return data::on_host(module_.state()); }
  /// What belongs to this stage of a whole state_dict.
  void load(const data::NamedTensors& weights) { module_.load(weights); }

  /// Whoever waits for a turn is told, until the next batch.
  void fail(const base::Error& error) { turns_.fail(error); }

  static void expose(rpc::Agent& agent);

 private:
  /// Gives the output as the next one takes it.
  at::Tensor compute(rpc::Agent& agent, const at::Tensor& input, int64_t micro_batch,
                     const Turns::TurnPtr& turn);
  autograd::PassGuard guard(rpc::Agent& agent, int64_t micro_batch, double sleep_s);
  c10::Device device() const { return module_.parameters().front().second.device(); }
  /// The rank that takes what this stage gives.
  int next_rank(const rpc::Agent& agent) const;
  at::Tensor stand_in(const at::Tensor& input) const;
  at::Tensor full_size(const at::Tensor& input) const;
  void hold(int64_t micro_batches);
  void add_compute(base::TimePoint begun);

  models::ResNetStage module_;
  const int64_t classes_;
  const int64_t input_side_;  // of what it takes
  const bool is_first_;
  const bool is_last_;
  Turns turns_;
  // Set between two batches.
  uint64_t batch_context_ = 0;
  int64_t batch_size_ = 1;
  std::mutex mutex_;  // of what follows
  int64_t held_ = 0;
  StageReport report_;
};

}  // namespace distrain::scenario

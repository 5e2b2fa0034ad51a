#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "distrain/job/job.h"
#include "distrain/nn/pipeline.h"
#include "distrain/rpc/agent.h"
#include "resnet.h"

namespace distrain::scenario {

/// A stage of the pipeline on its worker, used through an RRef; see nn::StagePasses. With `--inject
/// stage=…` it sleeps instead of computing.
class PipelineStage : public std::enable_shared_from_this<PipelineStage> {
 public:
  /// The arguments are the model, classes, image size in pixels, first and last block, seed, and
  /// the device of the rank that holds the stage: see ResNetStage.
  using Constructor = PipelineStage(std::string, int64_t, int64_t, int64_t, int64_t, uint64_t,
                                    std::string);
  PipelineStage(const std::string& model, int64_t classes, int64_t image_size, int64_t first_block,
                int64_t last_block, uint64_t seed, const std::string& device);

  void begin_batch(rpc::CallContext& call, std::vector<nn::PipelineStep> row, int64_t samples) {
    const double batch_s = call.agent.local<job::Job>().inject.stage_sleep_s;
    sleep_s_ = batch_s / static_cast<double>(samples);
    passes_.begin(call.agent, std::move(row));
  }
  nn::StageReport end_batch() { return passes_.end(); }
  base::Future<at::Tensor> forward(rpc::CallContext& call, const rpc::RRef<at::Tensor>& input,
                                   int64_t micro_batch) {
    return passes_.forward(
        call.agent, input, micro_batch, next_rank(call.agent),
        [self = shared_from_this()](const at::Tensor& x) { return self->compute(x); });
  }

  /// Runs `input` through the stage, with batch norm's running statistics and no autograd context.
  base::Future<at::Tensor> infer(rpc::CallContext& call, const rpc::RRef<at::Tensor>& input);

  std::vector<rpc::RRef<at::Tensor>> parameter_rrefs(rpc::CallContext& call);
  /// Returns a snapshot of parameters and buffers on the CPU.
  rpc::RRef<rpc::NamedTensors> hold_state(rpc::CallContext& call) const;
  /// Loads this stage's part of a complete state_dict.
  void load(const rpc::NamedTensors& weights) { module_.load(weights); }

  static void expose(rpc::Agent& agent);

 private:
  at::Tensor compute(const at::Tensor& input) const;
  at::Tensor sleep(const at::Tensor& input, double seconds) const;
  /// Returns the rank that receives the output of this stage.
  int next_rank(const rpc::Agent& agent) const { return is_last_ ? 0 : agent.rank() + 1; }

  ResNetStage module_;
  const int64_t classes_;
  const int64_t input_side_;  // width and height of the stage's input in pixels
  const bool is_first_, is_last_;
  nn::StagePasses passes_{"PipelineStage.forward"};
  double sleep_s_ = 0;  // time to sleep per sample and pass (--inject); set between batches
};

}  // namespace distrain::scenario

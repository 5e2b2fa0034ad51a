#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "distrain/data/named_tensors.h"
#include "distrain/job/checkpoint_options.h"
#include "distrain/job/job.h"

namespace distrain::scenario {

/// Options of `distrain pipeline`; the defaults are the PyTorch tutorial's ("Distributed Pipeline
/// Parallelism Using RPC"), but for num_split, which is the number of micro-batches here.
struct PipelineOptions {
  int stages = 2;
  std::string model = "resnet50";  ///< resnet18, resnet50
  /// The last block of each stage but the last ("layer2", "layer3.2"); empty: see cut_resnet().
  std::vector<std::string> split;
  std::vector<int64_t> num_split = {1, 2, 4, 8};  ///< micro-batches a batch, one run each
  std::string schedule = "gpipe";                 ///< gpipe, 1f1b, naive
  std::string loss = "mse";                       ///< mse (against one-hot), ce
  int64_t batches = 3;                            ///< of each run
  int64_t batch_size = 120;
  int64_t image_size = 128;  ///< pixels, both sides
  int64_t classes = 1000;
  double lr = 0.05;
  std::string data;     ///< folder with CIFAR-10's binary files or MNIST's IDX files; empty: random
  std::string weights;  ///< safetensors file to begin with; empty: torchvision's initialisation
  uint64_t seed = 1;
  int threads = 0;                    ///< intra-op; 0: cores / ranks on this host
  int log_interval = 0;               ///< batches; 0: no `step` lines
  job::CheckpointOptions checkpoint;  ///< `every` in batches; 0: at the end
  /// Not an option of the command line: told the gradients of each batch, by parameter, on the
  /// master, before they are applied.
  std::function<void(const data::NamedTensors&)> on_gradients;
};

/// Throws `invalid` for options that do not go together: more micro-batches than samples, a split
/// that does not fit the model or the stages, a schedule that could not run.
void check_pipeline(const PipelineOptions& options);

/// The schedule with `num_split` micro-batches: stages with their blocks, each step with the time
/// it begins at if all take one unit, the share of waiting.
job::Json explain_pipeline(const PipelineOptions& options, int64_t num_split);
/// The same for people: a timeline.
std::string explain_pipeline_in_words(const PipelineOptions& options, int64_t num_split);

/// Rank 0 master, ranks 1..S the stages.
int pipeline_world_size(const PipelineOptions& options);
std::string pipeline_role(int rank);

/// Runs one rank of the job to its end; throws base::Exception. `adopt` turns rank 0's options into
/// a PipelineOptions.
job::Outcome run_pipeline(const PipelineOptions& own, const job::Job& job,
                          const std::function<PipelineOptions(const job::OptionMap&)>& adopt,
                          job::EventSink& sink);

/// The same training in one process without RPC: the reference for correctness and speed.
job::Outcome run_pipeline_local(const PipelineOptions& options, const job::Job& job,
                                job::EventSink& sink);

}  // namespace distrain::scenario

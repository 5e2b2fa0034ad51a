#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "distrain/job/definition.h"

namespace distrain::scenario {

/// Options of `distrain pipeline`. The defaults are those of the PyTorch tutorial "Distributed
/// Pipeline Parallelism Using RPC", but `num_split` counts micro-batches here. Steps are batches.
struct PipelineOptions : job::CommonOptions, job::RuleOptions {
  PipelineOptions() { lr = 0.05; }
  static void describe(job::OptionList<PipelineOptions>& list);

  int stages = 2;
  std::string model = "resnet50";  ///< resnet18 or resnet50
  /// The last block of each stage but the last one, such as "layer3.2"; empty: see cut_resnet().
  std::vector<std::string> split;
  std::vector<int64_t> num_split = {1, 2, 4, 8};  ///< micro-batches per batch, one run for each
  std::string schedule = "gpipe";                 ///< gpipe, 1f1b or naive
  std::string loss = "mse";                       ///< mse (against one-hot labels) or ce
  int64_t batches = 3;                            ///< number of batches of each run
  int64_t epochs = 0;                             ///< number of epochs of each run; 0: `batches`
  int64_t batch_size = 120;
  int64_t image_size = 128;  ///< width and height in pixels
  int64_t classes = 1000;
  std::string data;                   ///< folder with CIFAR-10 or IDX files; empty: random images
  std::string valid_data, test_data;  ///< folders with test images; empty: no such evaluation
  std::string weights;   ///< safetensors file of initial weights; empty: random, as torchvision
  bool explain = false;  ///< print the schedule and train nothing
};

/// Throws `invalid` if options contradict each other: more micro-batches than images, a split that
/// does not match the model or the stages, a schedule that cannot run.
void check_pipeline(const PipelineOptions& options);

/// Returns the schedule for each number of micro-batches: as a timeline if `for_people`, otherwise
/// as one line of JSON with the stages, their blocks, the start of each pass in units of one pass,
/// and the share of idle time. Throws `invalid` if options contradict each other.
std::string explain_pipeline(const PipelineOptions& options, bool for_people);

void train_pipeline(job::Rank& rank, const PipelineOptions& options);
/// Trains in one process without RPC: the reference for correctness and speed.
void train_pipeline_local(job::SingleProcess& local, const PipelineOptions& options);
/// Classifies images with the model of a checkpoint.
void predict_pipeline(job::Predictions& predictions, const PipelineOptions& options);

}  // namespace distrain::scenario

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "distrain/data/named_tensors.h"
#include "distrain/job/definition.h"

namespace distrain::scenario {

/// Options of `distrain pipeline`; the defaults are the PyTorch tutorial's ("Distributed Pipeline
/// Parallelism Using RPC"), but for num_split, here micro-batches. Steps are batches.
struct PipelineOptions : job::CommonOptions, job::RuleOptions {
  PipelineOptions() { lr = 0.05; }
  static void describe(job::OptionList<PipelineOptions>& list);

  int stages = 2;
  std::string model = "resnet50";  ///< resnet18, resnet50
  /// The last block of each stage but the last ("layer2", "layer3.2"); empty: see cut_resnet().
  std::vector<std::string> split;
  std::vector<int64_t> num_split = {1, 2, 4, 8};  ///< micro-batches a batch, one run each
  std::string schedule = "gpipe";                 ///< gpipe, 1f1b, naive
  std::string loss = "mse";                       ///< mse (against one-hot), ce
  int64_t batches = 3;                            ///< of each run
  int64_t epochs = 0;                             ///< passes over the images; 0: see batches
  int64_t batch_size = 120;
  int64_t image_size = 128;  ///< pixels, both sides
  int64_t classes = 1000;
  std::string data;  ///< folder with CIFAR-10's binary files or MNIST's IDX files; empty: random
  std::string valid_data, test_data;  ///< folders with test images; empty: no such evaluation
  std::string weights;   ///< safetensors file to begin with; empty: torchvision's initialisation
  bool explain = false;  ///< the schedule in place of the job
  /// Not on the command line: hears each batch's gradients on the master, before they are applied.
  std::function<void(const data::NamedTensors&)> on_gradients;
};

/// Rank 0 master, ranks 1..S the stages.
const job::Definition<PipelineOptions>& pipeline_job();

}  // namespace distrain::scenario

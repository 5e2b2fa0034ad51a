#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "distrain/data/named_tensors.h"
#include "distrain/nn/dropout.h"
#include "distrain/rpc/agent.h"

namespace distrain::models {

/// What a forward pass over shared parameters gives.
struct PsForward {
  at::Tensor scores;      ///< log-probabilities [n, 10]
  uint64_t version = 0;   ///< updates that its parameters had had, at least
  int64_t staleness = 0;  ///< steps that the caller was ahead of the slowest trainer, at most
  static constexpr auto kFields =
      std::tuple(&PsForward::scores, &PsForward::version, &PsForward::staleness);
};

/// The parameter server's model: PyTorch's MNIST example. It has no mode: whether a pass trains or
/// evaluates is said with each pass, so trainers do not get into each other's way.
class ConvNet {
 public:
  /// Initialised as torch.nn does. The convolutions are on the first device, the rest on the last.
  explicit ConvNet(uint64_t seed, const std::vector<c10::Device>& devices = {c10::kCPU});

  /// Images [n, 1, 28, 28] → log-probabilities [n, 10]. `parameters` in the order of names(), on
  /// whichever devices; the result is on that of the last. `rate` is that of dropout in both of its
  /// places; none: the example's, 0.25 of the channels and 0.5 of the numbers.
  static at::Tensor forward(const std::vector<at::Tensor>& parameters, const at::Tensor& images,
                            nn::Dropout dropout, std::optional<double> rate = {});

  static const std::vector<std::string>& names();
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  data::NamedTensors named_parameters() const;

  // What trainers call through their RRef.

  /// Training: on the parameters as they are now; an update meanwhile leaves this pass alone.
  /// Without a `dropout_key` there is no dropout.
  PsForward forward_training(rpc::CallContext& call, at::Tensor images,
                             std::optional<uint64_t> dropout_key,
                             std::optional<double> dropout_rate);
  at::Tensor forward_evaluating(rpc::CallContext& call, at::Tensor images);
  std::vector<rpc::RRef<at::Tensor>> parameter_rrefs(rpc::CallContext& call);
  /// Of an autograd context, in the order of names(); undefined where there is none.
  std::vector<at::Tensor> gradients(rpc::CallContext& call, uint64_t context);

  static void expose(rpc::Agent& agent);

 private:
  std::vector<at::Tensor> parameters_;
};

}  // namespace distrain::models

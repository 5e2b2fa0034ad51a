#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "distrain/nn/dropout.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/named_tensors.h"

namespace distrain::scenario {

/// Result of a forward pass over shared parameters.
struct PsForward {
  at::Tensor scores;      ///< log-probabilities [n, 10]
  uint64_t version = 0;   ///< number of updates in the parameters used; a lower bound
  int64_t staleness = 0;  ///< the caller's lead over the slowest trainer; an upper bound
  static constexpr auto kFields =
      std::tuple(&PsForward::scores, &PsForward::version, &PsForward::staleness);
};

/// The parameter server's model: the net of PyTorch's MNIST example. It has no training mode that
/// trainers could disturb; each pass is a training or an evaluation pass.
class ConvNet {
 public:
  /// Initializes as torch.nn does. Convolutions are on the first device, linear layers on the last.
  explicit ConvNet(uint64_t seed, const std::vector<c10::Device>& devices = {c10::kCPU});

  /// Computes log-probabilities [n, 10] of images [n, 1, 28, 28]. `parameters` are in the order of
  /// names(), on any devices; the result is on the last one's. `rate` is the rate of both dropouts;
  /// the default is the example's: 0.25 of the channels and 0.5 of the elements.
  static at::Tensor forward(const std::vector<at::Tensor>& parameters, const at::Tensor& images,
                            nn::Dropout dropout, std::optional<double> rate = {});

  static const std::vector<std::string>& names();
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  rpc::NamedTensors named_parameters() const;

  // Functions that the trainers call.

  /// Runs a training pass on the current versions of the parameters, which concurrent updates do
  /// not change. Without a `dropout_key` there is no dropout.
  PsForward forward_training(rpc::CallContext& call, at::Tensor images,
                             std::optional<uint64_t> dropout_key,
                             std::optional<double> dropout_rate);
  at::Tensor forward_evaluating(rpc::CallContext& call, at::Tensor images);
  std::vector<rpc::RRef<at::Tensor>> parameter_rrefs(rpc::CallContext& call);
  /// Returns the gradients of an autograd context in the order of names(); undefined if missing.
  std::vector<at::Tensor> gradients(rpc::CallContext& call, uint64_t context);

 private:
  std::vector<at::Tensor> parameters_;
};

}  // namespace distrain::scenario

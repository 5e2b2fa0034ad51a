#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "distrain/base/error.h"
#include "distrain/base/executor.h"
#include "distrain/collective/pass_number.h"
#include "distrain/collective/pending.h"
#include "distrain/rpc/channel.h"

namespace distrain::collective {

class Core;

/// The ranks that take part, by their numbers in the job and in the same order everywhere; a rank's
/// place in the list is its rank in the group. `id` tells groups apart on the wire.
struct Group {
  uint32_t id = 0;
  std::vector<int> ranks;
};

struct BackendSettings {
  std::chrono::milliseconds timeout = kBackendDefaultTimeout;  ///< 0: until a peer is lost
  /// The largest allreduce that takes one hop; -1 chooses by the number of ranks. Equal on all.
  int64_t direct_bytes = -1;
};

/// Which operations a call is in order with.
struct OperationTerms {
  uint32_t sequence = 0;
  PassNumber pass = {};  ///< must agree on all ranks
};

/// Collective operations of a group of ranks over one channel, which belongs to this group alone.
///
/// All ranks of the group call the same operations in the same order, those of each sequence by
/// themselves; any number may be under way. Calls return at once, but a rank that is far ahead of
/// others waits for them: see Note [Window of a group] in src/collective/core.h. A call that needs
/// a rank which has closed the group fails with `peer_lost`. Results are written in place.
/// Every rank gets the same bits: inputs are reduced in rank order. CPU tensors, dense, of any
/// strides; see can_reduce in src/collective/reduce.h for the dtypes of each reduction. A tensor
/// must not be touched until its operation is complete.
///
/// The algorithms are in Note [Algorithms] in src/collective/operations.h, the threads in Note
/// [Life of an operation] in src/collective/operation.h. Thread-safe; calls keep the user's order.
class Backend final : public c10d::Backend {
 public:
  using Settings = BackendSettings;
  using Terms = OperationTerms;

  /// `channel` and `executor` must outlive this object. Throws `invalid` if the group is not one.
  Backend(rpc::Channel& channel, base::Executor& executor, Group group, Settings settings = {});
  ~Backend() override;

  // For our own code. A wrong argument throws `invalid` and takes no part in the order of calls;
  // every other failure is thrown by Pending::wait.

  using ReduceOp = c10d::ReduceOp::RedOpType;
  static constexpr std::chrono::milliseconds kDefault{-1};  ///< the timeout of the settings

  /// Returns a new sequence's number; 0 is everybody's. All ranks call it in the same order.
  uint32_t new_sequence();

  Pending allreduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::SUM,
                    std::chrono::milliseconds timeout = kDefault, const Terms& terms = {});
  /// `root` is a rank within the group.
  Pending broadcast(const at::Tensor& tensor, int root = 0,
                    std::chrono::milliseconds timeout = kDefault, const Terms& terms = {});
  /// `outputs[i]`, of the size and dtype of `input`, receives that of rank i.
  Pending allgather(const at::Tensor& input, std::vector<at::Tensor> outputs,
                    std::chrono::milliseconds timeout = kDefault);
  Pending enter_barrier(std::chrono::milliseconds timeout = kDefault);

  /// Takes the place of the next `count` operations of a sequence: on the other ranks they fail
  /// with `error`, which names this one. For a rank that cannot do its part.
  void refuse(int count, const base::Error& error, uint32_t sequence = 0);

  int world_rank(int rank) const;

  /// Why every operation fails from now on, if so: a rank is lost, or the group is closed.
  std::optional<base::Error> failure() const;

  // c10d's interface. wait() of the Works throws base::Exception.

  const std::string getBackendName() const override { return "distrain"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  /// Fails what is under way with `cancelled`.
  void abort() override;
  /// As abort(), and no operation can follow. The destructor does it, too.
  void shutdown() override;

 private:
  base::TimePoint deadline(std::chrono::milliseconds timeout) const;
  Pending issue(std::shared_ptr<Operation> operation, uint32_t sequence = 0);

  const c10::intrusive_ptr<c10d::Backend::Options> options_;
  size_t direct_bytes_ = 0;
  std::shared_ptr<Core> core_;
};

}  // namespace distrain::collective

#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "distrain/base/clock.h"
#include "distrain/base/executor.h"
#include "distrain/base/future.h"
#include "distrain/collective/pass_number.h"
#include "distrain/rpc/channel.h"

namespace distrain::collective {

class Core;
class Operation;
struct ExchangePlan;
struct OpSpec;

/// A group of ranks. `ranks` lists the members' job ranks in the same order on all members. The
/// index in `ranks` is the rank within the group. `id` identifies the group in messages.
struct Group {
  uint32_t id = 0;
  std::vector<int> ranks;
};

struct BackendSettings {
  std::chrono::milliseconds timeout = kBackendDefaultTimeout;  ///< 0: no limit
  /// Largest tensor, in bytes, that an allreduce sends to all ranks as a whole. Larger tensors are
  /// reduced in chunks. -1 chooses by group size. Must be equal on all ranks.
  int64_t direct_bytes = -1;
  /// Lets the ranks use shared memory, if all of them are on one host and have this set.
  bool shared_memory = true;
};

/// The sequence and the backward pass that an operation belongs to. The n-th operation of a
/// sequence on one rank is matched with the n-th operation of that sequence on every other rank.
struct OperationOptions {
  uint32_t sequence = 0;
  PassNumber pass = {};  ///< must agree on all ranks: see PassNumber::agrees_with
};

/// A handle of an in-flight collective operation; copies share the operation. Thread-safe.
///
/// Always call wait(), because the waiting thread computes the result of a small operation, which
/// saves waking another thread. If no thread waits, that result is never written.
class Pending {
 public:
  Pending() = default;
  explicit Pending(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  /// Returns true if wait() would return or throw at once. First computes the steps that can run.
  bool done() const;

  /// Blocks until the result is in the operation's tensors. Throws `peer_lost` with the lost rank,
  /// `deadline` with the ranks that sent nothing, `invalid` if the ranks called different
  /// operations (naming both), or the error of a rank that refused to take part.
  void wait() const;

  /// Waits until `limit` at most. Returns true if the operation is complete. Throws as wait() does.
  bool wait_until(base::TimePoint limit) const;

  /// Ends an incomplete operation as if its deadline had passed.
  void expire() const;

  /// Fails an incomplete operation with `error` on this rank.
  void fail(base::Error error) const;

  /// Returns a future for callers that cannot block; a thread of the backend's executor waits.
  base::Future<void> future() const;

 private:
  std::shared_ptr<Operation> operation_;
};

/// Collective operations of a group of ranks over a channel that only this group uses.
///
/// All ranks call the same operations of each sequence in the same order; any number may be in
/// flight. Calls return at once, except that a rank far ahead of the others waits for them: see
/// Note [Window of a group] in src/collective/core.h. The first allreduce or barrier waits until
/// all ranks have made their Backend, to agree on shared memory. If a rank has closed the group,
/// operations that need it fail with `peer_lost`, in shared memory within about two seconds.
/// Results are written in place. All ranks get the same bits, because inputs are reduced in rank
/// order, on several hosts host by host. Tensors are dense CPU tensors of any strides and the
/// dtypes of can_reduce() in src/collective/operations.h. Do not use them before completion.
///
/// See Note [Algorithms] in src/collective/operations.h and Note [Life of an operation] in
/// src/collective/core.h. Thread-safe; the caller determines the order of calls.
class Backend final : public c10d::Backend {
 public:
  using Settings = BackendSettings;

  /// `channel` and `executor` must outlive this object. Throws `invalid` if `group` lists an
  /// unknown rank, a rank twice, or not this rank.
  Backend(rpc::Channel& channel, base::Executor& executor, Group group, Settings settings = {});
  ~Backend() override;

  // The functions below throw `invalid` for wrong arguments; Pending::wait() throws other errors.

  using ReduceOp = c10d::ReduceOp::RedOpType;
  static constexpr std::chrono::milliseconds kDefault{-1};  ///< stands for BackendSettings::timeout

  /// Creates a sequence and returns its number. Sequence 0 always exists. All ranks must call
  /// new_sequence() in the same order.
  uint32_t new_sequence();

  Pending allreduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::SUM,
                    std::chrono::milliseconds timeout = kDefault,
                    const OperationOptions& options = {});
  /// Returns an uninitialised tensor of `bytes` bytes, in memory that the other ranks can write if
  /// all ranks are on one host. An allreduce of the whole tensor then copies nothing; all ranks
  /// must give it such tensors, or none. If the allreduce fails, do not use the tensor any more,
  /// because other ranks may still write to it.
  at::Tensor allocate(size_t bytes);
  /// Copies `tensor` of group rank `root` into `tensor` of the other ranks.
  Pending broadcast(const at::Tensor& tensor, int root = 0,
                    std::chrono::milliseconds timeout = kDefault,
                    const OperationOptions& options = {});
  /// Copies the input of group rank i into `outputs[i]`. Sizes and dtypes must be equal.
  Pending allgather(const at::Tensor& input, std::vector<at::Tensor> outputs,
                    std::chrono::milliseconds timeout = kDefault);
  Pending enter_barrier(std::chrono::milliseconds timeout = kDefault);

  // The operations below are in sequence 0. They take one tensor for each rank of the group in each
  // list, by group rank, of any shape. Inputs and outputs may share memory.

  /// Reduces `inputs[i]` of all ranks into `output` of group rank i. All have one dtype and size.
  Pending reduce_scatter(const at::Tensor& output, std::vector<at::Tensor> inputs,
                         ReduceOp op = ReduceOp::SUM, std::chrono::milliseconds timeout = kDefault);
  /// Copies `inputs[i]` of group rank j into `outputs[j]` of group rank i. Sizes may differ between
  /// pairs of ranks. wait() throws `invalid` if a rank sends another size than the receiver
  /// expects.
  Pending all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                     std::chrono::milliseconds timeout = kDefault);
  /// Copies `input` of group rank i into `outputs[i]` of group rank `root`; the other ranks have no
  /// outputs. Sizes and dtypes must be equal. On another rank, complete when the root has begun.
  Pending gather(const at::Tensor& input, std::vector<at::Tensor> outputs, int root = 0,
                 std::chrono::milliseconds timeout = kDefault);
  /// Copies `inputs[i]` of group rank `root` into `output` of group rank i; the other ranks have no
  /// inputs. Sizes and dtypes must be equal.
  Pending scatter(const at::Tensor& output, std::vector<at::Tensor> inputs, int root = 0,
                  std::chrono::milliseconds timeout = kDefault);
  /// Reduces `tensor` of all ranks into `tensor` of group rank `root`. The others' keep their
  /// values.
  Pending reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::SUM,
                 std::chrono::milliseconds timeout = kDefault);

  /// Sends `tensor` to group rank `to`, which receives it by recv() with the same tag. The n-th
  /// send to a rank with a tag belongs to the n-th recv there from this rank with that tag. A send
  /// is complete when the recv has begun and the data is on the way: two ranks that both wait for a
  /// send before they call recv() wait forever.
  Pending send(const at::Tensor& tensor, int to, int tag = 0,
               std::chrono::milliseconds timeout = kDefault) {
    return transfer(true, tensor, to, tag, timeout);
  }
  /// Receives into `tensor`, whose dtype and size must be those of the sent tensor: otherwise
  /// wait() throws `invalid` on both ranks.
  Pending recv(const at::Tensor& tensor, int from, int tag = 0,
               std::chrono::milliseconds timeout = kDefault) {
    return transfer(false, tensor, from, tag, timeout);
  }

  /// Skips the next `count` operations of a sequence on this rank and makes them fail on the other
  /// ranks with `error` and this rank's number. Call it if this rank cannot take part.
  void refuse(int count, const base::Error& error, uint32_t sequence = 0);

  int world_rank(int rank) const;

  /// Returns the error with which all further operations fail, or nullopt if the group is usable.
  std::optional<base::Error> failure() const;

  // The functions below implement c10d::Backend. c10d::Work::wait() throws base::Exception.

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
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& options) override;
  /// Splits along dimension 0, into equal parts if the sizes are empty.
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  /// Fails all in-flight operations with `cancelled`; the group stays usable.
  void abort() override;
  /// Closes the group, as the destructor does: in-flight and later operations fail (`cancelled`).
  void shutdown() override;

 private:
  Pending issue(const OpSpec& spec, std::chrono::milliseconds timeout, uint32_t sequence,
                const at::Tensor& tensor = {});
  std::shared_ptr<Operation> make_in_shared_memory(OpSpec spec, base::TimePoint deadline,
                                                   uint32_t sequence, const at::Tensor& tensor);
  Pending exchange(OpSpec spec, ExchangePlan plan, std::chrono::milliseconds timeout,
                   uint32_t sequence = 0);
  Pending transfer(bool sends, const at::Tensor& tensor, int peer, int tag,
                   std::chrono::milliseconds timeout);
  base::TimePoint deadline(std::chrono::milliseconds timeout) const;

  const c10::intrusive_ptr<c10d::Backend::Options> options_;
  size_t direct_bytes_ = 0;
  std::shared_ptr<Core> core_;
  std::vector<std::vector<int>> hosts_;  // group ranks by host, for allreduces over hosts
};

}  // namespace distrain::collective

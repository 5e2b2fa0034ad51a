#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/autograd/context.h"
#include "distrain/collective/staged_reduce_group.h"
#include "distrain/ddp/comm_hook.h"

namespace distrain::ddp {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  bool has_sparse_gradient = false;  ///< COO with one sparse dimension, as those of embeddings
};

/// Must be equal on all ranks, which DistributedDataParallel checks.
struct ReducerOptions {
  /// Size limits of the gradient buckets; the first bucket of each dtype and device has its own.
  size_t bucket_cap_bytes = size_t{25} << 20;
  size_t first_bucket_bytes = size_t{1} << 20;
  /// Lets a pass leave out parameters. A parameter counts as zero on a rank that leaves it out, and
  /// keeps its gradient if all ranks do. A plain backward() must reach at least one parameter.
  bool find_unused_parameters = false;
  /// Lets the first pass on each rank leave out parameters, and requires all others to leave out
  /// the same, which saves the collective of find_unused_parameters.
  bool static_graph = false;
  CommHook hook{};                ///< replaces the averaging of buckets if CommHook::run is set
  bool broadcast_buffers = true;  ///< of DistributedDataParallel::forward()
};

/// Averages the gradients of a model over the ranks of a group while the backward pass runs.
///
/// Each bucket holds parameters of one dtype and device, in reverse order of registration; the
/// first bucket is small. After the first pass the buckets are rebuilt in the order in which rank 0
/// received the gradients. A bucket's allreduce starts when its gradients are complete and the
/// allreduces of all earlier buckets have started. (Li et al., "PyTorch Distributed", VLDB 2020.)
///
/// A plain `loss.backward()` needs no other call: hooks on the parameters feed the reducer, and
/// backward() returns with the means in `.grad`, a view of its bucket, to which the next pass adds
/// without a copy. Change it, replace it or set it to none as any other gradient. An autograd
/// context must be announced by expect(); if a pass of another context reaches a parameter, it
/// fails with `invalid` on all ranks. All ranks must run the same passes in the same order, one at
/// a time; a concurrent pass fails with `invalid`. Reducers of a StagedReduceGroup are independent
/// of each other, but their first passes must end in the same order on all ranks.
///
/// count_forward(), expect() and set_step() number the passes. If a rank has left out a backward
/// pass, its next pass is not averaged with a different pass of the other ranks: backward() throws
/// `invalid` on all ranks, naming that rank and both passes, in this pass and all later ones.
/// Forwards in eval mode or without gradients do not count. Passes over contexts count separately.
///
/// If a parameter got no gradient (see find_unused_parameters), or a sparse one that was not
/// announced, on some rank, backward() throws `invalid` on all ranks, naming the rank and the
/// parameter. If another rank's pass failed, backward() throws `remote_failed`. It also throws the
/// errors of the collectives and the hook. A context's gradients are then unchanged; after a plain
/// pass call zero_grad(), because `.grad` may lack earlier passes.
class Reducer {
 public:
  using Options = ReducerOptions;

  /// Skips parameters that require no gradient. All ranks pass the same parameters in the same
  /// order and create the Reducers of a group in the same order. Throws `invalid` if a parameter is
  /// not a dense leaf or already has a post-accumulate hook.
  Reducer(const std::vector<NamedParameter>& parameters,
          std::shared_ptr<collective::ReduceGroup> group, Options options = {});
  /// Averages the gradients by a StagedReduceGroup over `backend`.
  Reducer(const std::vector<NamedParameter>& parameters,
          c10::intrusive_ptr<collective::Backend> backend, Options options = {})
      : Reducer(parameters, std::make_shared<collective::StagedReduceGroup>(std::move(backend)),
                options) {}
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// If `is_local`, a pass over `context` only adds to this rank's gradients. Otherwise
  /// announces a pass over `context`, to average the parameters' gradients that the pass computes.
  /// A plain backward() in the context counts as the pass. The pass fails with `invalid` if it
  /// reaches no parameter. If no rank runs the pass before the context ends, nothing fails. If only
  /// this rank does not run the pass, backward() on the other ranks throws `remote_failed`, naming
  /// this rank, once this rank begins another pass or calls expect(). Thread-safe.
  void expect(const autograd::ContextRef& context, bool is_local = false);

  /// Counts a forward pass outside of autograd contexts. The plain backward passes until the next
  /// call belong to this forward pass, except that the first one belongs to the last forward pass
  /// that is not `is_local` and has had none. All ranks call count_forward() or none. Thread-safe.
  void count_forward(bool is_local = false);

  /// Sets the job's step number of later passes, from 1; 0 means unknown. If the ranks know the
  /// step, they also detect a rank that skips a forward pass and its backward pass. Thread-safe.
  void set_step(uint64_t step);

  /// Multiplies the means of later passes by `factor`: group size / N turns the mean over all ranks
  /// into one over the N ranks that have data, if the others have zero gradients. All ranks must
  /// set the same factor. Call it between passes.
  void scale_means(double factor);

  /// Returns a duplicate of the constructor's `group`, or `group` itself if it has no duplicate.
  collective::ReduceGroup& group() const;

  /// With find_unused_parameters: returns how many ranks used each parameter in the last pass.
  at::Tensor used() const;

  /// Returns the names of the parameters in each bucket, for tests and diagnosis.
  std::vector<std::vector<std::string>> buckets() const;

 private:
  class Impl;
  struct Hook;
  std::shared_ptr<Impl> impl_;
};

}  // namespace distrain::ddp

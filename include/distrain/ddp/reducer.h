#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/autograd/context.h"
#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/ddp/gradient_source.h"

namespace distrain::ddp {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

struct ReducerOptions {
  size_t bucket_cap_bytes = size_t{25} << 20;
  size_t first_bucket_bytes = size_t{1} << 20;
};

/// Replaces the gradients of a model's parameters by their mean over the ranks of a group, while
/// the backward pass that computes them still runs.
///
/// Parameters are put into buckets of one dtype and device each, in the reverse order of their
/// registration, the first bucket small; after the first pass anew, in the order in which rank 0
/// saw their gradients come. A bucket's allreduce starts when all its gradients are there, always
/// in the order of the buckets. (Li et al., "PyTorch Distributed", VLDB 2020.)
///
/// A plain `loss.backward()` needs nothing else: hooks on the parameters feed the reducer, and
/// backward() returns with the mean in `.grad`. For passes of an autograd context the reducer has
/// to be told of the context by expect(), which DistributedDataParallel::forward does: a pass of
/// another one that reaches a parameter fails with `invalid`, on all ranks. Every rank must run the
/// same passes in the same order. One pass at a time: a second one beside it fails with `invalid`.
/// Reducers of one group are independent of each other where that has more than one order
/// (StagedReduceGroup only), but their first passes have to end in the same order on all ranks.
///
/// Passes are numbered by the forwards that count_forward() and expect() are told of, which are
/// DistributedDataParallel's while training and with gradients enabled, and by set_step(). A rank
/// that has left out a backward is not averaged with another's next pass: backward() throws
/// `invalid` on all ranks, naming that rank and both passes, in that pass and, as the ranks stay
/// apart, in those after it. Forwards in eval mode or without gradients do not count, so ranks may
/// make as many of them as they like. Passes with and without a context count apart.
///
/// backward() throws `invalid` on every rank when a parameter got no gradient or a sparse one on
/// some rank, naming that rank and all such parameters; what else a collective can throw; and
/// `remote_failed` when the pass of another rank failed. Gradients are then left as they were.
class Reducer {
 public:
  using Options = ReducerOptions;

  /// Those that require no gradient are left out. Same parameters in the same order on all ranks,
  /// and the Reducers of one group are made in the same order.
  /// Throws `invalid` if one is not a dense leaf, or has a post-accumulate hook already.
  Reducer(const std::vector<NamedParameter>& parameters,
          std::shared_ptr<collective::ReduceGroup> group, Options options = {});
  /// Over a StagedReduceGroup.
  Reducer(const std::vector<NamedParameter>& parameters,
          c10::intrusive_ptr<collective::Backend> backend, Options options = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// From now on reduces the gradients of the passes of this context, on this rank, that reach the
  /// parameters. The next one has to: it fails with `invalid` if it reaches none. If none comes
  /// until the context ends, that counts for a failed pass of this rank: nothing happens if it is
  /// so on all ranks; otherwise the backward() of those that ran theirs throws `remote_failed`
  /// naming this one, when this one comes to its next expect() or pass. A plain backward() of the
  /// thread whose current context it is will do, too. Thread-safe.
  void expect(const autograd::ContextRef& context);

  /// A forward outside of all contexts, whose backward is to come: the passes until the next one
  /// are of this one. On all ranks, or on none. Thread-safe.
  void count_forward();

  /// The passes from now on are of this step of the job, from 1; 0: of no known one. With it a rank
  /// that leaves out forward and backward is noticed, too. Thread-safe.
  void set_step(uint64_t step);

  /// Where it averages.
  collective::ReduceGroup& group() const;

  /// Reduces the gradients of another engine's pass, too. Each rank calls it before its backward.
  void attach(GradientPass& pass);

  /// The names in each bucket, for tests and diagnosis.
  std::vector<std::vector<std::string>> buckets() const;

 private:
  class Impl;
  struct Hook;
  std::shared_ptr<Impl> impl_;
};

}  // namespace distrain::ddp

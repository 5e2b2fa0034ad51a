// The end of a Reducer's pass: waits for the collectives and hands out the means.

#include <cmath>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "distrain/rpc/error.h"
#include "distrain/rpc/to_device.h"
#include "reducer_impl.h"

namespace distrain::ddp {

// Stores a gradient for each parameter that the pass leaves out: that of earlier passes, or zero.
void Reducer::Impl::store_unused_locked(const Target& target,
                                        const std::function<bool(size_t)>& is_unused) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (slots_[i].last_pass == pass_ || !is_unused(i)) continue;
    const at::Tensor& parameter = parameters_[i];
    const at::Tensor earlier = target ? target->gradient(parameter) : parameter.grad();
    if (!locally_used_.contains(i)) {
      unused_[i] = true;
      if (!knows_unused_) used_.data_ptr<double>()[i] = 0;
      // If no rank uses the parameter, its gradient must keep its bits.
      if (!target && earlier.defined()) parameter.mutable_grad() = earlier.clone();
    }
    at::Tensor gradient = earlier.defined() ? earlier : at::zeros_like(parameter);
    if (sparse_.contains(i)) gradient = gradient.to_sparse(1);
    store_locked(i, gradient, /*is_unused=*/true);
  }
}

// Stores the gradients of parameters that a plain pass will leave out, as its graph tells when the
// pass begins, so that the allreduces of their buckets need not wait for the end of the pass.
void Reducer::Impl::store_unused_of_graph_locked() {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!finds_unused() || !nodes || nodes->empty()) return;
  const auto is_used = [&](size_t i) {
    const auto leaf = torch::autograd::impl::try_get_grad_accumulator(parameters_[i]);
    return leaf && nodes->contains(leaf.get());
  };
  for (size_t i = 0; knows_unused_ && i < parameters_.size(); ++i) {
    if (unused_[i] && is_used(i)) return fail_locked(i, kNotStatic);
  }
  store_unused_locked({}, [&](size_t i) { return (!knows_unused_ || unused_[i]) && !is_used(i); });
}

// Called in a catch block. Returns the error, with the hook's name unless a collective failed.
Error Reducer::Impl::hook_error(size_t bucket) const {
  Error error = rpc::error_in_flight(ErrorKind::kRemoteFailed);
  if (!options_.hook.run || error.rank >= 0) return error;
  return {error.kind,
          fmt::format("the communication hook '{}' of rank {} failed for bucket {}: {}",
                      options_.hook.name, world_rank(), bucket, error.message),
          world_rank(), "Reducer"};
}

// Returns the mean of the ranks' sparse gradients: averages a list of the rows of all ranks, in
// which each rank fills in its own rows, and adds rows with the same number.
at::Tensor Reducer::Impl::sparse_mean(const at::Tensor& mine) {
  const int64_t size = group_->size(), rank = group_->rank(), rows = mine._nnz();
  const at::Tensor counts = at::zeros({size}, at::kDouble);
  counts.data_ptr<double>()[rank] = static_cast<double>(rows * size);
  average(counts)->wait();
  if (counts.min().item<double>() < 0 || counts.max().item<double>() > double(mine.size(0))) {
    throw base::Exception(ErrorKind::kProtocol, "a rank has more rows than its sparse gradient");
  }
  const at::Tensor ends = counts.round().to(at::kLong).cumsum(0);
  auto shape = mine.values().sizes().vec();
  shape[0] = ends[-1].item<int64_t>();
  const at::Tensor values = at::zeros(shape, mine.values().options());
  const at::Tensor numbers = at::zeros({shape[0]}, values.options().dtype(at::kDouble));
  const int64_t first = ends[rank].item<int64_t>() - rows;
  numbers.narrow(0, first, rows).copy_(mine.indices()[0]).mul_(size);
  values.narrow(0, first, rows).copy_(mine.values());
  for (const auto& work : {average(numbers), average(values)}) work->wait();
  const at::Tensor index = numbers.round().to(at::kLong);
  rpc::expect_rows(index, mine);
  return at::sparse_coo_tensor(index.unsqueeze(0), values.mul_(mean_factor_), mine.sizes())
      .coalesce();
}

void Reducer::Impl::finish(uint64_t pass, const Target& target) {
  std::optional<Error> error;
  {
    std::lock_guard lock(mutex_);
    if (AnnouncedContext* const announced =
            expecting_locked(pass)) {  // the pass has reached no parameter
      begin_locked(pass, number_by(announced->count, announced->context.id()));
      announced->expected = 0;
    }
    if (pass != pass_ || state_ == PassState::kIdle || state_ == PassState::kFinalising) return;
    // Try again, because a pass that began on an engine thread saw no current autograd context.
    if (!target) answer_expectation_locked();
    if (finds_unused() && !failure_) {
      store_unused_locked(target, [this](size_t i) { return !knows_unused_ || unused_[i]; });
    }
    transition_locked(PassState::kFinalising);
    error = std::exchange(failure_, {});
    if (!error) error = missing_error_locked();
  }
  const auto refuse_the_rest = [&] {
    if (!gave_up_.exchange(true)) group_->refuse(collectives_locked() - made_, *error);
  };
  if (error) refuse_the_rest();
  for (size_t i = 0; i < started_; ++i) {
    try {
      buckets_[i].wait();
    } catch (...) {
      if (!error) error = hook_error(i);
      refuse_the_rest();
    }
  }
  if (!error) {
    try {
      std::vector<int64_t> order;
      if (measures_locked()) order = agreed_order();
      if (counts_use_locked()) {
        average(used_)->wait();
        used_.mul_(group_->size());
      }
      for (const size_t i : sparse_) sparse_gradients_[i] = sparse_mean(sparse_gradients_[i]);
      if (waits_for_hooks()) average(at::zeros({1}))->wait();
      store_means(target);
      std::lock_guard lock(mutex_);
      if (!order.empty()) {
        make_buckets(order);
        measured_pass_ = pass_;
      }
      knows_unused_ = options_.static_graph;
      locally_used_.clear();
    } catch (...) {
      error = rpc::error_in_flight(ErrorKind::kInternal);
      refuse_the_rest();
    }
  }
  {
    std::lock_guard lock(mutex_);
    if (error) {
      for (Bucket& bucket : buckets_) bucket.drop();
    }
    transition_locked(PassState::kIdle);
  }
  if (error) throw base::Exception(std::move(*error));
}

void Reducer::Impl::store_means(const Target& target) {
  const auto store = [&](size_t index, const at::Tensor& mean) {
    const at::Tensor& parameter = parameters_[index];
    if (used_.defined() && used_.const_data_ptr<double>()[index] < 0.5) return;
    if (target) {
      target->set_gradient(parameter, mean);
    } else if (parameter.grad().defined() && parameter.grad().requires_grad()) {
      parameter.grad().detach().copy_(mean);  // keeps the graph of create_graph
    } else {
      parameter.mutable_grad() = mean;
    }
  };
  for (Bucket& bucket : buckets_) {
    if (mean_factor_ != 1) bucket.flat().mul_(mean_factor_);
    for (size_t slot = 0; slot < bucket.members().size(); ++slot) {
      store(bucket.members()[slot], bucket.view(slot));
    }
    bucket.end();
  }
  for (const size_t i : sparse_) store(i, std::exchange(sparse_gradients_[i], {}));
}

// Returns the order in which rank 0's gradients became ready, because the ranks' orders may differ.
// Sends it by a mean (exact in doubles), because a broadcast might succeed on some ranks only.
std::vector<int64_t> Reducer::Impl::agreed_order() {
  const at::Tensor shared = at::zeros({static_cast<int64_t>(parameters_.size())}, at::kDouble);
  auto* const values = shared.data_ptr<double>();
  if (group_->rank() == 0) {
    for (size_t i = 0; i < arrival_.size(); ++i) {
      values[i] = static_cast<double>(arrival_[i] * group_->size());
    }
  }
  average(shared)->wait();
  std::vector<int64_t> agreed(parameters_.size());
  std::transform(values, values + agreed.size(), agreed.begin(),
                 [](double place) { return std::llround(place); });
  std::vector<int64_t> sorted = agreed;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] == static_cast<int64_t>(i)) continue;
    throw base::Exception(ErrorKind::kProtocol, "rank " + std::to_string(group_->world_rank(0)) +
                                                    " sent an order of gradients that is none");
  }
  return agreed;
}

std::optional<Error> Reducer::Impl::missing_error_locked() const {
  std::string missing;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].last_pass != pass_) missing += (missing.empty() ? "'" : ", '") + names_[i] + "'";
  }
  if (missing.empty()) return std::nullopt;
  return invalid("no gradient came for " + missing + pass_text() +
                 (knows_unused_ ? ": the first pass of the static graph used it"
                                : ": every parameter must take part in the loss"));
}

}  // namespace distrain::ddp

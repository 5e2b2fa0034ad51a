// The functions of Backend that give each rank a part of other ranks' data.
#include "calls.h"
#include "core.h"

namespace distrain::collective {

namespace {

// Throws `invalid` unless `tensors` has one tensor for each of `size` ranks, like `one`.
void check_parts(const char* op, const Tensors& tensors, const at::Tensor& one, int size,
                 bool are_results) {
  bool fits = tensors.size() == static_cast<size_t>(size);
  for (const at::Tensor& tensor : tensors) {
    are_results ? check_result(op, tensor) : check_tensor(op, tensor);
    fits = fits && tensor.scalar_type() == one.scalar_type() && tensor.numel() == one.numel();
  }
  if (fits) return;
  refuse_call(op, ": needs one ", are_results ? "output" : "input", " a rank, of the ",
              are_results ? "input" : "output", "'s dtype and size");
}

// Checks the parts on the root. Throws `invalid` if another rank has some.
void check_parts_of_root(const char* op, const Tensors& tensors, const at::Tensor& one, int size,
                         bool is_root, bool are_results) {
  if (is_root) return check_parts(op, tensors, one, size, are_results);
  if (!tensors.empty()) {
    refuse_call(op, ": only the root has ", are_results ? "outputs" : "inputs");
  }
}

// Returns the parts of `tensor` along dimension 0, equal ones if `sizes` is empty.
Tensors split_rows(const at::Tensor& tensor, std::vector<int64_t> sizes, int ranks) {
  check_tensor("all_to_all", tensor);
  if (tensor.dim() == 0) refuse_call("all_to_all", " of a tensor without dimensions: view(1) it");
  if (sizes.empty() && tensor.size(0) % ranks == 0) {
    sizes.assign(static_cast<size_t>(ranks), tensor.size(0) / ranks);
  }
  int64_t sum = 0;
  bool fits = sizes.size() == static_cast<size_t>(ranks);
  for (const int64_t size : sizes) {
    fits = fits && size >= 0 && size <= tensor.size(0) - sum;
    if (fits) sum += size;
  }
  if (!fits || sum != tensor.size(0)) {
    refuse_call("all_to_all", ": needs one split size a rank, which add up to the size ",
                tensor.size(0), " of dimension 0, or none and a multiple of the number of ranks");
  }
  return tensor.detach().split_with_sizes(sizes, 0);
}

// Returns the parts of a contiguous tensor that has the data of all ranks.
Tensors rows(const char* op, const at::Tensor& all, const at::Tensor& one, int ranks) {
  check_tensor(op, all);
  if (all.numel() != one.numel() * ranks) {
    refuse_call(op, ": needs an input of the output's size times the number of ranks");
  }
  return all.detach().contiguous().view({ranks, one.numel()}).unbind(0);
}

}  // namespace

Pending Backend::exchange(OpSpec spec, ExchangePlan plan, std::chrono::milliseconds timeout,
                          uint32_t sequence) {
  plan.sends.resize(static_cast<size_t>(size_));
  plan.outputs.resize(static_cast<size_t>(size_));
  const auto operation = make_exchange(spec, deadline(timeout), rank_, std::move(plan));
  core_->issue(operation, sequence);
  return Pending(operation);
}

Pending Backend::broadcast(const at::Tensor& tensor, int root, std::chrono::milliseconds timeout,
                           const OperationOptions& options) {
  check_result("broadcast", tensor);
  check_root("broadcast", root, size_);
  OpSpec spec = spec_of(OpKind::kBroadcast, tensor, root);
  spec.pass = options.pass;
  const auto ranks = static_cast<size_t>(size_);
  ExchangePlan plan{.rooted = true, .outputs = Tensors(ranks)};
  if (rank_ == root) {
    plan.sends.assign(ranks, tensor);
  } else {
    plan.outputs[spec.root] = tensor;
  }
  return exchange(spec, std::move(plan), timeout, options.sequence);
}

Pending Backend::allgather(const at::Tensor& input, Tensors outputs,
                           std::chrono::milliseconds timeout) {
  check_tensor("allgather", input);
  check_parts("allgather", outputs, input, size_, true);
  ExchangePlan plan{.sends = Tensors(outputs.size(), input), .outputs = std::move(outputs)};
  return exchange(spec_of(OpKind::kAllgather, input), std::move(plan), timeout);
}

Pending Backend::reduce_scatter(const at::Tensor& output, Tensors inputs, ReduceOp op,
                                std::chrono::milliseconds timeout) {
  check_reduction("reduce_scatter", output, op);
  check_parts("reduce_scatter", inputs, output, size_, false);
  return exchange(spec_of(OpKind::kReduceScatter, output, 0, op),
                  {.sends = std::move(inputs), .result = output}, timeout);
}

Pending Backend::all_to_all(Tensors outputs, Tensors inputs, std::chrono::milliseconds timeout) {
  const auto ranks = static_cast<size_t>(size_);
  bool fits = outputs.size() == ranks && inputs.size() == ranks;
  for (const at::Tensor& output : outputs) check_result("all_to_all", output);
  for (const at::Tensor& input : inputs) check_tensor("all_to_all", input);
  OpSpec spec{.kind = OpKind::kAllToAll};
  for (const Tensors* tensors : {&outputs, &inputs}) {
    for (const at::Tensor& each : *tensors) {
      fits = fits && each.scalar_type() == inputs[0].scalar_type();
      if (tensors == &inputs) spec.bytes += each.nbytes();
    }
  }
  if (!fits) {
    refuse_call("all_to_all", ": needs one input and one output a rank, all of one dtype");
  }
  const auto own = static_cast<size_t>(rank_);
  if (outputs[own].numel() != inputs[own].numel()) {
    refuse_call("all_to_all", ": the input for the own rank has ", inputs[own].numel(),
                " elements, its output ", outputs[own].numel());
  }
  spec.dtype = inputs[0].scalar_type();
  return exchange(spec, {.sends = std::move(inputs), .outputs = std::move(outputs)}, timeout);
}

Pending Backend::gather(const at::Tensor& input, Tensors outputs, int root,
                        std::chrono::milliseconds timeout) {
  check_tensor("gather", input);
  check_root("gather", root, size_);
  check_parts_of_root("gather", outputs, input, size_, rank_ == root, true);
  const OpSpec spec = spec_of(OpKind::kGather, input, root);
  Tensors sends(static_cast<size_t>(size_));
  sends[spec.root] = input;
  return exchange(spec, {.rooted = true, .sends = std::move(sends), .outputs = std::move(outputs)},
                  timeout);
}

Pending Backend::scatter(const at::Tensor& output, Tensors inputs, int root,
                         std::chrono::milliseconds timeout) {
  check_result("scatter", output);
  check_root("scatter", root, size_);
  check_parts_of_root("scatter", inputs, output, size_, rank_ == root, false);
  const OpSpec spec = spec_of(OpKind::kScatter, output, root);
  Tensors outputs(static_cast<size_t>(size_));
  outputs[spec.root] = output;
  return exchange(spec, {.rooted = true, .sends = std::move(inputs), .outputs = std::move(outputs)},
                  timeout);
}

Pending Backend::reduce(const at::Tensor& tensor, int root, ReduceOp op,
                        std::chrono::milliseconds timeout) {
  check_reduction("reduce", tensor, op);
  check_root("reduce", root, size_);
  const OpSpec spec = spec_of(OpKind::kReduce, tensor, root, op);
  ExchangePlan plan{.rooted = true, .sends = Tensors(static_cast<size_t>(size_))};
  plan.sends[spec.root] = tensor;
  if (rank_ == root) plan.result = tensor;
  return exchange(spec, std::move(plan), timeout);
}

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& options) {
  if (outputs.size() != inputs.size()) {
    refuse_call("allgather", ": needs one list of outputs for each input");
  }
  std::vector<Pending> operations;
  Tensors results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    operations.push_back(allgather(inputs[i], outputs[i], options.timeout));
    results.insert(results.end(), outputs[i].begin(), outputs[i].end());
  }
  return c10::make_intrusive<Work>(rank_, c10d::OpType::ALLGATHER, std::move(operations),
                                   std::move(results));
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::AllgatherOptions& options) {
  check_tensor("allgather", output);
  if (!output.is_contiguous() || output.numel() != input.numel() * size_) {
    refuse_call("allgather",
                ": needs a contiguous output of the input's size times the number of ranks");
  }
  Pending operation =
      allgather(input, output.detach().view({size_, input.numel()}).unbind(0), options.timeout);
  return make_work(rank_, c10d::OpType::_ALLGATHER_BASE, std::move(operation), {output});
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& options) {
  if (outputs.size() != 1 || inputs.size() != 1) {
    refuse_call("reduce_scatter", ": needs one output and one list of inputs");
  }
  Pending operation = reduce_scatter(outputs[0], inputs[0], options.reduceOp.op_, options.timeout);
  return make_work(rank_, c10d::OpType::REDUCE_SCATTER, std::move(operation), outputs);
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& options) {
  check_result("reduce_scatter", output);
  Pending operation = reduce_scatter(output, rows("reduce_scatter", input, output, size_),
                                     options.reduceOp.op_, options.timeout);
  return make_work(rank_, c10d::OpType::_REDUCE_SCATTER_BASE, std::move(operation), {output});
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  Pending operation = all_to_all(outputs, inputs, options.timeout);
  return make_work(rank_, c10d::OpType::ALLTOALL, std::move(operation), outputs);
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                               std::vector<int64_t>& output_sizes,
                               std::vector<int64_t>& input_sizes,
                               const c10d::AllToAllOptions& options) {
  check_result("all_to_all", output);
  Pending operation = all_to_all(split_rows(output, output_sizes, size_),
                                 split_rows(input, input_sizes, size_), options.timeout);
  return make_work(rank_, c10d::OpType::ALLTOALL_BASE, std::move(operation), {output});
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::GatherOptions& options) {
  if (inputs.size() != 1 || outputs.size() > 1) {
    refuse_call("gather", ": needs one input, and on the root one list of outputs");
  }
  Tensors results = outputs.empty() ? Tensors() : outputs[0];
  Pending operation =
      gather(inputs[0], results, static_cast<int>(options.rootRank), options.timeout);
  return make_work(rank_, c10d::OpType::GATHER, std::move(operation), std::move(results));
}

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ScatterOptions& options) {
  if (outputs.size() != 1 || inputs.size() > 1) {
    refuse_call("scatter", ": needs one output, and on the root one list of inputs");
  }
  Pending operation = scatter(outputs[0], inputs.empty() ? Tensors() : inputs[0],
                              static_cast<int>(options.rootRank), options.timeout);
  return make_work(rank_, c10d::OpType::SCATTER, std::move(operation), outputs);
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (tensors.size() != 1 || options.rootTensor != 0) refuse_call("reduce", ": needs one tensor");
  Pending operation =
      reduce(tensors[0], static_cast<int>(options.rootRank), options.reduceOp.op_, options.timeout);
  return make_work(rank_, c10d::OpType::REDUCE, std::move(operation), tensors);
}

}  // namespace distrain::collective

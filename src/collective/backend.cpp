#include "distrain/collective/backend.h"

#include "calls.h"
#include "core.h"
#include "distrain/rpc/error.h"
#include "operations.h"

namespace distrain::collective {

using base::Error;
using base::ErrorKind;

namespace {

c10::intrusive_ptr<c10d::Backend::Options> make_options(const Group& group,
                                                        const Backend::Settings& settings) {
  auto options = c10::make_intrusive<c10d::Backend::Options>("distrain", settings.timeout);
  options->group_name = std::to_string(group.id);
  for (int rank : group.ranks) {
    options->global_ranks_in_group.push_back(static_cast<uint64_t>(rank));
  }
  return options;
}

}  // namespace

Backend::Backend(rpc::Channel& channel, base::Executor& executor, Group group, Settings settings)
    : c10d::Backend(
          static_cast<int>(std::ranges::find(group.ranks, channel.rank()) - group.ranks.begin()),
          static_cast<int>(group.ranks.size())),
      options_(make_options(group, settings)),
      core_(std::make_shared<Core>(channel, executor, group.id, std::move(group.ranks),
                                   settings.shared_memory)) {
  direct_bytes_ = settings.direct_bytes >= 0 ? static_cast<size_t>(settings.direct_bytes)
                  : size_ == 2               ? kDirectBytesOfTwo
                                             : kDirectBytes;
  core_->open();
  hosts_ = find_hosts(channel, *core_);  // a rank that returns from now on ends the group
}

Backend::~Backend() { core_->close(); }

Pending Backend::issue(const OpSpec& spec, std::chrono::milliseconds timeout, uint32_t sequence,
                       const at::Tensor& tensor) {
  const base::TimePoint end = deadline(timeout);
  std::shared_ptr<Operation> operation;
  std::optional<Error> error;
  try {
    operation = make_in_shared_memory(spec, end, sequence, tensor);
  } catch (...) {
    // Take part in the order of operations none the less.
    error = rpc::error_in_flight(ErrorKind::kInternal);
    error->op = describe(spec);
  }
  if (!operation) operation = make_operation(spec, end, rank_, size_, hosts_, tensor);
  core_->issue(operation, sequence, std::move(error));
  return Pending(operation);
}

// Returns null if the operation needs messages. All ranks must choose alike.
std::shared_ptr<Operation> Backend::make_in_shared_memory(OpSpec spec, base::TimePoint deadline,
                                                          uint32_t sequence,
                                                          const at::Tensor& tensor) {
  const bool is_barrier = spec.kind == OpKind::kBarrier;
  const bool is_chunked = spec.kind == OpKind::kAllreduceChunked;
  const bool is_over_hosts = spec.kind == OpKind::kAllreduceOverHosts;
  if (is_over_hosts || sequence >= SharedSpace::kSequences || size_ == 1) return nullptr;
  const auto space = core_->shared_space(deadline).value();
  if (!space) return nullptr;
  const auto place = is_chunked ? space->place_of(tensor) : std::nullopt;
  if (!place && spec.bytes > SharedSpace::kSlotBytes) return nullptr;
  spec.place = place.value_or(0);
  spec.kind = is_barrier ? OpKind::kBarrierShared
              : place    ? OpKind::kAllreduceInPlace
                         : OpKind::kAllreduceShared;
  const bool is_direct = is_barrier || (!is_chunked && size_ <= kMostDirectRanks);
  return make_shared_operation(spec, deadline, space, is_direct, tensor);
}

at::Tensor Backend::allocate(size_t bytes) {
  const auto private_memory = [&] { return at::empty({static_cast<int64_t>(bytes)}, at::kByte); };
  if (bytes <= direct_bytes_) return private_memory();
  const auto space = core_->shared_space(deadline(kDefault)).value();
  return space ? space->allocate(bytes) : private_memory();
}

base::TimePoint Backend::deadline(std::chrono::milliseconds timeout) const {
  if (timeout < std::chrono::milliseconds(0)) timeout = options_->timeout;
  return timeout.count() > 0 ? base::deadline_after(timeout) : base::kNever;
}

uint32_t Backend::new_sequence() { return core_->new_sequence(); }

Pending Backend::allreduce(const at::Tensor& tensor, ReduceOp op, std::chrono::milliseconds timeout,
                           const OperationOptions& options) {
  check_reduction("allreduce", tensor, op);
  OpSpec spec = spec_of(OpKind::kAllreduceDirect, tensor, 0, op);
  spec.pass = options.pass;
  if (spec.bytes > direct_bytes_) {
    spec.kind = hosts_.empty() ? OpKind::kAllreduceChunked : OpKind::kAllreduceOverHosts;
    spec.root = static_cast<uint32_t>(hosts_.size());
  }
  return issue(spec, timeout, options.sequence, tensor);
}

Pending Backend::enter_barrier(std::chrono::milliseconds timeout) {
  return issue(OpSpec{}, timeout, 0);
}

void Backend::refuse(int count, const Error& error, uint32_t sequence) {
  core_->refuse(count, error, sequence);
}

int Backend::world_rank(int rank) const { return core_->world_rank(rank); }
std::optional<Error> Backend::failure() const { return core_->failure(); }
uint64_t Backend::getSequenceNumberForGroup() { return core_->next_number(); }

void Backend::abort() {
  core_->abort({ErrorKind::kCancelled, "the collectives of this rank were aborted"});
}

void Backend::shutdown() { core_->close(); }

c10::intrusive_ptr<c10d::Work> Backend::allreduce(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& options) {
  // Check all tensors first: if only part of the list started, the ranks would get out of step.
  for (const at::Tensor& each : tensors) check_reduction("allreduce", each, options.reduceOp.op_);
  std::vector<Pending> operations;
  for (const at::Tensor& tensor : tensors) {
    operations.push_back(allreduce(tensor, options.reduceOp.op_, options.timeout));
  }
  return c10::make_intrusive<Work>(rank_, c10d::OpType::ALLREDUCE, std::move(operations), tensors);
}

c10::intrusive_ptr<c10d::Work> Backend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, static_cast<const c10d::AllreduceOptions&>(options));
}

c10::intrusive_ptr<c10d::Work> Backend::broadcast(std::vector<at::Tensor>& tensors,
                                                  const c10d::BroadcastOptions& options) {
  for (const at::Tensor& tensor : tensors) check_result("broadcast", tensor);
  std::vector<Pending> operations;
  for (const at::Tensor& tensor : tensors) {
    operations.push_back(broadcast(tensor, static_cast<int>(options.rootRank), options.timeout));
  }
  return c10::make_intrusive<Work>(rank_, c10d::OpType::BROADCAST, std::move(operations), tensors);
}

c10::intrusive_ptr<c10d::Work> Backend::barrier(const c10d::BarrierOptions& options) {
  return make_work(rank_, c10d::OpType::BARRIER, enter_barrier(options.timeout), {});
}

}  // namespace distrain::collective

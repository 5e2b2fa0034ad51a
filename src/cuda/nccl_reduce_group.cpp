#include "distrain/cuda/nccl_reduce_group.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "communicator_set.h"
#include "distrain/base/future.h"
#include "distrain/base/serial_thread.h"

namespace distrain::cuda {

using base::Error;
using base::ErrorKind;
using collective::Backend;
using collective::Pending;
using collective::ReduceGroup;
using collective::ReduceWork;

// Note [Operations over NCCL]
//
//   the caller  marks its current stream and puts the operation into the line.
//   the line    a thread of the group, one operation after the other: an allgather on the Backend
//               of what this rank is about to do. When all ranks have come and are about to do the
//               same, it gives the operation to NCCL, in the communicator's stream, behind the
//               caller's mark.
//   the waiter  waits for the line, and makes its current stream wait for NCCL's work.
//
// So NCCL is only ever given what all ranks have agreed to. A rank that refuses, or whose agreement
// fails, leaves its communicators to end when their work has, without giving them more. Where the
// ranks come out of step all the same (one ran into its deadline just before the last one came),
// some have communicators and some have none: the next agreement shows that, and all end theirs.
// What NCCL was given and another rank never does, because it died or gave up, the Watch finds.
//
// A communicator is made by the first operation on a device: after its agreement, which says that
// all ranks make one, rank 0's id is broadcast, and a barrier follows the making. A rank that
// cannot do its part in these refuses.

namespace {

enum class Kind : int64_t { kMean, kBroadcast };

/// What the ranks agree on.
struct Plan {
  Kind kind;
  int64_t root;
  int64_t dtype;
  int64_t bytes;
  int64_t device;  // its number among those that the group has met
  int64_t has_communicator;

  friend bool operator==(const Plan&, const Plan&) = default;

  std::string text() const {
    return (kind == Kind::kMean ? "mean" : "broadcast(root " + std::to_string(root) + ")") +
           " of " + std::to_string(bytes) + " bytes of " +
           c10::toString(static_cast<at::ScalarType>(dtype)) + " on its device number " +
           std::to_string(device + 1);
  }
};

class OnCpu final : public ReduceWork {
 public:
  explicit OnCpu(base::Future<Pending> called) : called_(std::move(called)) {}
  void wait() override { called_.wait().wait(); }

 private:
  const base::Future<Pending> called_;
};

class OverNccl final : public ReduceWork {
 public:
  /// Where NCCL's work ends, and the communicators that do it.
  struct Given {
    rpc::StreamPoint done;
    std::shared_ptr<CommunicatorSet> set;
  };

  OverNccl(c10::Device device, base::Future<Given> given)
      : device_(device), given_(std::move(given)) {}

  void wait() override {
    const Given given = given_.wait();
    if (const auto error = given.set->error()) throw base::Exception(*error);
    given.done.make_current_wait(device_);
  }

 private:
  const c10::Device device_;
  const base::Future<Given> given_;
};

}  // namespace

class NcclReduceGroup::Impl {
 public:
  Impl(c10::intrusive_ptr<Backend> control, Nccl nccl)
      : control_(std::move(control)),
        nccl_(std::move(nccl)),
        set_(std::make_shared<CommunicatorSet>()),
        watch_([backend = control_.get()] { return backend->failure(); },
               control_->getBackendOptions()->timeout),
        line_("distrain-nccl") {}

  const Backend& control() const { return *control_; }

  WorkPtr start(const at::Tensor& tensor) {
    if (!tensor.device().is_cpu()) return put(tensor, Kind::kMean, 0);
    return call_control(
        [this, tensor] { return control_->allreduce(tensor, Backend::ReduceOp::AVG); });
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) {
    if (!tensor.device().is_cpu()) return put(tensor, Kind::kBroadcast, root);
    return call_control([this, tensor, root] { return control_->broadcast(tensor, root); });
  }

  void refuse(int count, const Error& error) {
    if (count == 0) return;
    line_.post([this, count, error] {
      control_->refuse(count, error);
      renew_set();
    });
  }

 private:
  WorkPtr call_control(std::function<Pending()> call) {
    if (line_.idle()) return std::make_shared<OnCpu>(base::Future<Pending>::ready(call()));
    base::Promise<Pending> promise;
    auto work = std::make_shared<OnCpu>(promise.future());
    line_.post([this, call = std::move(call), promise = std::move(promise)]() mutable {
      try {
        promise.set(call());
      } catch (...) {
        promise.fail(base::current_error(ErrorKind::kInternal));
      }
    });
    return work;
  }

  WorkPtr put(const at::Tensor& tensor, Kind kind, int root) {
    base::Promise<OverNccl::Given> promise;
    auto work = std::make_shared<OverNccl>(tensor.device(), promise.future());
    line_.post([this, tensor, kind, root, before = rpc::StreamPoint::mark(tensor.device()),
                promise = std::move(promise)]() mutable {
      try {
        promise.set(run(tensor, kind, root, before));
      } catch (...) {
        promise.fail(base::current_error(ErrorKind::kInternal));
      }
    });
    return work;
  }

  // All below: on the line.

  // What NCCL has been given is still done.
  void renew_set() { set_ = std::make_shared<CommunicatorSet>(); }

  OverNccl::Given run(const at::Tensor& tensor, Kind kind, int root,
                      const rpc::StreamPoint& before) {
    if (set_->error()) renew_set();
    const size_t number = number_of(tensor.device());
    std::shared_ptr<Lane> lane = set_->find(number);
    try {
      agree({kind, root, static_cast<int64_t>(tensor.scalar_type()),
             static_cast<int64_t>(tensor.nbytes()), static_cast<int64_t>(number), lane != nullptr});
      if (!lane) lane = make_lane(number, tensor.device());
    } catch (...) {
      renew_set();
      throw;
    }
    const auto item = watch_.begin(set_, lane);
    try {
      rpc::StreamPoint done = give(*lane, tensor, kind, root, before);
      watch_.enqueued(item, done);
      return {std::move(done), set_};
    } catch (...) {
      watch_.forget(item);
      set_->end(base::current_error(ErrorKind::kInternal));
      throw base::Exception(*set_->error());  // the Watch's if it came first
    }
  }

  static rpc::StreamPoint give(Lane& lane, const at::Tensor& tensor, Kind kind, int root,
                               const rpc::StreamPoint& before) {
    std::lock_guard use(lane.in_use);
    before.make_wait(lane.stream);
    rpc::use_on_stream(tensor, lane.stream);
    if (kind == Kind::kMean) {
      lane.nccl->allreduce_mean(tensor, lane.stream);
    } else {
      lane.nccl->broadcast(tensor, root, lane.stream);
    }
    return rpc::StreamPoint::mark(lane.stream);
  }

  size_t number_of(c10::Device device) {
    const auto it = std::find(devices_.begin(), devices_.end(), device);
    if (it != devices_.end()) return static_cast<size_t>(it - devices_.begin());
    devices_.push_back(device);
    return devices_.size() - 1;
  }

  // Returns when all ranks have come with the same plan; takes one operation of the Backend.
  void agree(const Plan& mine) {
    const auto to_tensor = [](const Plan& plan) {
      const at::Tensor tensor = at::empty({sizeof(Plan)}, at::kByte);
      std::memcpy(tensor.data_ptr(), &plan, sizeof(Plan));
      return tensor;
    };
    std::vector<at::Tensor> plans;
    for (int i = 0; i < control_->getSize(); ++i) plans.push_back(to_tensor({}));
    control_->allgather(to_tensor(mine), plans).wait();
    for (int i = 0; i < control_->getSize(); ++i) {
      Plan theirs;
      std::memcpy(&theirs, plans[static_cast<size_t>(i)].data_ptr(), sizeof(Plan));
      if (theirs == mine) continue;
      const std::string who = "rank " + std::to_string(control_->world_rank(i));
      const std::string self = "rank " + std::to_string(control_->world_rank(control_->getRank()));
      const int64_t has_communicator =
          std::exchange(theirs.has_communicator, mine.has_communicator);
      if (theirs != mine) {
        throw base::Exception(
            Error{ErrorKind::kInvalid,
                  who + " called " + theirs.text() + " where " + self + " called " + mine.text(),
                  control_->world_rank(i), mine.text()});
      }
      const Error error{ErrorKind::kCancelled,
                        (has_communicator ? self : who) +
                            " gave up an earlier operation over NCCL that other ranks had begun",
                        control_->world_rank(i), mine.text()};
      set_->end(error);
      throw base::Exception(error);
    }
  }

  std::shared_ptr<Lane> make_lane(size_t number, c10::Device device) {
    // Of the next operation of the Backend, when this rank can't do its part.
    const auto or_refuse = [this](auto make) {
      try {
        return make();
      } catch (...) {
        control_->refuse(1, base::current_error(ErrorKind::kResources));
        throw;
      }
    };
    NcclId id{};
    const bool is_first = control_->getRank() == 0;
    if (is_first) id = or_refuse([&] { return nccl_.new_id(); });
    const at::Tensor sent = at::empty({static_cast<int64_t>(id.size())}, at::kByte);
    std::memcpy(sent.data_ptr(), id.data(), id.size());
    control_->broadcast(sent, 0).wait();
    std::memcpy(id.data(), sent.data_ptr(), id.size());
    auto nccl = or_refuse([&] {
      return nccl_.make_communicator(id, control_->getSize(), control_->getRank(), device.index());
    });
    control_->enter_barrier().wait();
    auto lane = std::make_shared<Lane>(std::move(nccl), rpc::side_stream(device));
    set_->add(number, lane);
    return lane;
  }

  const c10::intrusive_ptr<Backend> control_;
  const Nccl nccl_;
  std::shared_ptr<CommunicatorSet> set_;
  std::vector<c10::Device> devices_;
  Watch watch_;
  base::SerialThread line_;
};

NcclReduceGroup::NcclReduceGroup(c10::intrusive_ptr<Backend> control, Nccl nccl)
    : impl_(std::make_unique<Impl>(std::move(control), std::move(nccl))) {}

NcclReduceGroup::NcclReduceGroup(c10::intrusive_ptr<Backend> control, const Plugin& plugin)
    : NcclReduceGroup(std::move(control),
                      Nccl{[&plugin] { return plugin.new_nccl_id(); },
                           [&plugin](const NcclId& id, int size, int rank, int device_index) {
                             return plugin.make_communicator(id, size, rank, device_index);
                           }}) {}

NcclReduceGroup::~NcclReduceGroup() = default;

int NcclReduceGroup::rank() const { return impl_->control().getRank(); }
int NcclReduceGroup::size() const { return impl_->control().getSize(); }
int NcclReduceGroup::world_rank(int rank) const { return impl_->control().world_rank(rank); }

ReduceGroup::WorkPtr NcclReduceGroup::start(const at::Tensor& bucket) {
  return impl_->start(bucket);
}

ReduceGroup::WorkPtr NcclReduceGroup::broadcast(const at::Tensor& tensor, int root) {
  return impl_->broadcast(tensor, root);
}

void NcclReduceGroup::refuse(int count, const Error& error) { impl_->refuse(count, error); }

}  // namespace distrain::cuda

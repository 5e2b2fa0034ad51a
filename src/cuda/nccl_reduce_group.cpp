#include "distrain/cuda/nccl_reduce_group.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "communicator_set.h"
#include "distrain/collective/staged_reduce_group.h"
#include "distrain/cuda/load.h"

namespace distrain::cuda {

using base::Error;
using base::ErrorKind;
using collective::Backend;
using collective::PassNumber;
using collective::ReduceGroup;

// Note [Operations over NCCL]
//
//   caller  marks its current stream and puts the operation into the queue.
//   queue   exchanges the operation's description by an allgather on the Backend, on the group's
//           thread. If all descriptions are equal, it gives the operation to NCCL, in the
//           communicator's stream, behind the caller's mark.
//   waiter  waits for the queue, and orders its current stream behind NCCL's work.
//
// So NCCL only gets operations on which all ranks have agreed. A rank that refuses, or whose
// agreement fails, drops its communicators: they finish the work that they have and get no more. If
// ranks come out of step (one reaches its deadline just before the last rank comes), some have
// communicators and some have none; the next agreement finds that, and all drop theirs. If a rank
// dies or gives up after the agreement, the Watchdog notices the unfinished work. If wait() has
// returned by then, this rank sends the error in the next agreement, which fails on all ranks.
//
// The first operation on a device creates its communicator. When the ranks have agreed on that
// operation, rank 0 sends an NCCL id to all. Then the ranks exchange reports until all have joined
// the communicator or one has failed, so a rank learns of a failure or loss of another rank while
// NCCL still waits for that rank.

namespace {

enum class Kind : int64_t { kMean, kBroadcast };

/// Exchanges a value with all ranks, in one operation of `backend`.
template <class T>
std::vector<T> gather(Backend& backend, const T& mine) {
  const auto bytes = static_cast<int64_t>(sizeof(T));
  const at::Tensor own = at::empty({bytes}, at::kByte),
                   all = at::empty({backend.getSize(), bytes}, at::kByte);
  std::memcpy(own.data_ptr(), &mine, sizeof(T));
  backend.allgather(own, all.unbind(0)).wait();
  std::vector<T> values(static_cast<size_t>(backend.getSize()));
  std::memcpy(values.data(), all.data_ptr(), all.nbytes());
  return values;
}

/// The description of an operation, which must be equal on all ranks.
struct OpSpec {
  Kind kind;
  int64_t root;
  int64_t dtype;
  int64_t bytes;
  int64_t device;  // device number, in the order of the group's first uses
  int64_t has_communicator;
  collective::PassNumber pass;

  friend bool operator==(const OpSpec&, const OpSpec&) = default;

  std::string text() const {
    return fmt::format("{} of {} bytes of {} on its device number {}",
                       kind == Kind::kMean ? "mean" : fmt::format("broadcast(root {})", root),
                       bytes, c10::toString(static_cast<at::ScalarType>(dtype)), device + 1);
  }
};

/// Whether a rank is ready for the next step, or the error with which it failed; sent to all ranks.
struct RankReport {
  enum class State : int32_t { kBusy, kReady, kFailed };
  State state = State::kBusy;
  int32_t rank = -1;  // world rank of the rank that caused the failure
  uint16_t kind = 0;
  std::array<char, 246> text{};

  static RankReport failed(const Error& error) {
    RankReport report{State::kFailed, error.rank, static_cast<uint16_t>(error.kind)};
    error.message.copy(report.text.data(), report.text.size());
    return report;
  }
};

constexpr std::chrono::milliseconds kTellEvery{20};
/// Time limit for all communicators' destructors; longer than kDrainTimeout, the limit of each.
constexpr std::chrono::seconds kEndTimeout{12};

class NcclWork final : public collective::ReduceWork {
 public:
  /// The point in the stream at which NCCL's work ends, and the communicators' failure, if any.
  struct Enqueued {
    rpc::StreamPoint done;
    std::shared_ptr<CommunicatorFailure> failure;
  };

  NcclWork(c10::Device device, base::Future<Enqueued> enqueued)
      : device_(device), enqueued_(std::move(enqueued)) {}

  void wait() override {
    const Enqueued enqueued = enqueued_.wait();
    if (const auto error = enqueued.failure->report()) throw base::Exception(*error);
    enqueued.done.make_current_wait(device_);
  }

 private:
  const c10::Device device_;
  const base::Future<Enqueued> enqueued_;
};

/// The arguments of an operation on a device tensor, kept until the queue's thread runs it.
struct Call {
  at::Tensor tensor;
  Kind kind;
  int root;
  PassNumber pass;
  rpc::StreamPoint before;  // the operation follows the work before this point
};

class NcclReduceGroup final : public ReduceGroup {
 public:
  NcclReduceGroup(c10::intrusive_ptr<Backend> control, const Plugin& plugin, NcclTimeouts timeouts)
      : control_(std::move(control)), plugin_(plugin), timeouts_(timeouts) {
    renew_set();
    watchdog_.emplace(
        Watchdog::Options{.lost = [backend = control_.get()] { return backend->failure(); },
                          .timeout = control_->getBackendOptions()->timeout,
                          .loss_grace = timeouts_.loss_grace,
                          .world_rank = own_rank()});
    queue_.emplace(control_, "distrain-nccl");
  }

  ~NcclReduceGroup() override {
    queue_.reset();
    if (const auto lost = control_->failure()) set_->end(*lost);
    watchdog_.reset();
    set_.reset();
    detached_->wait_until(base::deadline_after(kEndTimeout));
  }

  int rank() const override { return control_->getRank(); }
  int size() const override { return control_->getSize(); }
  int world_rank(int rank) const override { return control_->world_rank(rank); }
  std::shared_ptr<ReduceGroup> duplicate() override { return nullptr; }

  WorkPtr average_async(const at::Tensor& tensor, const PassNumber& pass) override {
    return tensor.device().is_cpu() ? queue_->run(queue_->average(pass), tensor)
                                    : post(tensor, Kind::kMean, 0, pass);
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    return tensor.device().is_cpu() ? queue_->run(queue_->broadcast(root), tensor)
                                    : post(tensor, Kind::kBroadcast, root, {});
  }

  void refuse(int count, const Error& error) override {
    if (count == 0) return;
    queue_->post([this, count, error] {
      control_->refuse(count, error);
      renew_set();
    });
  }

  std::optional<Error> failure() const override {
    std::lock_guard lock(failures_mutex_);
    for (const auto& failure : failures_) {
      if (auto error = failure->unreported()) return error;
    }
    return std::nullopt;
  }

 private:
  WorkPtr post(const at::Tensor& tensor, Kind kind, int root, const PassNumber& pass) {
    base::Promise<NcclWork::Enqueued> promise;
    auto work = std::make_shared<NcclWork>(tensor.device(), promise.future());
    Call call{tensor, kind, root, pass, rpc::StreamPoint::mark(tensor.device())};
    queue_->post([this, call = std::move(call), promise = std::move(promise)]() mutable {
      try {
        promise.set(run(call));
      } catch (...) {
        promise.fail(base::current_error(ErrorKind::kInternal));
      }
    });
    return work;
  }

  // All functions below run on the queue's thread.

  // Replaces the communicators. Work that NCCL got through the old communicators still completes.
  void renew_set() {
    set_ = std::make_shared<CommunicatorSet>();
    std::lock_guard lock(failures_mutex_);
    std::erase_if(failures_, [](const std::shared_ptr<CommunicatorFailure>& failure) {
      return failure.use_count() == 1 && !failure->unreported();
    });
    failures_.push_back(set_->failure());
  }

  // Returns a report, for all ranks, of an error that occurred after wait() had returned, if any.
  RankReport take_late_failure() {
    std::optional<Error> late;
    {
      std::lock_guard lock(failures_mutex_);
      for (const auto& failure : failures_) {
        if (!failure->unreported()) continue;
        const std::optional<Error> error = failure->report();
        if (!late) late = error;
      }
    }
    return late ? RankReport::failed(*late) : RankReport{.state = RankReport::State::kReady};
  }

  NcclWork::Enqueued run(const Call& call) {
    const c10::Device device = call.tensor.device();
    rpc::make_current(device);
    const RankReport report = take_late_failure();
    if (set_->failure()->error()) renew_set();
    const size_t number = devices_.number_of(device);
    std::shared_ptr<DeviceCommunicator> communicator = set_->find(number);
    const OpSpec spec{.kind = call.kind,
                      .root = call.root,
                      .dtype = static_cast<int64_t>(call.tensor.scalar_type()),
                      .bytes = static_cast<int64_t>(call.tensor.nbytes()),
                      .device = static_cast<int64_t>(number),
                      .has_communicator = communicator != nullptr,
                      .pass = call.pass};
    try {
      agree(spec, report);
      if (!communicator) communicator = make_device_communicator(number, device);
    } catch (...) {
      renew_set();
      throw;
    }
    std::shared_ptr<Watchdog::Item> item;
    try {
      item = watchdog_->begin(set_, communicator, spec.text());
      rpc::StreamPoint done = enqueue(*communicator, call);
      watchdog_->enqueued(item, done);
      return {std::move(done), set_->failure()};
    } catch (...) {
      const Error error = cause_of(base::current_error(ErrorKind::kInternal), spec);
      watchdog_->forget(item);
      give_up(error);
    }
  }

  // Returns the cause of a failure to enqueue work: a lost rank if there is one, else `error`.
  Error cause_of(Error error, const OpSpec& spec) const {
    if (error.kind == ErrorKind::kResources) {
      const base::TimePoint limit = base::deadline_after(timeouts_.loss_grace);
      while (!control_->failure() && !set_->failure()->error() && base::Clock::now() < limit) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (auto lost = control_->failure()) return *lost;
    }
    return base::with_origin(std::move(error), own_rank(), spec.text());
  }

  static rpc::StreamPoint enqueue(DeviceCommunicator& communicator, const Call& call) {
    std::lock_guard use(communicator.in_use);
    call.before.make_wait(communicator.stream);
    rpc::use_on_stream(call.tensor, communicator.stream);
    if (call.kind == Kind::kMean) {
      communicator.nccl->allreduce_mean(call.tensor, communicator.stream);
    } else {
      communicator.nccl->broadcast(call.tensor, call.root, communicator.stream);
    }
    return rpc::StreamPoint::mark(communicator.stream);
  }

  int own_rank() const { return world_rank(rank()); }

  // Throws unless all ranks have sent the same description and no rank reports a failure.
  void agree(const OpSpec& mine, const RankReport& report) {
    struct Arrival {
      OpSpec spec;
      RankReport report;
    };
    const std::vector<Arrival> arrivals = gather(*control_, Arrival{mine, report});
    std::vector<RankReport> reports;
    for (const Arrival& arrival : arrivals) reports.push_back(arrival.report);
    if (auto error = failure_in(reports)) {
      error->op = mine.text();
      give_up(*error);
    }
    for (int i = 0; i < size(); ++i) {
      OpSpec theirs = arrivals[static_cast<size_t>(i)].spec;
      if (theirs == mine) continue;
      const std::string who = fmt::format("rank {}", world_rank(i));
      const std::string self = fmt::format("rank {}", own_rank());
      const int64_t has_communicator =
          std::exchange(theirs.has_communicator, mine.has_communicator);
      const PassNumber pass = std::exchange(theirs.pass, mine.pass);
      if (theirs != mine) {
        throw base::Exception(Error{
            ErrorKind::kInvalid,
            fmt::format("{} called {} where {} called {}", who, theirs.text(), self, mine.text()),
            world_rank(i), mine.text()});
      }
      if (auto error = collective::pass_error({world_rank(i), pass}, {own_rank(), mine.pass})) {
        error->op = mine.text();
        throw base::Exception(*error);
      }
      if (has_communicator == mine.has_communicator) continue;
      give_up({ErrorKind::kCancelled,
               (has_communicator ? self : who) +
                   " gave up an earlier operation over NCCL that other ranks had begun",
               world_rank(i), mine.text()});
    }
  }

  [[noreturn]] void give_up(const Error& error) {
    set_->end(error);
    throw base::Exception(*set_->failure()->report());  // the Watchdog's error if that came first
  }

  // Returns one error that combines the errors of all failed ranks; nullopt if no rank has failed.
  std::optional<Error> failure_in(const std::vector<RankReport>& reports) const {
    std::optional<Error> failed;
    for (size_t i = 0; i < reports.size(); ++i) {
      const RankReport& report = reports[i];
      if (report.state != RankReport::State::kFailed) continue;
      const int rank = world_rank(static_cast<int>(i));
      const std::string text = fmt::format(
          "rank {}: {}", rank,
          std::string_view(report.text.data(), strnlen(report.text.data(), report.text.size())));
      if (failed) {
        failed->message += "; " + text;
        continue;
      }
      const bool is_known = base::is_known_kind(report.kind);
      failed = Error{is_known ? static_cast<ErrorKind>(report.kind) : ErrorKind::kProtocol, text,
                     report.rank >= 0 ? report.rank : rank};
    }
    return failed;
  }

  std::shared_ptr<DeviceCommunicator> make_device_communicator(size_t number, c10::Device device) {
    const NcclId id = get_id();
    const base::TimePoint limit = base::deadline_after(timeouts_.join);
    std::shared_ptr<DeviceCommunicator> communicator;
    for (;;) {
      RankReport mine;
      try {
        if (!communicator) {
          auto nccl = plugin_.make_communicator(id, size(), rank(), device.index());
          communicator = std::make_shared<DeviceCommunicator>(std::move(nccl),
                                                              rpc::side_stream(device), detached_);
        }
        if (joined_soon(*communicator->nccl)) {
          mine.state = RankReport::State::kReady;
        } else if (base::Clock::now() > limit) {
          throw base::Exception(ErrorKind::kResources,
                                fmt::format("NCCL has not connected the group's GPUs within {} ms",
                                            timeouts_.join.count()));
        }
      } catch (...) {
        mine = RankReport::failed(base::current_error(ErrorKind::kResources));
      }
      const std::vector<RankReport> all = gather(*control_, mine);
      if (auto error = failure_in(all)) {
        error->op = "making a communicator";
        throw base::Exception(*error);
      }
      if (std::ranges::all_of(all, [](const RankReport& report) {
            return report.state == RankReport::State::kReady;
          })) {
        set_->add(number, communicator);
        return communicator;
      }
    }
  }

  // Creates an NCCL id on rank 0 and sends the id to the other ranks.
  NcclId get_id() {
    NcclId id{};
    if (rank() == 0) {
      try {
        id = plugin_.new_nccl_id();
      } catch (...) {
        control_->refuse(1, base::current_error(ErrorKind::kResources));
        throw;
      }
    }
    return gather(*control_, id)[0];
  }

  static bool joined_soon(NcclCommunicator& nccl) {
    const base::TimePoint limit = base::deadline_after(kTellEvery);
    for (;;) {
      if (nccl.joined()) return true;
      if (base::Clock::now() >= limit) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  const c10::intrusive_ptr<Backend> control_;
  const Plugin& plugin_;
  const NcclTimeouts timeouts_;
  const std::shared_ptr<DetachedTasks> detached_ = std::make_shared<DetachedTasks>();
  std::shared_ptr<CommunicatorSet> set_;
  collective::DeviceNumbers devices_;
  mutable std::mutex failures_mutex_;
  std::vector<std::shared_ptr<CommunicatorFailure>> failures_;  // of all sets that may still fail
  std::optional<Watchdog> watchdog_;
  std::optional<collective::BackendQueue> queue_;
};

/// Returns true if each rank has its own GPU, because NCCL refuses two ranks on one GPU.
bool each_has_a_gpu(rpc::Agent& agent, Backend& backend) {
  for (int rank = 0; rank < backend.getSize(); ++rank) {
    const std::string device = agent.device_of(backend.world_rank(rank));
    if (!c10::Device(device).is_cuda()) return false;
  }
  std::array<char, 64> id{};  // truncated or padded
  load().device_id(agent.device().index()).copy(id.data(), id.size());
  const auto ids = gather(backend, id);
  return std::set(ids.begin(), ids.end()).size() == ids.size();
}

}  // namespace

std::unique_ptr<ReduceGroup> make_nccl_reduce_group(c10::intrusive_ptr<Backend> control,
                                                    const Plugin& plugin, NcclTimeouts timeouts) {
  return std::make_unique<NcclReduceGroup>(std::move(control), plugin, timeouts);
}

DeviceReduceGroup make_reduce_group(rpc::Agent& agent,
                                    const c10::intrusive_ptr<collective::Backend>& backend) {
  if (each_has_a_gpu(agent, *backend)) {
    return {make_nccl_reduce_group(backend, load()), "nccl"};
  }
  return {std::make_shared<collective::StagedReduceGroup>(backend),
          rpc::is_accelerator(agent.device()) ? "staged" : ""};
}

}  // namespace distrain::cuda

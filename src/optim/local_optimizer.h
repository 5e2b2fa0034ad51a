#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/optim/distributed_optimizer.h"
#include "distrain/optim/update_rule.h"
#include "distrain/rpc/agent.h"

namespace distrain::optim {

/// One group's part of the parameters of a LocalOptimizer, in their order.
struct GroupTerms {
  OptimizerFields options;
  uint64_t parameters = 0;
  uint64_t number = 0;  ///< of the group, where it was given: for errors

  bool operator==(const GroupTerms& other) const {
    return options == other.options && parameters == other.parameters;
  }
  static constexpr auto kFields =
      std::tuple(&GroupTerms::options, &GroupTerms::parameters, &GroupTerms::number);
};

/// What all who share a LocalOptimizer have to agree on.
struct SharedTerms {
  std::vector<GroupTerms> groups;  ///< those with parameters here
  Sharing::Mode mode = Sharing::Mode::kAsync;
  int participants = 1;
  int64_t staleness = 0;

  bool operator==(const SharedTerms&) const = default;
  static constexpr auto kFields = std::tuple(&SharedTerms::groups, &SharedTerms::mode,
                                             &SharedTerms::participants, &SharedTerms::staleness);
};

/// How one participant's gradients are to be applied.
struct StepTerms {
  int participant = 0;
  double scale = 1;      ///< of the gradients
  double lr_factor = 1;  ///< of each group's learning rate
  int64_t number = 0;    ///< of the step, as the participant counts; 0: it does not
  static constexpr auto kFields = std::tuple(&StepTerms::participant, &StepTerms::scale,
                                             &StepTerms::lr_factor, &StepTerms::number);
};

/// What a participant asks for the norm with, and what it is told: squared L2 norms.
struct NormTerms {
  int participant = 0;
  double own = 0;  ///< of the gradients of its own parameters
  static constexpr auto kFields = std::tuple(&NormTerms::participant, &NormTerms::own);
};
struct Norms {
  double shared = 0;
  double own = 0;
  static constexpr auto kFields = std::tuple(&Norms::shared, &Norms::own);
};

/// Throws `invalid` if two parameters share their memory. `group_of` returns one's group.
void check_each_once(const std::vector<at::Tensor>& parameters,
                     const std::function<uint64_t(size_t)>& group_of);

using Gradients = std::vector<at::Tensor>;  ///< by parameter; undefined: none

/// Returns the mean of each parameter's gradients, summed in the order of `gathered`, of which
/// there is at least one. Undefined ones count as zero, if not all are.
Gradients mean_of(const std::vector<Gradients>& gathered);

/// The parameters of one rank that are optimised together, and the state of their update rule.
/// Thread-safe: steps are applied one at a time.
class LocalOptimizer {
 public:
  /// Counts its updates in `updates`, too.
  LocalOptimizer(rpc::Agent& agent, std::vector<at::Tensor> parameters, SharedTerms terms,
                 std::shared_ptr<std::atomic<uint64_t>> updates);

  /// From now on this process is the participant, in place of a lost one, as far as the slowest.
  void take_part(int participant, rpc::ProcessNumber process);

  /// A participant's gradients. Done when the participant may go on to its next step: kAsync, when
  /// they have been applied; kSync, when the mean of all participants' has been; kSsp, when it is
  /// not too far ahead of the slowest. Gives back how many updates there had been when it was
  /// applied, itself included. `peer_lost` if `process` is the participant no more.
  base::Future<uint64_t> step(const StepTerms& terms, Gradients gradients,
                              rpc::ProcessNumber process);

  /// The squared norms of what step() would apply. kSync: of the mean of all participants'
  /// gradients, and the mean of their `own`, the same for all of them and done when all have asked.
  /// Else of this participant's, at once.
  base::Future<Norms> norms_squared(const NormTerms& terms, Gradients gradients);

  /// `invalid` if it optimises other parameters, or otherwise.
  void check_same(const std::vector<at::Tensor>& parameters, const SharedTerms& terms) const;

  /// Where the job ends: who waits for other participants gets this error, now and from now on:
  /// one may be gone, and who has not come yet is not known. Where it goes on: nobody waits for
  /// that participant any more, nor is a step of it made.
  void on_rank_lost(const rpc::Loss& loss);
  /// It makes no steps for a while: until it makes one, nobody waits for it.
  void rest(rpc::ProcessNumber process);
  /// It makes no more steps: who waits for one, now or later, fails with `peer_lost` and its rank.
  void leave(rpc::ProcessNumber process);
  /// Whether it is one of the participants, or was.
  bool has(rpc::ProcessNumber process) const;
  /// The number of the last step that was made here of its participant, if that counts them.
  std::optional<int64_t> last_step_of(rpc::ProcessNumber process) const;

  /// Never waits for an update: that is told as one.
  std::vector<rpc::Wait> waits() const;

  std::vector<ParameterState> state() const;
  /// Changes nothing where it throws.
  void load_state(const std::vector<ParameterState>& state);
  Progress progress(int participant) const;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  // What the participants bring for one step, until all have come.
  template <class R, class Terms>
  struct Gathering {
    std::map<int, Gradients> gradients;
    std::map<int, Terms> terms;
    std::vector<base::Promise<R>> waiting;
    base::TimePoint since;  // the first one came
  };

  /// While it lives the lock is held for long.
  class Busy {
   public:
    explicit Busy(const LocalOptimizer& optimizer) : since_(optimizer.busy_since_) {
      since_ = base::Clock::now();
    }
    ~Busy() { since_ = base::TimePoint{}; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    std::atomic<base::TimePoint>& since_;
  };

  /// One of those who share the parameters.
  struct Participant {
    enum class State : uint8_t { kStepping, kResting, kLeft, kLost };
    struct Process {
      bool is_lost = false;
      bool counts = true;     // its steps have numbers
      int64_t last_step = 0;  // as it counts
    };
    State state = State::kStepping;
    int64_t steps = 0;
    std::map<rpc::ProcessNumber, Process> processes;  // that have said so; kAsync: maybe several

    bool has(rpc::ProcessNumber process) const;
    bool is_lost() const;
  };

  std::unique_lock<std::mutex> lock() const;
  void check_participant(int participant, const Gradients& gradients) const;
  int64_t slowest_locked(int but) const;
  class Completions;
  template <class R, class Terms, class Others, class Compute>
  base::Future<R> together(Gathering<R, Terms>& gathering, Others& others, const Terms& terms,
                           Gradients gradients, const Compute& compute);
  template <class IsNeeded>
  std::optional<base::Error> in_vain_locked(const IsNeeded& is_needed) const;
  template <class R, class Terms>
  void fail_if_in_vain_locked(Gathering<R, Terms>& gathering, Completions& done);
  base::Future<uint64_t> step_alone(const StepTerms& terms, const Gradients& gradients,
                                    rpc::ProcessNumber process);
  void apply_locked(const Gradients& gradients, const StepTerms& terms);
  void stop_stepping_locked(rpc::ProcessNumber process, Participant::State state);
  UpdateRule& rule_of(size_t parameter) const { return *rules_[groups_[parameter]]; }
  int64_t lead_locked(int participant) const;

  rpc::Agent& agent_;
  std::vector<at::Tensor> parameters_;
  const SharedTerms terms_;
  mutable std::mutex mutex_;
  mutable std::atomic<base::TimePoint> busy_since_{};  // written by who has the lock
  std::vector<std::unique_ptr<UpdateRule>> rules_;     // by group; each knows all by their numbers
  std::vector<size_t> groups_;                         // by parameter
  const std::shared_ptr<std::atomic<uint64_t>> updates_;  // of all optimizers of this rank
  uint64_t applied_ = 0;                                  // of this one
  std::vector<Participant> participants_;
  std::set<rpc::ProcessNumber> lost_processes_;
  Gathering<uint64_t, StepTerms> stepping_;
  Gathering<Norms, NormTerms> measuring_;
  struct Ahead {
    std::vector<base::Promise<uint64_t>> waiting;  // one
    uint64_t updates;                              // its result
    base::TimePoint since;
  };
  void complete_ahead_locked(Completions& done);
  std::multimap<int, Ahead> ahead_;  // kSsp: by participant
  std::optional<base::Error> lost_;  // the first; stays
};

/// The local optimizers of one agent, found by any of their parameters.
class LocalOptimizers final : public rpc::Layer {
 public:
  explicit LocalOptimizers(rpc::Agent& agent) : agent_(agent) {}

  /// Whether its updates are among updates(): those of parameters that others may train, too.
  enum class Counts { kYes, kNo };
  std::shared_ptr<LocalOptimizer> find_or_make(const std::vector<at::Tensor>& parameters,
                                               const SharedTerms& terms,
                                               Counts counts = Counts::kYes);
  void on_rank_lost(const rpc::Loss& loss) override;
  /// Tells the owners that were told last of this thread's steps, see note_steps().
  void on_shutdown() override;
  std::vector<rpc::Wait> waits() const override;
  /// This thread makes steps that the optimizers of these ranks may have others wait for. If it is
  /// no worker, which serves during shutdown() too, there will be none behind shutdown().
  void note_steps(const std::set<int>& owners);
  /// From now on those that there are stay until the agent ends, whoever refers to them.
  void keep_all();
  std::set<std::shared_ptr<LocalOptimizer>> all() const;
  /// Null if none has it.
  std::shared_ptr<LocalOptimizer> find(const at::Tensor& parameter);
  /// Of all of them, those that are gone included.
  UpdateCount updates() const { return updates_; }

 private:
  std::set<std::shared_ptr<LocalOptimizer>> all_locked() const;

  rpc::Agent& agent_;
  const std::shared_ptr<std::atomic<uint64_t>> updates_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  mutable std::mutex mutex_;
  std::map<const c10::TensorImpl*, std::weak_ptr<LocalOptimizer>> optimizers_;
  std::set<std::shared_ptr<LocalOptimizer>> kept_;
  std::set<int> owners_;           // that hear of shutdown()
  std::optional<rpc::Loss> lost_;  // that ends the job
};

/// What LocalOptimizers::on_shutdown() calls on the owners.
void leave_here(rpc::CallContext& call);

}  // namespace distrain::optim

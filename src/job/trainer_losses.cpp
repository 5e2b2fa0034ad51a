#include "trainer_losses.h"

#include <numeric>
#include <utility>
#include <vector>

#include "distrain/optim/distributed_optimizer.h"
#include "distrain/rpc/of_local.h"

namespace distrain::job {

namespace {

/// On each rank.
class LossPreparation {
 public:
  LossPreparation(rpc::Agent& agent, EventSink& sink) : agent_(agent), sink_(sink) {}

  void prepare(bool may_be_lost) {
    optim::keep_optimizers(agent_);
    if (may_be_lost) sink_.may_be_lost();
  }
  void rest(uint32_t process) { optim::rest(agent_, process); }

 private:
  rpc::Agent& agent_;
  EventSink& sink_;
};

}  // namespace

void ask_all(rpc::Agent& agent, const std::function<base::Future<void>(int rank)>& ask) {
  std::vector<std::pair<int, base::Future<void>>> asked;
  for (int rank = 0; rank < agent.world_size(); ++rank) {
    if (!agent.is_done_without(rank)) asked.emplace_back(rank, ask(rank));
  }
  for (const auto& [rank, answer] : asked) {
    const auto& result = answer.wait_result();
    if (!result.ok() && !agent.is_done_without(rank)) throw base::Exception(result.error());
  }
}

TrainerLosses::TrainerLosses(rpc::Agent& agent, int first_rank, int trainers, int least)
    : agent_(agent), first_rank_(first_rank), trainers_(trainers), least_(least) {}

void TrainerLosses::expose(rpc::Agent& agent, EventSink& sink) {
  agent.provide(std::make_shared<LossPreparation>(agent, sink));
  agent.expose<rpc::of_local<&LossPreparation::prepare>>("job.prepare_for_losses");
  agent.expose<rpc::of_local<&LossPreparation::rest>>("job.rest");
}

void TrainerLosses::begin() {
  ask_all(agent_, [this](int rank) {
    return agent_.rpc_async<rpc::of_local<&LossPreparation::prepare>>(
        rank, rank != 0 && trainer_of(rank).has_value());
  });
  go_on_without_any(true);
}

void TrainerLosses::end() { go_on_without_any(false); }

// Rank 0 itself cannot be done without.
void TrainerLosses::go_on_without_any(bool may_return) const {
  std::vector<int> ranks(static_cast<size_t>(trainers_));
  std::iota(ranks.begin(), ranks.end(), first_rank_);
  agent_.go_on_without(ranks, least_,
                       "fewer trainers are left than --min-trainers " + std::to_string(least_),
                       may_return);
}

std::optional<int> TrainerLosses::trainer_of(int rank) const {
  const int trainer = rank - first_rank_;
  return trainer >= 0 && trainer < trainers_ ? std::optional(trainer) : std::nullopt;
}

// Nobody waits for answers: a lost rank has none, and who waits for its steps hears of it.
void TrainerLosses::rest(int trainer) const {
  const int rank = first_rank_ + trainer;
  const uint32_t process = rpc::process_number(rank, agent_.worker(rank).incarnation);
  for (int other = 0; other < agent_.world_size(); ++other) {
    if (!agent_.is_here(other)) continue;
    static_cast<void>(agent_.rpc_async<rpc::of_local<&LossPreparation::rest>>(other, process));
  }
}

}  // namespace distrain::job

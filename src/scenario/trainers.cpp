#include "trainers.h"

#include <numeric>

#include "distrain/base/error.h"

namespace distrain::scenario {

namespace {

constexpr uint16_t kCollectiveChannel = 2;

}  // namespace

optim::Sharing sharing_by_mode(const std::string& mode, int trainers, int participant,
                               int64_t staleness) {
  using Mode = optim::Sharing::Mode;
  optim::Sharing sharing;
  sharing.mode = mode == "sync" ? Mode::kSync : mode == "ssp" ? Mode::kSsp : Mode::kAsync;
  sharing.participants = trainers;
  sharing.participant = participant;
  sharing.staleness = staleness;
  return sharing;
}

c10::intrusive_ptr<collective::Backend> trainers_backend(rpc::Agent& agent, int first, int trainers,
                                                         const Job& job) {
  std::vector<int> ranks(static_cast<size_t>(trainers));
  std::iota(ranks.begin(), ranks.end(), first);
  collective::Backend::Settings settings;
  settings.timeout = std::chrono::milliseconds(static_cast<int64_t>(job.rpc_timeout_s * 1000));
  return c10::make_intrusive<collective::Backend>(agent.open_channel(kCollectiveChannel),
                                                  agent.executor(),
                                                  collective::Group{0, std::move(ranks)}, settings);
}

void refuse_other_data(int rank, const std::string& what_must_agree) {
  throw base::Exception(base::Error{base::ErrorKind::kBadData,
                                    "trainer " + std::to_string(rank) +
                                        " has read other data than the others: " + what_must_agree +
                                        " must be the same",
                                    rank, "attach"});
}

}  // namespace distrain::scenario

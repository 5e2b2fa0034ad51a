#include "distrain/job/rank.h"

#include <cmath>
#include <numeric>

#include "distrain/cuda/nccl_reduce_group.h"

namespace distrain::job {

const Group& Rank::group(const std::string& role) {
  if (const auto it = groups_.find(role); it != groups_.end()) return it->second;
  const Roles::Role& ranks = roles_.named(role);
  if (!ranks.has(number())) {
    base::invalid(name() + " is not of the role " + role + ", so not in its group");
  }
  if (groups_closed_) {
    base::invalid("the group of the role " + role + " is to be made before the training");
  }
  std::vector<int> members(static_cast<size_t>(ranks.count));
  std::iota(members.begin(), members.end(), ranks.first);
  constexpr int kFirstGroupChannel = 16;  // the layers below use the lower channels
  collective::Backend::Settings settings;
  settings.timeout = std::chrono::milliseconds(std::llround(job().collective_timeout_s * 1000));
  const auto backend = c10::make_intrusive<collective::Backend>(
      agent_.open_channel(static_cast<uint16_t>(kFirstGroupChannel + ranks.first)),
      agent_.executor(), collective::Group{0, std::move(members)}, settings);
  auto [reduce, how] = cuda::make_reduce_group(agent_, backend);
  if (!how.empty()) {
    sink().emit("ddp", {{"ddp", how}});
    fields()["ddp"] = how;
  }
  return groups_.emplace(role, Group{backend, std::move(reduce)}).first->second;
}

}  // namespace distrain::job

#include <numeric>

#include <ATen/core/grad_mode.h>

#include "operations.h"

namespace distrain::collective {

namespace {

using Team = std::vector<int>;

/// An allreduce in chunks; see Note [Algorithms], whose step 1 is step 0 here. In the first steps,
/// one for each of this rank's teams, each rank of the *team* gets its part from the others and
/// reduces it. In the other steps, for the same teams in reverse order, it sends them the result.
class ChunkedAllreduce final : public Operation {
 public:
  ChunkedAllreduce(const OpSpec& spec, base::TimePoint deadline, int rank, std::vector<Team> teams,
                   at::Tensor tensor)
      : Operation(spec, deadline, 2 * static_cast<int>(teams.size())),
        rank_(rank),
        teams_(std::move(teams)),
        tensor_(std::move(tensor)) {}

 private:
  int last_step() const { return 2 * static_cast<int>(teams_.size()) - 1; }
  bool is_reduction(int step) const { return step < std::ssize(teams_); }
  bool is_of_first_team(int step) const { return step == 0 || step == last_step(); }
  const Team& team(int step) const { return teams_[is_of_first_team(step) ? 0 : 1]; }
  // Returns the index of `rank` in the step's team, or the team's size if it is not a member.
  size_t index_of(int step, int rank) const {
    return static_cast<size_t>(std::ranges::find(team(step), rank) - team(step).begin());
  }
  ByteRange own_chunk() const { return part(0, index_of(0, rank_)); }
  // Returns the part of member `index` of a step's team, of the tensor or of this rank's chunk.
  ByteRange part(int step, size_t index) const {
    OpSpec whole = spec();
    if (!is_of_first_team(step)) whole.bytes = own_chunk().size;
    return chunk_of(whole, static_cast<int>(index), static_cast<int>(team(step).size()));
  }

  bool expects(int step, int from) const override {
    return from != rank_ && index_of(step, from) < team(step).size();
  }
  size_t expected_bytes(int step, int from) const override {
    return part(step, index_of(step, is_reduction(step) ? rank_ : from)).size;
  }
  size_t sent_bytes(int to) const override {
    const int step = expects(0, to) ? 0 : 1;
    return part(step, index_of(step, to)).size;
  }
  // Over hosts also if a refusal is the cause, because the ranks of other hosts count on an answer:
  // see Note [Window of a group].
  bool tells_others() const override { return teams_.size() > 1; }

  void start() override {
    const at::NoGradGuard no_grad;
    work_ = tensor_.contiguous();
    send_parts(0, bytes_of(work_));
  }

  void run_step(int step) override {
    if (step == 0) chunk_ = core().allocate(own_chunk().size);
    uint8_t* const chunk = chunk_->data;
    const bool is_last = step == last_step();
    // This rank's own part of the data that it has sent for `step`.
    uint8_t* const own = step == 0 ? bytes_of(work_) + own_chunk().begin
                         : is_last ? chunk
                                   : chunk + part(step, index_of(step, rank_)).begin;
    if (is_reduction(step)) {
      std::vector<const uint8_t*> inputs;
      for (const int from : team(step)) {
        inputs.push_back(from == rank_ ? own : input(step, from).data());
      }
      reduce(spec().reduce_op, spec().dtype, inputs,
             part(step, index_of(step, rank_)).size / c10::elementSize(spec().dtype),
             step == 0 ? chunk : own);
      return send_parts(step + 1, chunk);
    }
    uint8_t* const result = is_last ? bytes_of(work_) : chunk;
    for (size_t i = 0; i < team(step).size(); ++i) {
      const auto [begin, size] = part(step, i);
      const int from = team(step)[i];
      if (from != rank_) {
        std::ranges::copy(input(step, from), result + begin);
      } else if (is_last) {
        std::copy_n(own, size, result + begin);
      }
    }
    if (!is_last) return send_parts(step + 1, chunk);
    if (work_.is_same(tensor_)) return;
    const at::NoGradGuard no_grad;
    tensor_.copy_(work_);
  }

  // Sends each other member of the team its part of `data`, or this rank's part after a reduction.
  // Does not copy the data, because the sent memory changes only when its receivers have answered.
  void send_parts(int step, const uint8_t* data) {
    struct Sent {
      alignas(64) uint8_t header[kHeaderBytes];
      at::Tensor tensor;
      base::BufferPtr chunk;
    };
    auto sent = std::make_shared<Sent>();
    sent->tensor = work_;
    sent->chunk = chunk_;
    encode_header(spec(), step, sent->header);
    core().send_each([&](int to) {
      if (!expects(step, to)) return;
      const auto [begin, bytes] = part(step, index_of(step, is_reduction(step) ? to : rank_));
      const std::span<const uint8_t> pieces[] = {sent->header,
                                                 {data + (step == last_step() ? 0 : begin), bytes}};
      core().send(to, number(), step, pieces, sent);
    });
  }

  const int rank_;
  const std::vector<Team> teams_;  // the whole group; or the host, and ranks of all hosts
  const at::Tensor tensor_;        // the caller's
  at::Tensor work_;                // the same if that is contiguous
  base::BufferPtr chunk_;          // this rank's chunk
};

}  // namespace

Hosts find_hosts(const rpc::Channel& channel, const Core& core) {
  Hosts hosts;
  std::vector<std::string> keys;
  for (int rank = 0; rank < core.size(); ++rank) {
    std::string key = channel.host_of(core.world_rank(rank));
    if (key.empty()) return {};
    const auto place = static_cast<size_t>(std::ranges::find(keys, key) - keys.begin());
    if (place == keys.size()) {
      keys.push_back(std::move(key));
      hosts.emplace_back();
    }
    hosts[place].push_back(rank);
  }
  const bool are_equal = std::ranges::all_of(
      hosts, [&](const std::vector<int>& host) { return host.size() == hosts[0].size(); });
  if (hosts.size() < 2 || hosts[0].size() < 2 || !are_equal) return {};
  return hosts;
}

std::shared_ptr<Operation> make_chunked_allreduce(const OpSpec& spec, base::TimePoint deadline,
                                                  int rank, int size, const Hosts& hosts,
                                                  const at::Tensor& tensor) {
  std::vector<Team> teams(1);
  if (hosts.empty()) {
    teams[0].resize(static_cast<size_t>(size));
    std::iota(teams[0].begin(), teams[0].end(), 0);
  } else {
    const auto place_in = [rank](const Team& host) { return std::ranges::find(host, rank); };
    const auto own =
        std::ranges::find_if(hosts, [&](const Team& host) { return place_in(host) != host.end(); });
    const auto place = static_cast<size_t>(place_in(*own) - own->begin());
    teams[0] = *own;
    Team& over_hosts = teams.emplace_back();
    for (const Team& host : hosts) over_hosts.push_back(host[place]);
  }
  return std::make_shared<ChunkedAllreduce>(spec, deadline, rank, std::move(teams), tensor);
}

}  // namespace distrain::collective

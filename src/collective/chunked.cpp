#include <ATen/core/grad_mode.h>

#include "operations.h"

namespace distrain::collective {

namespace {

/// An allreduce over hosts; see Note [Algorithms], whose step 1 is step 0 here. In steps 0 and 1
/// each rank of a *team* gets its part from the others and reduces it; in steps 2 and 3 it sends
/// them the result.
class AllreduceOverHosts final : public Operation {
 public:
  AllreduceOverHosts(const OpSpec& spec, base::TimePoint deadline, const Hosts& hosts, int rank,
                     at::Tensor tensor)
      : Operation(spec, deadline, 4), tensor_(std::move(tensor)) {
    const auto own = std::ranges::find_if(hosts, [rank](const std::vector<int>& host) {
      return std::ranges::find(host, rank) != host.end();
    });
    place_ = static_cast<size_t>(std::ranges::find(*own, rank) - own->begin());
    host_ = static_cast<size_t>(own - hosts.begin());
    of_host_ = *own;
    for (const std::vector<int>& host : hosts) over_hosts_.push_back(host[place_]);
  }

 private:
  static bool is_in_host(int step) { return step == 0 || step == 3; }
  static bool is_reduction(int step) { return step < 2; }
  const std::vector<int>& team(int step) const { return is_in_host(step) ? of_host_ : over_hosts_; }
  size_t own_index(int step) const { return is_in_host(step) ? place_ : host_; }
  size_t index_of(int step, int rank) const {
    return static_cast<size_t>(std::ranges::find(team(step), rank) - team(step).begin());
  }
  ByteRange own_chunk() const { return part(0, place_); }
  // Returns the part of member `index` of a step's team, of the tensor or of this rank's chunk.
  ByteRange part(int step, size_t index) const {
    OpSpec whole = spec();
    if (!is_in_host(step)) whole.bytes = own_chunk().size;
    return chunk_of(whole, static_cast<int>(index), static_cast<int>(team(step).size()));
  }

  bool expects(int step, int from) const override {
    return from != core().rank() && index_of(step, from) < team(step).size();
  }
  size_t expected_bytes(int step, int from) const override {
    return part(step, is_reduction(step) ? own_index(step) : index_of(step, from)).size;
  }
  size_t sent_bytes(int to) const override { return part(expects(0, to) ? 0 : 1, 0).size; }
  // Also if a refusal is the cause, because the ranks of other hosts count on an answer: see
  // Note [Window of a group].
  bool tells_others() const override { return true; }

  void start() override {
    const at::NoGradGuard no_grad;
    work_ = tensor_.contiguous();
    send_parts(0, bytes_of(work_));
  }

  void run_step(int step) override {
    if (step == 0) chunk_ = core().allocate(own_chunk().size);
    uint8_t* const chunk = chunk_->data;
    // This rank's own part of the data that it has sent for `step`.
    uint8_t* const own = step == 0   ? bytes_of(work_) + own_chunk().begin
                         : step == 3 ? chunk
                                     : chunk + part(step, host_).begin;
    if (is_reduction(step)) {
      std::vector<const uint8_t*> inputs;
      for (const int from : team(step)) {
        inputs.push_back(from == core().rank() ? own : input(step, from).data());
      }
      reduce(spec().reduce_op, spec().dtype, inputs,
             part(step, own_index(step)).size / c10::elementSize(spec().dtype),
             step == 0 ? chunk : own);
      return send_parts(step + 1, chunk);
    }
    uint8_t* const result = step == 2 ? chunk : bytes_of(work_);
    for (size_t i = 0; i < team(step).size(); ++i) {
      const auto [begin, size] = part(step, i);
      const int from = team(step)[i];
      if (from != core().rank()) {
        std::ranges::copy(input(step, from), result + begin);
      } else if (step == 3) {
        std::copy_n(own, size, result + begin);
      }
    }
    if (step == 2) return send_parts(3, chunk);
    if (work_.is_same(tensor_)) return;
    const at::NoGradGuard no_grad;
    tensor_.copy_(work_);
  }

  // Sends each other member of the team its part of `data`, or this rank's part after a reduction.
  // The sent memory changes only when its receivers have answered.
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
    const size_t size = team(step).size(), own = own_index(step);
    for (size_t i = 1; i < size; ++i) {
      const size_t to = (own + i) % size;
      const auto [begin, bytes] = part(step, is_reduction(step) ? to : own);
      const std::span<const uint8_t> pieces[] = {sent->header,
                                                 {data + (step == 3 ? 0 : begin), bytes}};
      core().send(team(step)[to], number(), step, pieces, sent);
    }
  }

  std::vector<int> of_host_, over_hosts_;  // the teams
  size_t place_ = 0, host_ = 0;            // this rank's place in them
  const at::Tensor tensor_;                // the caller's
  at::Tensor work_;                        // the same if that is contiguous
  base::BufferPtr chunk_;                  // this rank's chunk
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

std::shared_ptr<Operation> make_allreduce_over_hosts(const OpSpec& spec, base::TimePoint deadline,
                                                     const Hosts& hosts, int rank,
                                                     const at::Tensor& tensor) {
  return std::make_shared<AllreduceOverHosts>(spec, deadline, hosts, rank, tensor);
}

}  // namespace distrain::collective
